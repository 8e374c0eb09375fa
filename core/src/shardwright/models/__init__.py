"""Facts of each family of Transformers, without torch; all other packages read them here."""
