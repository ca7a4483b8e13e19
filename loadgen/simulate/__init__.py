"""A fleet in virtual time: the production router, scheduler and cache on emulated GPUs, in one process, no sockets."""
