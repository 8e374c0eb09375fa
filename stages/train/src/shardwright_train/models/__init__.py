"""The runtime's model families: their blocks, and how these are sharded."""
