"""`limitforge burst`: send checks on a schedule, and draw what happens."""
