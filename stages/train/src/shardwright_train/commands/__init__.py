"""The commands in the process that the user starts, which launches the ranks."""
