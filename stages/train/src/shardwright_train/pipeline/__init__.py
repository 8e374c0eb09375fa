"""The pipeline stage of a rank, and its step."""
