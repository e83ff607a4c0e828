-- Leases of concurrency limits: released or renewed by their token, in every bucket where they hold slots.
--
-- KEYS: those buckets. ARGV: the token. Answers { 1 } if all were still held, { 0 } if any was not, { -1, key } if a key holds something that is not
-- ours. What holds nothing is neither written nor deleted.

local buckets, concurrency = use('buckets'), use('concurrency')

local function lease_call(change, now, injected)
  local call = buckets.read(now, injected)
  for key = 1, #KEYS do
    if buckets.state(call, key, concurrency) == nil then return { -1, key } end
  end
  local held = 1
  for key = 1, #KEYS do
    local state = buckets.state(call, key, concurrency)
    local work = state and not buckets.gone(state, now) and buckets.open(call, key, concurrency, concurrency.numbers(state))
    if work and concurrency[change](work, ARGV[2]) then
      concurrency.seal(work)
      buckets.keep(call, key, concurrency, work)
    else
      held = 0
    end
  end
  buckets.write(call)
  return { held }
end

return lease_call
