-- The buckets of one script call: read with one MGET, opened as the checks need them, written once each if changed.
--
-- A bucket is stored as one string:
--
--   version  1 byte    the format of the writer; never 0
--   code     1 byte    the algorithm
--   width    1 byte    length of the fixed part, including these three bytes
--   last_us  7 bytes   when it was last written, in microseconds
--   until_us 7 bytes   when the bucket expires, which is also when it resets (a ledger takes it from its entries)
--   ...                the fields of the algorithm, then the entries of a ledger
--   pending  30 bytes each: open reservations and prepaid shares, sorted by lapse (pending.lua)
--
-- The fixed part only ever grows at its end. A release ignores the fields of a newer one, and has defaults for those
-- that an older one did not write. So two releases can use the same keys during a deploy.
--
-- In a script call a state is a table with the same fields. `seal` sets `until_us` and `used`, which is what counts
-- against the limit, rounded up. An opened state is a copy, which replaces the stored one only when something was
-- taken. `read` uses the same table for every stored state of an algorithm (except ledgers): use it before the next
-- `read`.
--
-- A call is a table, to which check.lua and finish_holds.lua add fields of their own:
--   now            the time in microseconds
--   injected       true if the caller sent the time, false if it is that of the clock of Redis
--   values[key]    false if the key does not exist, its string, or a state. An empty string, which is never written,
--                  stands for a value of another type.
--   changed[key]   the algorithm of a bucket that is to be written
--   expiries[key]  its `until_us`, if values[key] is already the string to write
--   is_new[key]    true if the key does not exist, and so has no TTL to keep
--   budget         bounds how many buckets may be created (new_buckets.lua), or nil

local byte, ceil, format, sub, type = string.byte, math.ceil, string.format, string.sub, type

local PENDING_WIDTH = 30
local MARGIN_MS = 60000            -- a key outlives `until_us` by a minute; the TTL only frees memory
local INJECTED_MARGIN_MS = 3600000 -- with an injected time, the clock of Redis says nothing about `until_us`

-- Return the TTL in milliseconds of a key that expires at `until_us`. It is never 0.
local function ttl(until_us, now, injected)
  local ms = ceil((until_us - now) / 1000) + MARGIN_MS
  if injected and ms < INJECTED_MARGIN_MS then return INJECTED_MARGIN_MS end
  return ms
end

-- Return the state that a key holds, false if it does not exist, nil if its value is not a state of this algorithm.
local function state_of(call, key, algorithm)
  local raw = call.values[key]
  if type(raw) ~= 'string' then return raw end
  local version, code, width = byte(raw, 1, 3)
  if not width or version == 0 or code ~= algorithm.code or width < algorithm.width or #raw < width then return nil end
  local state, tail = algorithm.read(raw, width + 1)
  if not state or state.until_us < state.last_us then return nil end
  if tail > #raw then
    state.pending = ''
  else
    state.pending = sub(raw, tail)
    if #state.pending % PENDING_WIDTH ~= 0 then return nil end
  end
  if state.entries then call.values[key] = state end -- cut a long log out of its string only once
  return state
end

-- Return whether a bucket is treated as if it did not exist.
local function is_expired(state, now)
  return now >= state.until_us and now >= state.last_us
end

-- MGET returns false for a key of another type, which must not read as empty. So EXISTS checks all missing keys at
-- once.
local function fetch(first, last)
  local values = redis.call('MGET', unpack(KEYS, first, last))
  local missing, count, before = {}, 0, first - 1
  for i = 1, #values do
    if not values[i] then
      count = count + 1
      missing[count] = KEYS[before + i]
    end
  end
  if count > 0 and redis.call('EXISTS', unpack(missing)) > 0 then
    for i = 1, #values do
      if not values[i] and redis.call('EXISTS', KEYS[before + i]) > 0 then values[i] = '' end
    end
  end
  return values
end

return {
  FORMAT = 1,
  PENDING_WIDTH = PENDING_WIDTH,
  ttl = ttl,
  state = state_of,
  is_expired = is_expired,

  -- Read all keys before anything is written: if a slot is not on this server, or only partly, the call fails before it
  -- has done anything. `budget_args` and `overflow` are the arguments of new_buckets.lua, whose counters are the last
  -- keys.
  read = function(now, injected, budget_args, overflow)
    local values, is_bounded = {}, type(budget_args) == 'table'
    local last = is_bounded and #KEYS - #budget_args + 1 or #KEYS
    if SLOTS then -- one MGET may only have keys of one slot
      local first = 1
      for slot = 1, #SLOTS do
        local stop = math.min(first + SLOTS[slot] - 1, last)
        local found = stop < first and {} or fetch(first, stop)
        for i = 1, #found do values[first + i - 1] = found[i] end
        first = first + SLOTS[slot]
      end
    elseif last > 0 then
      values = fetch(1, last)
    end
    local call = { now = now, injected = injected, values = values, changed = {}, expiries = {}, is_new = {} }
    if is_bounded then call.budget = use('new_buckets')(call, budget_args, overflow) end
    return call
  end,

  -- Return the bucket as it is now under `parameters`, after refunds of what has lapsed, and its effective time. Return
  -- nil and the time if a calendar does not contain that time, and nil alone for a foreign value.
  open = function(call, key, algorithm, parameters)
    local state, now = state_of(call, key, algorithm), call.now
    if state == nil then return nil end
    if not state or is_expired(state, now) then return algorithm.fresh(parameters, now, state), now end
    if now < state.last_us then now = state.last_us end
    local opened = algorithm.open(state, parameters, now)
    if opened and opened.pending ~= '' then use('pending').lapse(opened, algorithm, parameters) end
    return opened, now
  end,

  keep = function(call, key, algorithm, opened)
    if not call.values[key] then
      call.is_new[key] = true
      if call.budget then call.budget.count_new(key) end
    end
    call.values[key], call.changed[key] = opened, algorithm
    if call.expiries[key] then call.expiries[key] = nil end -- values[key] is a state again
  end,

  write = function(call)
    if call.budget then call.budget.update_counters() end
    local now, injected, values, expiries, is_new = call.now, call.injected, call.values, call.expiries, call.is_new
    for key, algorithm in pairs(call.changed) do
      local value, until_us, is_same_window = values[key], expiries[key], algorithm.is_windowed
      if not until_us then
        local state = value
        value, until_us, is_same_window = algorithm.write(state), state.until_us, state.until_us == state.kept_until_us
        if state.pending ~= '' then value = value .. state.pending end
      end
      if is_same_window and not injected and not is_new[key] then -- the key got its TTL when the window began
        redis.call('SET', KEYS[key], value, 'KEEPTTL')
      else -- format as text: Redis would print a number as a double
        redis.call('SET', KEYS[key], value, 'PX', format('%d', ttl(until_us, now, injected)))
      end
    end
  end,
}
