"""Profiles estimated from shapes and a table of devices."""
