"""Explanations of a plan: its terms by pipeline stage, what limits it, and what would help."""
