"""Trains a Transformer exactly as a Shardwright plan says, and measures plans."""
