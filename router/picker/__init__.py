"""The gateway's decisions for another proxy: an endpoint picker, asked over Envoy's external processing."""
