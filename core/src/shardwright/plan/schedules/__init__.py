"""Schedules: the order of passes on each pipeline stage, what is in flight, and how long a step takes."""
