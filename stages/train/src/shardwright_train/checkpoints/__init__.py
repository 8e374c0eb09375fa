"""Saved state: what a checkpoint is, where it lies, which one to go on from, and how it is written and read."""
