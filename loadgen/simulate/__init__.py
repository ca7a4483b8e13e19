"""A fleet in virtual time: production router, scheduler and cache on emulated GPUs, in one process, no sockets."""
