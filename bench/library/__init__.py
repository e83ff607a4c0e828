"""The async library on Redis beside its peers: one process, uvloop, many callers at once and a lone one."""
