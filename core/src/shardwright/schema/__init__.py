"""Generators of JSON Schemas from the types."""
