"""Checkpoints: their format and folders, writing and reading them, and choosing the one to resume from."""
