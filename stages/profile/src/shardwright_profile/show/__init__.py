"""Profiles as tables and pictures."""
