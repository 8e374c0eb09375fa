"""Generators from the types: JSON Schemas and docs/formats.md."""
