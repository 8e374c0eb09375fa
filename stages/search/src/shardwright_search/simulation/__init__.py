"""The simulation of a step, and its trace."""
