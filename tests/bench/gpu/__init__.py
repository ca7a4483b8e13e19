"""`python -m tests.bench.gpu`: the CUDA engine compared with its card's roofline and with transformers."""

SECTIONS = ("products", "decode", "prefill", "ttft", "promotion", "transformers", "profile")
"""The parts that can be measured separately, in this order."""
