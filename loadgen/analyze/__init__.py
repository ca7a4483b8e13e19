"""What a log of prompts would gain from prefix caching."""
