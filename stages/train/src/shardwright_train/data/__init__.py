"""Text into tokens, and tokens or images into the samples of each step."""
