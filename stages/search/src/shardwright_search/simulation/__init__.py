"""The simulation of a step, and its export as a trace."""
