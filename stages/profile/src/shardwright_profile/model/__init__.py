"""Model profiles: probes, their measured times and memory, and the curves through these."""
