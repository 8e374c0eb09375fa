"""The dry run: a plan's step without its cluster."""
