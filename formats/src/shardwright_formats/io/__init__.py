"""Reading files strictly and writing them atomically."""
