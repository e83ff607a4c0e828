-- Fixed window. numbers: limit, window_us, kind, offset. kind: 0 aligned to the clock, 1 opened by the first hit, 2
-- spread by key (offset: 48 bits of the hash of the key).
--
-- State: used 7, size 7, window 7, and 1 byte with kind plus 4 times `restarts`. `until` is the end of the window, or
-- now while no hit has opened it. In a script call also `kept_until_us`: the end that the TTL of the key was set for.
--
-- An override of the window restarts the count. `restarts`, modulo 64, distinguishes the counts of one window: a
-- prepaid share of the count before must not be returned to the count after.

local floor, max, min, pack, unpack_struct = math.floor, math.max, math.min, struct.pack, struct.unpack
local FORMAT = use('buckets').FORMAT

local NEVER = -1 -- waiting does not help
local FIRST_HIT = 1
local KINDS, MAX_RESTARTS = 4, 64
local WINDOW, WIDTH = '<BBBI7I7I7I7I7B', 39

local stored = { -- the state read last
  last = 0, until_us = 0, kept_until_us = 0, used = 0, size = 0, window = 0, kind = 0, restarts = 0, pending = '',
}

-- Return the number of a count that begins now: one more than that of the count before, if it is still known.
local function restarts_after(before, now)
  if before then return (before.restarts + 1) % MAX_RESTARTS end
  return floor(now / 1000) % MAX_RESTARTS
end

local fixed_window
fixed_window = {
  code = 3,
  windows = true,
  width = WIDTH,

  read = function(raw, tail)
    local _, _, _, last, until_us, used, size, window, kind = unpack_struct(WINDOW, raw)
    stored.last, stored.until_us, stored.kept_until_us = last, until_us, until_us
    stored.used, stored.size, stored.window = used, size, window
    stored.kind, stored.restarts = kind % KINDS, (kind - kind % KINDS) / KINDS
    return stored, tail
  end,

  write = function(state)
    local kind = state.kind + KINDS * state.restarts
    return pack(WINDOW, FORMAT, 3, 39, state.last, state.until_us, state.used, state.size, state.window, kind)
  end,

  step = function(raw, numbers, cost, now)
    if #raw ~= WIDTH then return nil end
    local version, code, width, last, until_us, used, _, window, kind = unpack_struct(WINDOW, raw)
    if version ~= FORMAT or code ~= 3 or width ~= WIDTH or now < last then return nil end
    if now >= until_us or window ~= numbers[2] or kind % KINDS ~= numbers[3] then return nil end
    local limit = numbers[1]
    used = used + cost
    if used > limit then return nil end
    return pack(WINDOW, version, code, width, now, until_us, used, limit, window, kind), until_us, limit - used
  end,

  start = function(numbers, cost, now)
    local limit, window, kind = numbers[1], numbers[2], numbers[3]
    if cost > limit then return nil end
    local until_us = now + window
    if kind ~= FIRST_HIT then until_us = until_us - (now + numbers[4] % window) % window end
    kind = kind + KINDS * restarts_after(nil, now)
    return pack(WINDOW, FORMAT, 3, WIDTH, now, until_us, cost, limit, window, kind), until_us, limit - cost
  end,

  numbers = function(state)
    return { state.size, state.window, state.kind, 0 } -- a live state has its end, so the offset is not needed
  end,

  fresh = function(numbers, now, before)
    local window, kind = numbers[2], numbers[3]
    local until_us = now
    if kind ~= FIRST_HIT then until_us = now + window - (now + numbers[4] % window) % window end
    return {
      last = now, until_us = until_us, pending = '', used = 0,
      size = numbers[1], window = window, kind = kind, restarts = restarts_after(before, now),
    }
  end,

  open = function(state, numbers, now)
    local window, kind = numbers[2], numbers[3]
    if state.window ~= window or state.kind ~= kind then return fixed_window.fresh(numbers, now, state) end
    return {
      last = now, until_us = state.until_us, kept_until_us = state.kept_until_us, pending = state.pending,
      used = state.used, size = numbers[1], window = window, kind = kind, restarts = state.restarts,
    }
  end,

  wait = function(state, numbers, cost, share)
    if cost > share then return NEVER end
    if state.used + cost <= share then return 0 end
    return state.until_us - state.last
  end,

  take = function(state, numbers, cost)
    if state.until_us == state.last then state.until_us = state.last + state.window end
    state.used = state.used + cost
  end,

  force = function(state, numbers, amount)
    local taken = min(amount, 2 * numbers[1] - state.used)
    if taken <= 0 then return false end
    fixed_window.take(state, numbers, taken)
    return true
  end,

  give = function(state, numbers, amount)
    state.used = max(state.used - amount, 0) -- what was reserved in an earlier window ended with it
  end,

  source = function()
    return 0
  end,

  -- Return the start of the window, plus a microsecond for each restart in it. With the end it identifies the count.
  starts = function(state, numbers)
    return state.until_us - numbers[2] + state.restarts
  end,

  seal = function() end, -- `used` and `until_us` are always up to date
}

return fixed_window
