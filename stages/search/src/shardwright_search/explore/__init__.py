"""`shardwright explore`: a page on this machine, on which each change is searched at once."""
