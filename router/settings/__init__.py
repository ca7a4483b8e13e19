"""Groups of the gateway's settings; `router/config.py` joins them."""
