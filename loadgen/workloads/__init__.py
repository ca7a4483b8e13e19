"""What is asked: sessions of turns whose prompts are pieces of text, all decided by a seed."""
