"""Certificates of a search's bound: how they are made, and how they are checked without the search."""
