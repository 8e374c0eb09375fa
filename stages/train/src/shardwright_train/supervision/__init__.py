"""What the launcher of a run does around its ranks: tries them, starts them anew, plans for the nodes that are left."""
