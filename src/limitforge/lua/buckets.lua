-- The buckets of one script call: read with one MGET, opened as checks need them, and each changed one written once.
--
-- A bucket is kept as one string:
--
--   version  1 byte    who wrote it; 0 is none
--   code     1 byte    the algorithm
--   width    1 byte    length of the fixed part, these three bytes included
--   last     7 bytes   when it was last written, in microseconds
--   until    7 bytes   from when on it no longer matters, so also when it resets (a ledger finds it in its items)
--   ...                the algorithm's own fields, then the items of a ledger
--   pending  30 bytes each: open reservations and shares in the order of their lapses: token 8, lapse 7, amount 7, source 7, kind 1
--
-- The fixed part only ever grows at its end. A release ignores the fields of a newer one, which has defaults for those that an older one left out: so
-- both work on the same keys during a deploy.
--
-- In a script call a state is a table with the same fields; `seal` sets `til` (until) and `used`, which is what counts against the limit, rounded up. An
-- opened state is a copy: it replaces the stored one only when something was taken. So what was stored need not last: all but the ledgers read it into one
-- table, over and over, which is good until the next read.
--
-- A call is { now, injected, values, changed, ends, begun, budget }. values[key] is what the key holds: false if nothing, its string (an empty one, which nobody
-- writes, if it is of another type), or a state. changed[key] is the algorithm of a bucket that is to be written, and if that is a string already, ends[key]
-- is its `until`. begun[key] tells that the key is not there yet, and so has no TTL to keep. `budget` bounds how many may begin (new_buckets.lua), if it is there.

local byte, ceil, format, sub, type = string.byte, math.ceil, string.format, string.sub, type

local PENDING_WIDTH = 30
local MARGIN_MS = 60000            -- a key outlives `until` by a minute: garbage collection only, never a decision
local INJECTED_MARGIN_MS = 3600000 -- with a time from outside, Redis's clock says nothing about `until`

-- In milliseconds, for a key that matters until then: never 0, never none.
local function ttl(til, now, injected)
  local ms = ceil((til - now) / 1000) + MARGIN_MS
  if injected and ms < INJECTED_MARGIN_MS then return INJECTED_MARGIN_MS end
  return ms
end

-- The state that a key holds: false if there is none, nil if the value is not of this algorithm.
local function state_of(call, key, algorithm)
  local raw = call.values[key]
  if type(raw) ~= 'string' then return raw end
  local version, code, width = byte(raw, 1, 3)
  if not width or version == 0 or code ~= algorithm.code or width < algorithm.width or #raw < width then return nil end
  local state, tail = algorithm.read(raw, width + 1)
  if not state or state.til < state.last then return nil end
  if tail > #raw then
    state.pending = ''
  else
    state.pending = sub(raw, tail)
    if #state.pending % PENDING_WIDTH ~= 0 then return nil end
  end
  if state.items then call.values[key] = state end -- a long log is cut out of its string once, however often it is asked
  return state
end

-- Whether a bucket no longer matters, and is treated as if it were not there.
local function gone(state, now)
  return now >= state.til and now >= state.last
end

-- MGET says false for a key of another type, which must not read as empty: what seems to be missing is asked for once more, all at once.
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
  gone = gone,

  -- All keys are read before anything is written: a slot that is not here, or not wholly, fails the call before it has done anything. `limits` and `overflow`
  -- say what new_buckets.lua is to bound; its counters are the last keys.
  read = function(now, injected, limits, overflow)
    local values, is_bounded = {}, type(limits) == 'table'
    local last = is_bounded and #KEYS - #limits + 1 or #KEYS
    if SLOTS then -- a command takes keys of one slot only
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
    local call = { now = now, injected = injected, values = values, changed = {}, ends = {}, begun = {} }
    if is_bounded then call.budget = use('new_buckets')(call, limits, overflow) end
    return call
  end,

  -- The bucket as it is now under `numbers`, with what has lapsed given back, and the time that it is judged at. nil and the time if a calendar does not
  -- reach that far, nil alone if the value is not ours.
  open = function(call, key, algorithm, numbers)
    local state, now = state_of(call, key, algorithm), call.now
    if state == nil then return nil end
    if not state or gone(state, now) then return algorithm.fresh(numbers, now, state), now end
    if now < state.last then now = state.last end
    local work = algorithm.open(state, numbers, now)
    if work and work.pending ~= '' then use('pending').lapse(work, algorithm, numbers) end
    return work, now
  end,

  keep = function(call, key, algorithm, work)
    if not call.values[key] then
      call.begun[key] = true
      if call.budget then call.budget.begin(key) end
    end
    call.values[key], call.changed[key] = work, algorithm
    if call.ends[key] then call.ends[key] = nil end -- a state again
  end,

  write = function(call)
    if call.budget then call.budget.charge() end
    local now, injected, values, ends, begun = call.now, call.injected, call.values, call.ends, call.begun
    for key, algorithm in pairs(call.changed) do
      local value, til, is_same_window = values[key], ends[key], algorithm.windows
      if not til then
        local state = value
        value, til, is_same_window = algorithm.write(state), state.til, state.til == state.kept_til
        if state.pending ~= '' then value = value .. state.pending end
      end
      if is_same_window and not injected and not begun[key] then -- its key was given this TTL when the window began
        redis.call('SET', KEYS[key], value, 'KEEPTTL')
      else -- as text: Redis would print a number as a double
        redis.call('SET', KEYS[key], value, 'PX', format('%d', ttl(til, now, injected)))
      end
    end
  end,
}
