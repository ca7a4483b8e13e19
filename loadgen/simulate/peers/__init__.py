"""Other routers' published decisions, with their defaults and with the data they really have. No code is theirs."""
