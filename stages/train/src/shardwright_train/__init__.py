"""Trains a Transformer exactly as a Shardwright plan specifies, and measures plans."""
