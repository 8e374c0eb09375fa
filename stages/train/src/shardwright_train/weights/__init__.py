"""Weights: Hugging Face folders read into a plan's shards, and checkpoints exported as such folders."""
