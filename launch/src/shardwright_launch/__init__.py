"""Starts the ranks of a run on one or several nodes, watches them, and says which of them failed first."""
