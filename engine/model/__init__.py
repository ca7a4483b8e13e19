"""Decoder models from Hugging Face checkpoints."""
