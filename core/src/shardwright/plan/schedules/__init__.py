"""Schedules: the order of passes on each pipeline stage, the micro-batches in flight, and the time of a step."""
