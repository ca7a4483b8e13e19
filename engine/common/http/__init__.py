"""HTTP connections of clients, kept and opened ahead of need. The gateway and the load generator use them."""
