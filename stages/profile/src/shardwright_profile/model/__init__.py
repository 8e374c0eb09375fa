"""Model profiles: probes, their measured times and memory, and curves fitted to them."""
