"""What may be chosen, and a configuration as numbers for the solver."""
