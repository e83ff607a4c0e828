"""What operators see of limitforge: log events today."""
