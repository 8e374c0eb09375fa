"""Text into tokens, and tokens into the samples of each step."""
