"""Which nodes to rent: the front of step time against price over all sub-clusters."""
