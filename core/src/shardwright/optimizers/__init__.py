"""The home of optimizers: what each keeps for a parameter and moves in a step."""
