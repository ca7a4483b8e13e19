"""Groups of the gateway's settings; `router/settings/gateway.py` joins them."""
