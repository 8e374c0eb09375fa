"""What a model takes on a cluster that nobody has measured, the best plan, and choices of the user's own beside it."""
