"""Optimizers: the states that each keeps for a parameter, and the bytes that it moves in a step."""
