"""Facts of each family of Transformers, without torch; the only source of them for all other packages."""
