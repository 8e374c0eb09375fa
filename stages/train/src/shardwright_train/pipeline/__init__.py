"""One rank's pipeline stage and its step."""
