"""Weights in and out: folders of Hugging Face into the shards of a plan, and checkpoints back into such folders."""
