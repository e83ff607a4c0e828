"""Log events."""
