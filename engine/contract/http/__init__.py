"""An HTTP/1.1 client for engines, used by the gateway and the load generator: connections, and a pool of them."""
