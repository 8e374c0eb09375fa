"""Certificates of a search's bound: making them, and checking them without a search."""
