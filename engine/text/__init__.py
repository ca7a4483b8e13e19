"""Text to tokens and back: tokenizer, chat template, prefix-key spans, incremental decoding, stop strings; no torch."""
