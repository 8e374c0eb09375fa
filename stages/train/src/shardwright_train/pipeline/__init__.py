"""A rank's pipeline stage, and the passes of its training step."""
