"""Importers that turn published profiles of other systems into this project's own files.

Numbers are converted, never invented: each has its source, and what a file does not have is marked absent.
"""
