"""`python -m tests.bench.gpu`: the CUDA engine against its card's roofline and against transformers."""

SECTIONS = ("products", "decode", "prefill", "ttft", "promotion", "transformers", "profile")
"""What can be measured apart from the rest, in this order."""
