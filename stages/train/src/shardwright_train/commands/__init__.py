"""The work of each command in the process that the user starts; ranks are started here, and do their part elsewhere."""
