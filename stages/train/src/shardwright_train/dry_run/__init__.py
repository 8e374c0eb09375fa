"""A plan's step without its cluster."""
