"""Model profiles: probes, what they took, and the curves through it."""
