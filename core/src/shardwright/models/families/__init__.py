"""Facts of each family, one file for each family or for families that differ only in keys and biases."""
