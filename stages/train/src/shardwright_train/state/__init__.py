"""What a run leaves on disk to be continued from."""
