"""Training with a plan."""
