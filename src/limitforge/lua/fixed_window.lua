-- Fixed window. numbers: limit, window_us, kind, offset. kind: 0 aligned, 1 opened by the first hit, 2 spread by key (offset: 48 bits of the key's hash).
-- State: used 7, size 7, window 7, kind and 4 times `restarts` 1. `until` is the window's end; while no hit has opened it, that is now. In a script call also
-- `kept_til`: the end that the key's TTL was set for. `restarts` tells, modulo 64, one count of a window from another that an override's window has restarted: what
-- was bought before must not go back into the count that began after, though both may be of the same window.

local floor, max, min, pack, unpack_struct = math.floor, math.max, math.min, struct.pack, struct.unpack
local FORMAT = use('buckets').FORMAT

local NEVER = -1 -- a wait that does not end
local FIRST_HIT = 1
local KINDS, MOST_RESTARTS = 4, 64
local WINDOW, WIDTH = '<BBBI7I7I7I7I7B', 39

local stored = { last = 0, til = 0, kept_til = 0, used = 0, size = 0, window = 0, kind = 0, restarts = 0, pending = '' } -- what was read last

-- What tells a count that begins now from others of the same window: one more than the count before it, if that is still known.
local function restarts_after(before, now)
  if before then return (before.restarts + 1) % MOST_RESTARTS end
  return floor(now / 1000) % MOST_RESTARTS
end

local fixed_window
fixed_window = {
  code = 3,
  windows = true,
  width = WIDTH,

  read = function(raw, tail)
    local _, _, _, last, til, used, size, window, kind = unpack_struct(WINDOW, raw)
    stored.last, stored.til, stored.kept_til, stored.used, stored.size, stored.window = last, til, til, used, size, window
    stored.kind, stored.restarts = kind % KINDS, (kind - kind % KINDS) / KINDS
    return stored, tail
  end,

  write = function(state)
    return pack(WINDOW, FORMAT, 3, 39, state.last, state.til, state.used, state.size, state.window, state.kind + KINDS * state.restarts)
  end,

  step = function(raw, numbers, cost, now)
    if #raw ~= WIDTH then return nil end
    local version, code, width, last, til, used, _, window, kind = unpack_struct(WINDOW, raw)
    if version ~= FORMAT or code ~= 3 or width ~= WIDTH or now < last or now >= til or window ~= numbers[2] or kind % KINDS ~= numbers[3] then return nil end
    local limit = numbers[1]
    used = used + cost
    if used > limit then return nil end
    return pack(WINDOW, version, code, width, now, til, used, limit, window, kind), til, limit - used
  end,

  start = function(numbers, cost, now)
    local limit, window, kind = numbers[1], numbers[2], numbers[3]
    if cost > limit then return nil end
    local til = now + window
    if kind ~= FIRST_HIT then til = til - (now + numbers[4] % window) % window end
    return pack(WINDOW, FORMAT, 3, WIDTH, now, til, cost, limit, window, kind + KINDS * restarts_after(nil, now)), til, limit - cost
  end,

  numbers = function(state)
    return { state.size, state.window, state.kind, 0 } -- a live state has its end: the offset is not asked for
  end,

  fresh = function(numbers, now, before)
    local window, kind = numbers[2], numbers[3]
    local til = now
    if kind ~= FIRST_HIT then til = now + window - (now + numbers[4] % window) % window end
    return { last = now, til = til, pending = '', used = 0, size = numbers[1], window = window, kind = kind, restarts = restarts_after(before, now) }
  end,

  open = function(state, numbers, now)
    local window, kind = numbers[2], numbers[3]
    if state.window ~= window or state.kind ~= kind then return fixed_window.fresh(numbers, now, state) end
    return {
      last = now, til = state.til, kept_til = state.kept_til, pending = state.pending, used = state.used,
      size = numbers[1], window = window, kind = kind, restarts = state.restarts,
    }
  end,

  wait = function(state, numbers, cost, share)
    if cost > share then return NEVER end
    if state.used + cost <= share then return 0 end
    return state.til - state.last
  end,

  take = function(state, numbers, cost)
    if state.til == state.last then state.til = state.last + state.window end
    state.used = state.used + cost
  end,

  force = function(state, numbers, amount)
    local taken = min(amount, 2 * numbers[1] - state.used)
    if taken <= 0 then return false end
    fixed_window.take(state, numbers, taken)
    return true
  end,

  give = function(state, numbers, amount)
    state.used = max(state.used - amount, 0) -- what was reserved in an earlier window left with it
  end,

  source = function()
    return 0
  end,

  -- Names the count, together with its end: where its window starts, and a microsecond more for each restart in it.
  starts = function(state, numbers)
    return state.til - numbers[2] + state.restarts
  end,

  seal = function() end, -- both are kept as they are
}

return fixed_window
