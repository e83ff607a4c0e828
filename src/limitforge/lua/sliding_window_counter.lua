-- Sliding window counter. numbers: limit, window_us. Two aligned counts blended into an estimate.
-- State: previous 6, current 6, size 6, window 6. `current` is the count of the window that holds `last`, `previous` of the one before.

local floor, max, min, pack, unpack_struct = math.floor, math.max, math.min, struct.pack, struct.unpack
local muldiv, FORMAT = use('exact').muldiv, use('buckets').FORMAT

local NEVER = -1 -- a wait that does not end
local COUNTER = '<BBBI7I7I6I6I6I6'

local function new_counter(numbers, now, pending, previous, current)
  return { last = now, pending = pending, previous = previous, current = current, size = numbers[1], window = numbers[2] }
end

local function estimate(state)
  if state.previous == 0 then return state.current end
  local window = state.window
  return (muldiv(window - state.last % window, state.previous, window)) + state.current
end

-- Microseconds until the estimate, now above `target`, no longer is.
local function falls_to(state, target)
  local window = state.window
  local elapsed = state.last % window
  local fading, at_most = state.previous, target - state.current
  if at_most < 0 then -- only after the current count has become the previous one
    fading, at_most, elapsed = state.current, target, elapsed - window
  end
  local whole, rest = muldiv(at_most + 1, window, fading)
  if rest > 0 then whole = whole + 1 end
  return window - whole + 1 - elapsed
end

local stored = { last = 0, til = 0, previous = 0, current = 0, size = 0, window = 0, pending = '' } -- what was read last

local sliding_window_counter
sliding_window_counter = {
  code = 5,
  width = 41,

  read = function(raw, tail)
    local _, _, _, last, til, previous, current, size, window = unpack_struct(COUNTER, raw)
    if window == 0 then return nil end
    stored.last, stored.til, stored.previous, stored.current, stored.size, stored.window = last, til, previous, current, size, window
    return stored, tail
  end,

  write = function(state)
    return pack(COUNTER, FORMAT, 5, 41, state.last, state.til, state.previous, state.current, state.size, state.window)
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
    if estimate(state) <= share - cost then return 0 end
    return falls_to(state, share - cost)
  end,

  take = function(state, numbers, cost)
    state.current = state.current + cost
  end,

  force = function(state, numbers, amount)
    local taken = min(amount, 2 * numbers[1] - estimate(state))
    if taken <= 0 then return false end
    state.current = state.current + taken
    return true
  end,

  give = function(state, numbers, amount, source)
    local start = state.last - state.last % state.window
    if source == start then
      state.current = max(state.current - amount, 0)
    elseif source == start - state.window then -- over, but it still counts
      state.previous = max(state.previous - amount, 0)
    end
  end,

  source = function(state)
    return state.last - state.last % state.window
  end,

  seal = function(state)
    state.used = estimate(state)
    state.til = state.last + (state.used > 0 and falls_to(state, 0) or 0)
  end,
}

return sliding_window_counter
