"""What users ask: sessions of turns whose prompts are pieces of text, all determined by a seed."""
