"""Where text comes from: files, JSON lines, folders of `datasets` and dumps of Wikipedia, piece by piece."""
