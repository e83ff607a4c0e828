"""`limitforge burst`: fire checks at limits on a schedule, and draw what happens."""
