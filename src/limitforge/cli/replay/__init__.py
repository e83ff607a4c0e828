"""`limitforge replay`: run the steps of a file against limits, on a clock of its own."""
