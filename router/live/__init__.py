"""What operators see of a running gateway: a page at /ui of the administration port, and `top` for a terminal."""
