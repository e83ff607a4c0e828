-- Which nodes are alive: a sorted set of their names by when they were last heard of.
--
-- KEYS: the set. ARGV: the node's name. request: ttl_us (0: it leaves). Answers { how many are alive, this one included unless it left }.

local format = string.format

return function(request, now)
  local ttl_us, name = request[3], ARGV[2]
  if ttl_us == 0 then
    redis.call('ZREM', KEYS[1], name)
  else
    redis.call('ZADD', KEYS[1], format('%.0f', now + ttl_us), name)
    redis.call('PEXPIRE', KEYS[1], format('%d', math.ceil(ttl_us / 1000) + 60000))
  end
  redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', format('%.0f', now))
  return { redis.call('ZCARD', KEYS[1]) }
end
