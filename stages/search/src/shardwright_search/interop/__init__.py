"""Plans from and for other systems."""
