"""Supervision of a run's ranks by its launcher: restarts, and plans for the nodes that are left."""
