-- Release or renew a lease by its token, in every bucket in which it holds slots.
--
-- KEYS      the buckets
-- ARGV[2]   the token
--
-- Replies { 1 } if every slot was still held, { 0 } if any was not, { -1, key } if a key holds a foreign value. Buckets
-- in which the lease holds nothing are neither written nor deleted.

local buckets, concurrency = use('buckets'), use('concurrency')

return function(operation, now, injected)
  local call = buckets.read(now, injected)
  for key = 1, #KEYS do
    if buckets.state(call, key, concurrency) == nil then return { -1, key } end
  end
  local all_held = 1
  for key = 1, #KEYS do
    local state = buckets.state(call, key, concurrency)
    local is_live = state and not buckets.is_expired(state, now)
    local opened = is_live and buckets.open(call, key, concurrency, concurrency.parameters(state))
    if opened and concurrency[operation](opened, ARGV[2]) then
      concurrency.seal(opened)
      buckets.keep(call, key, concurrency, opened)
    else
      all_held = 0
    end
  end
  buckets.write(call)
  return { all_held }
end
