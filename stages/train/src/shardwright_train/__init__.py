"""Trains a Transformer exactly as a Shardwright plan says, and measures what plans take."""
