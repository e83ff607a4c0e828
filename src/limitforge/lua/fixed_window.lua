-- Fixed window.
--
-- parameters: limit, window_us, kind, offset. kind: 0 aligned to the clock, 1 opened by the first hit, 2 spread by key
-- (offset: 48 bits of the hash of the key).
--
-- State: used 7, limit 7, window_us 7, and 1 byte with kind plus 4 times `restarts`. `until_us` is the end of the
-- window, or now while no hit has opened it. In a script call also `kept_until_us`: the end that the TTL of the key was
-- set for.
--
-- An override of the window restarts the count. `restarts`, modulo 64, numbers the counts of one window, so that a
-- prepaid share of the count before is not returned to the count after.

local floor, max, min, pack, unpack_struct = math.floor, math.max, math.min, struct.pack, struct.unpack
local FORMAT = use('buckets').FORMAT

local CODE = 3
local NEVER = -1 -- waiting does not help
local FIRST_HIT = 1
local KINDS, MAX_RESTARTS = 4, 64
local WINDOW, WIDTH = '<BBBI7I7I7I7I7B', 39

local stored = { -- the state read last
  last_us = 0, until_us = 0, kept_until_us = 0, used = 0, limit = 0, window_us = 0, kind = 0, restarts = 0,
  pending = '',
}

-- Return the number of a count that begins now: one more than that of the count before, if it is still known.
local function restarts_after(before, now)
  if before then return (before.restarts + 1) % MAX_RESTARTS end
  return floor(now / 1000) % MAX_RESTARTS
end

local fixed_window
fixed_window = {
  code = CODE,
  is_windowed = true,
  width = WIDTH,

  read = function(raw, tail)
    local _, _, _, last_us, until_us, used, limit, window_us, kind = unpack_struct(WINDOW, raw)
    stored.last_us, stored.until_us, stored.kept_until_us = last_us, until_us, until_us
    stored.used, stored.limit, stored.window_us = used, limit, window_us
    stored.kind, stored.restarts = kind % KINDS, (kind - kind % KINDS) / KINDS
    return stored, tail
  end,

  write = function(state)
    local used, limit, window_us, kind = state.used, state.limit, state.window_us, state.kind + KINDS * state.restarts
    return pack(WINDOW, FORMAT, CODE, WIDTH, state.last_us, state.until_us, used, limit, window_us, kind)
  end,

  step = function(raw, parameters, cost, now)
    if #raw ~= WIDTH then return nil end
    local version, code, width, last_us, until_us, used, _, window_us, kind = unpack_struct(WINDOW, raw)
    if version ~= FORMAT or code ~= CODE or width ~= WIDTH or now < last_us then return nil end
    if now >= until_us or window_us ~= parameters[2] or kind % KINDS ~= parameters[3] then return nil end
    local limit = parameters[1]
    used = used + cost
    if used > limit then return nil end
    return pack(WINDOW, version, code, width, now, until_us, used, limit, window_us, kind), until_us, limit - used
  end,

  start = function(parameters, cost, now)
    local limit, window_us, kind = parameters[1], parameters[2], parameters[3]
    if cost > limit then return nil end
    local until_us = now + window_us
    if kind ~= FIRST_HIT then until_us = until_us - (now + parameters[4] % window_us) % window_us end
    kind = kind + KINDS * restarts_after(nil, now)
    return pack(WINDOW, FORMAT, CODE, WIDTH, now, until_us, cost, limit, window_us, kind), until_us, limit - cost
  end,

  parameters = function(state)
    return { state.limit, state.window_us, state.kind, 0 } -- a live state has its end, so the offset is not needed
  end,

  fresh = function(parameters, now, before)
    local window_us, kind = parameters[2], parameters[3]
    local until_us = now
    if kind ~= FIRST_HIT then until_us = now + window_us - (now + parameters[4] % window_us) % window_us end
    return {
      last_us = now, until_us = until_us, pending = '', used = 0,
      limit = parameters[1], window_us = window_us, kind = kind, restarts = restarts_after(before, now),
    }
  end,

  open = function(state, parameters, now)
    local window_us, kind = parameters[2], parameters[3]
    if state.window_us ~= window_us or state.kind ~= kind then return fixed_window.fresh(parameters, now, state) end
    return {
      last_us = now, until_us = state.until_us, kept_until_us = state.kept_until_us, pending = state.pending,
      used = state.used, limit = parameters[1], window_us = window_us, kind = kind, restarts = state.restarts,
    }
  end,

  wait = function(state, parameters, cost, share)
    if cost > share then return NEVER end
    if state.used + cost <= share then return 0 end
    return state.until_us - state.last_us
  end,

  take = function(state, parameters, cost)
    if state.until_us == state.last_us then state.until_us = state.last_us + state.window_us end
    state.used = state.used + cost
  end,

  force = function(state, parameters, amount)
    local taken = min(amount, 2 * parameters[1] - state.used)
    if taken <= 0 then return false end
    fixed_window.take(state, parameters, taken)
    return true
  end,

  give = function(state, parameters, amount)
    state.used = max(state.used - amount, 0) -- what was reserved in an earlier window ended with it
  end,

  source = function()
    return 0
  end,

  -- Return the start of the window, plus a microsecond for each restart in it. With the end it identifies the count.
  starts = function(state, parameters)
    return state.until_us - parameters[2] + state.restarts
  end,

  seal = function() end, -- `used` and `until_us` are always up to date
}

return fixed_window
