"""The home of devices: one table of published figures, each with its source, and whatever is looked up by a device."""
