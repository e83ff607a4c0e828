"""Compare three shards with one Redis, and prepaid limits with exact ones."""
