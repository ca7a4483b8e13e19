"""Other routers' published decisions, each with its defaults and with what it really sees. None is their code."""
