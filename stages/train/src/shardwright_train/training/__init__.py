"""The training loop: steps, evaluation, checkpoints, metrics and stops."""
