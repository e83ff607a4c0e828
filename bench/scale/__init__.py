"""What shards and leases bring: three shards beside one Redis, leased limits beside exact ones."""
