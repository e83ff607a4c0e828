-- Count the live processes: a sorted set of process names by the time until which they count as alive.
--
-- KEYS         the set
-- ARGV[2]      the name of the process
-- request[3]   ttl_us (0: remove the process)
--
-- Replies { number of live processes }.

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
