"""The optimizer over sharded parameters, its learning rate and the scale of the loss."""
