"""What a simulated step looks like: as a picture and as a trace."""
