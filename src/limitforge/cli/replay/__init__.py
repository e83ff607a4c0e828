"""`limitforge replay`: run the steps of a file against limits, on a simulated clock."""
