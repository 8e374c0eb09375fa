"""The commands of the search stage."""
