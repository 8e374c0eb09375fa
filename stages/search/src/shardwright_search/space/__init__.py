"""The space of plans, and a configuration as numbers for the solver."""
