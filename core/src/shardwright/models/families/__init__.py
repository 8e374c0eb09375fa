"""Facts of each family, in one file per family or for families that differ in keys and biases alone."""
