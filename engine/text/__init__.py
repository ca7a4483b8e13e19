"""Text in, text out: tokenizer, chat template, prefix-key spans, detokenizing, stop strings."""
