"""What plans take."""
