"""Data: text tokenized, and tokens, images or sounds turned into the samples of each step."""
