-- Leases of concurrency limits: released or renewed by their token, in every bucket where they hold slots.
--
-- KEYS: those buckets. ARGV: the token. Answers { 1 } if all were still held, { 0 } if any was not, { -1, key } if a key holds something that is not ours.
-- What holds nothing is neither written nor deleted.

local function lease_call(change, now, injected)
  local call = new_call(now, injected)
  read_keys(call)
  local held = 1
  for key = 1, #KEYS do
    if state_of(call, key, CONCURRENCY) == nil then return { -1, key } end
  end
  for key = 1, #KEYS do
    local state = call.states[key]
    local work = not is_gone(state, now) and open_state(state, concurrency, concurrency.numbers(state), now)
    if work and change(work, ARGV[2]) then
      concurrency.seal(work)
      keep_state(call, key, work)
    else
      held = 0
    end
  end
  write_states(call)
  return { held }
end
