"""Measurement of the time and memory of plans."""
