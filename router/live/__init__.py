"""What operators see of a gateway as it happens: a page at /ui of the administrators' port, and a terminal's `top`."""
