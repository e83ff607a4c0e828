-- Sliding window counter: an estimate from the counts of two aligned windows.
--
-- parameters: limit, window_us
--
-- State: previous 6, current 6, limit 6, window_us 6. `current` is the count of the window that contains `last_us`,
-- `previous` that of the window before.

local floor, max, min, pack, unpack_struct = math.floor, math.max, math.min, struct.pack, struct.unpack
local muldiv, FORMAT = use('exact').muldiv, use('buckets').FORMAT

local CODE = 5
local NEVER = -1 -- waiting does not help
local COUNTER, WIDTH = '<BBBI7I7I6I6I6I6', 41

local function new_counter(parameters, now, pending, previous, current)
  local limit, window_us = parameters[1], parameters[2]
  return {
    last_us = now, pending = pending,
    previous = previous, current = current, limit = limit, window_us = window_us,
  }
end

local function estimate(previous, current, window_us, now)
  if previous == 0 then return current end
  return (muldiv(window_us - now % window_us, previous, window_us)) + current
end

-- Return the microseconds until the estimate, which is above `target`, has fallen to it.
local function time_until(target, previous, current, window_us, now)
  local elapsed = now % window_us
  local decaying, decayed_to = previous, target - current
  if decayed_to < 0 then -- not before the current count has become the previous one
    decaying, decayed_to, elapsed = current, target, elapsed - window_us
  end
  local whole, rest = muldiv(decayed_to + 1, window_us, decaying)
  if rest > 0 then whole = whole + 1 end
  return window_us - whole + 1 - elapsed
end

-- The state read last.
local stored = { last_us = 0, until_us = 0, previous = 0, current = 0, limit = 0, window_us = 0, pending = '' }

local sliding_window_counter
sliding_window_counter = {
  code = CODE,
  width = WIDTH,

  read = function(raw, tail)
    local _, _, _, last_us, until_us, previous, current, limit, window_us = unpack_struct(COUNTER, raw)
    if window_us == 0 then return nil end
    stored.last_us, stored.until_us, stored.previous, stored.current = last_us, until_us, previous, current
    stored.limit, stored.window_us = limit, window_us
    return stored, tail
  end,

  write = function(state)
    local previous, current, limit, window_us = state.previous, state.current, state.limit, state.window_us
    return pack(COUNTER, FORMAT, CODE, WIDTH, state.last_us, state.until_us, previous, current, limit, window_us)
  end,

  step = function(raw, parameters, cost, now)
    if #raw ~= WIDTH then return nil end
    local version, code, width, last_us, until_us, previous, current, _, window_us = unpack_struct(COUNTER, raw)
    if version ~= FORMAT or code ~= CODE or width ~= WIDTH or now < last_us then return nil end
    if now >= until_us or window_us ~= parameters[2] then return nil end
    if floor(now / window_us) ~= floor(last_us / window_us) then return nil end
    local limit = parameters[1]
    current = current + cost
    local left = limit - estimate(previous, current, window_us, now)
    if left < 0 then return nil end
    until_us = now + time_until(0, previous, current, window_us, now)
    return pack(COUNTER, version, code, width, now, until_us, previous, current, limit, window_us), until_us, left
  end,

  start = function(parameters, cost, now)
    local limit, window_us = parameters[1], parameters[2]
    if cost > limit then return nil end
    local until_us = now + time_until(0, 0, cost, window_us, now)
    return pack(COUNTER, FORMAT, CODE, WIDTH, now, until_us, 0, cost, limit, window_us), until_us, limit - cost
  end,

  parameters = function(state)
    return { state.limit, state.window_us }
  end,

  fresh = function(parameters, now)
    return new_counter(parameters, now, '', 0, 0)
  end,

  open = function(state, parameters, now)
    local window_us = parameters[2]
    if state.window_us ~= window_us then return sliding_window_counter.fresh(parameters, now) end
    local passed = floor(now / window_us) - floor(state.last_us / window_us)
    if passed == 0 then return new_counter(parameters, now, state.pending, state.previous, state.current) end
    return new_counter(parameters, now, state.pending, passed == 1 and state.current or 0, 0)
  end,

  wait = function(state, parameters, cost, share)
    if cost > share then return NEVER end
    if estimate(state.previous, state.current, state.window_us, state.last_us) <= share - cost then return 0 end
    return time_until(share - cost, state.previous, state.current, state.window_us, state.last_us)
  end,

  take = function(state, parameters, cost)
    state.current = state.current + cost
  end,

  force = function(state, parameters, amount)
    local used = estimate(state.previous, state.current, state.window_us, state.last_us)
    local taken = min(amount, 2 * parameters[1] - used)
    if taken <= 0 then return false end
    state.current = state.current + taken
    return true
  end,

  give = function(state, parameters, amount, source)
    local start = state.last_us - state.last_us % state.window_us
    if source == start then
      state.current = max(state.current - amount, 0)
    elseif source == start - state.window_us then -- it has ended, but still counts in the estimate
      state.previous = max(state.previous - amount, 0)
    end
  end,

  source = function(state)
    return state.last_us - state.last_us % state.window_us
  end,

  seal = function(state)
    local previous, current, window_us, now = state.previous, state.current, state.window_us, state.last_us
    state.used = estimate(previous, current, window_us, now)
    state.until_us = now + (state.used > 0 and time_until(0, previous, current, window_us, now) or 0)
  end,
}

return sliding_window_counter
