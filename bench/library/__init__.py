"""Compare the async library on Redis with its peers: one process, uvloop, many concurrent callers and a single one."""
