"""Measures hardware, writes the probes of a model, and fits model profiles to their measurements."""
