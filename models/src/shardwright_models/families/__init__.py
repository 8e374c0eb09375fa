"""One file of facts for each family, or for families that differ in keys and biases alone."""
