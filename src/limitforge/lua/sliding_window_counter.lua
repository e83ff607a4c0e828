-- Sliding window counter: an estimate from the counts of two aligned windows. numbers: limit, window_us. State:
-- previous 6, current 6, size 6, window 6. `current` is the count of the window that contains `last`, `previous` that
-- of the window before.

local floor, max, min, pack, unpack_struct = math.floor, math.max, math.min, struct.pack, struct.unpack
local muldiv, FORMAT = use('exact').muldiv, use('buckets').FORMAT

local NEVER = -1 -- waiting does not help
local COUNTER, WIDTH = '<BBBI7I7I6I6I6I6', 41

local function new_counter(numbers, now, pending, previous, current)
  local size, window = numbers[1], numbers[2]
  return { last = now, pending = pending, previous = previous, current = current, size = size, window = window }
end

local function estimate(previous, current, window, now)
  if previous == 0 then return current end
  return (muldiv(window - now % window, previous, window)) + current
end

-- Return the microseconds until the estimate, which is above `target`, has fallen to it.
local function falls_to(target, previous, current, window, now)
  local elapsed = now % window
  local fading, at_most = previous, target - current
  if at_most < 0 then -- not before the current count has become the previous one
    fading, at_most, elapsed = current, target, elapsed - window
  end
  local whole, rest = muldiv(at_most + 1, window, fading)
  if rest > 0 then whole = whole + 1 end
  return window - whole + 1 - elapsed
end

-- The state read last.
local stored = { last = 0, until_us = 0, previous = 0, current = 0, size = 0, window = 0, pending = '' }

local sliding_window_counter
sliding_window_counter = {
  code = 5,
  width = WIDTH,

  read = function(raw, tail)
    local _, _, _, last, until_us, previous, current, size, window = unpack_struct(COUNTER, raw)
    if window == 0 then return nil end
    stored.last, stored.until_us, stored.previous, stored.current = last, until_us, previous, current
    stored.size, stored.window = size, window
    return stored, tail
  end,

  write = function(state)
    local previous, current = state.previous, state.current
    return pack(COUNTER, FORMAT, 5, 41, state.last, state.until_us, previous, current, state.size, state.window)
  end,

  step = function(raw, numbers, cost, now)
    if #raw ~= WIDTH then return nil end
    local version, code, width, last, until_us, previous, current, _, window = unpack_struct(COUNTER, raw)
    if version ~= FORMAT or code ~= 5 or width ~= WIDTH or now < last then return nil end
    if now >= until_us or window ~= numbers[2] then return nil end
    if floor(now / window) ~= floor(last / window) then return nil end
    local limit = numbers[1]
    current = current + cost
    local left = limit - estimate(previous, current, window, now)
    if left < 0 then return nil end
    until_us = now + falls_to(0, previous, current, window, now)
    return pack(COUNTER, version, code, width, now, until_us, previous, current, limit, window), until_us, left
  end,

  start = function(numbers, cost, now)
    local limit, window = numbers[1], numbers[2]
    if cost > limit then return nil end
    local until_us = now + falls_to(0, 0, cost, window, now)
    return pack(COUNTER, FORMAT, 5, WIDTH, now, until_us, 0, cost, limit, window), until_us, limit - cost
  end,

  numbers = function(state)
    return { state.size, state.window }
  end,

  fresh = function(numbers, now)
    return new_counter(numbers, now, '', 0, 0)
  end,

  open = function(state, numbers, now)
    local window = numbers[2]
    if state.window ~= window then return sliding_window_counter.fresh(numbers, now) end
    local passed = floor(now / window) - floor(state.last / window)
    if passed == 0 then return new_counter(numbers, now, state.pending, state.previous, state.current) end
    return new_counter(numbers, now, state.pending, passed == 1 and state.current or 0, 0)
  end,

  wait = function(state, numbers, cost, share)
    if cost > share then return NEVER end
    if estimate(state.previous, state.current, state.window, state.last) <= share - cost then return 0 end
    return falls_to(share - cost, state.previous, state.current, state.window, state.last)
  end,

  take = function(state, numbers, cost)
    state.current = state.current + cost
  end,

  force = function(state, numbers, amount)
    local taken = min(amount, 2 * numbers[1] - estimate(state.previous, state.current, state.window, state.last))
    if taken <= 0 then return false end
    state.current = state.current + taken
    return true
  end,

  give = function(state, numbers, amount, source)
    local start = state.last - state.last % state.window
    if source == start then
      state.current = max(state.current - amount, 0)
    elseif source == start - state.window then -- it has ended, but still counts in the estimate
      state.previous = max(state.previous - amount, 0)
    end
  end,

  source = function(state)
    return state.last - state.last % state.window
  end,

  seal = function(state)
    local previous, current, window, now = state.previous, state.current, state.window, state.last
    state.used = estimate(previous, current, window, now)
    state.until_us = now + (state.used > 0 and falls_to(0, previous, current, window, now) or 0)
  end,
}

return sliding_window_counter
