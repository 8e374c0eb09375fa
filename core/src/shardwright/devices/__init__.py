"""The home of devices: one table of published figures with their sources, and whatever is looked up by device."""
