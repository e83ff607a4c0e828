"""The service beside its peers, each a process of its own on one Redis, loaded with `wrk` in interleaved rounds."""
