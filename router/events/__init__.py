"""KV events of vLLM and SGLang, from their sockets to the index."""
