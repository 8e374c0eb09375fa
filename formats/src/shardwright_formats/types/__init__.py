"""The values that files hold."""
