"""Text corpora: files, JSON lines, folders of `datasets` and dumps of Wikipedia, read piece by piece."""
