"""Importers that turn published profiles of other systems into this project's own files.

Numbers are converted, never invented: each carries its source, and what a file lacks stays absent.
"""
