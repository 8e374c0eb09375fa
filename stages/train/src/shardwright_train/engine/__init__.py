"""A plan on one rank, ready to train: its pipeline stage, its place in the pipeline, and its optimizer."""
