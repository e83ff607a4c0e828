-- Quota: a fixed window on the calendar.
--
-- parameters: limit, calendar_hash (48 bits that identify the calendar), the starts of three consecutive windows, and
-- the end of the last one. The caller computes these, because Lua knows no time zones.
--
-- State: used 7, limit 7, calendar_hash 6. `until_us` is the end of the window. In a script call also `kept_until_us`,
-- as for a fixed window.

local min, pack, unpack_struct = math.min, struct.pack, struct.unpack
local fixed_window, FORMAT = use('fixed_window'), use('buckets').FORMAT

local CODE = 7
local QUOTA, WIDTH = '<BBBI7I7I7I7I6', 37

-- The state read last.
local stored = { last_us = 0, until_us = 0, kept_until_us = 0, used = 0, limit = 0, calendar_hash = 0, pending = '' }

-- Return the end of the window that contains this time, or nil if none of the three does.
local function window_end(parameters, now)
  if now < parameters[3] or now >= parameters[6] then return nil end
  return now < parameters[4] and parameters[4] or now < parameters[5] and parameters[5] or parameters[6]
end

-- Return the start of the window that contains this time.
local function window_start(parameters, now)
  return now < parameters[4] and parameters[3] or now < parameters[5] and parameters[4] or parameters[5]
end

local quota
quota = {
  code = CODE,
  is_windowed = true,
  width = WIDTH,
  wait = fixed_window.wait,
  give = fixed_window.give,
  source = fixed_window.source,
  seal = fixed_window.seal,

  read = function(raw, tail)
    local _, _, _, last_us, until_us, used, limit, calendar_hash = unpack_struct(QUOTA, raw)
    stored.last_us, stored.until_us, stored.kept_until_us = last_us, until_us, until_us
    stored.used, stored.limit, stored.calendar_hash = used, limit, calendar_hash
    return stored, tail
  end,

  write = function(state)
    return pack(QUOTA, FORMAT, CODE, WIDTH, state.last_us, state.until_us, state.used, state.limit, state.calendar_hash)
  end,

  step = function(raw, parameters, cost, now)
    if #raw ~= WIDTH then return nil end
    local version, code, width, last_us, until_us, used, _, calendar_hash = unpack_struct(QUOTA, raw)
    if version ~= FORMAT or code ~= CODE or width ~= WIDTH or now < last_us then return nil end
    if calendar_hash ~= parameters[2] or until_us ~= window_end(parameters, now) then return nil end
    local limit = parameters[1]
    used = used + cost
    if used > limit then return nil end
    return pack(QUOTA, version, code, width, now, until_us, used, limit, calendar_hash), until_us, limit - used
  end,

  start = function(parameters, cost, now)
    local limit, until_us = parameters[1], window_end(parameters, now)
    if not until_us or cost > limit then return nil end
    return pack(QUOTA, FORMAT, CODE, WIDTH, now, until_us, cost, limit, parameters[2]), until_us, limit - cost
  end,

  parameters = function(state)
    local until_us = state.until_us
    return { state.limit, state.calendar_hash, 0, until_us, until_us, until_us } -- a live state is in its own window
  end,

  fresh = function(parameters, now)
    local until_us = window_end(parameters, now)
    if not until_us then return nil end
    local limit, calendar_hash = parameters[1], parameters[2]
    return { last_us = now, until_us = until_us, pending = '', used = 0, limit = limit, calendar_hash = calendar_hash }
  end,

  open = function(state, parameters, now)
    local opened = quota.fresh(parameters, now)
    if opened and state.calendar_hash == parameters[2] then
      opened.used, opened.pending, opened.kept_until_us = state.used, state.pending, state.kept_until_us
    end
    return opened
  end,

  starts = function(state, parameters)
    return window_start(parameters, state.last_us)
  end,

  take = function(state, parameters, cost)
    state.used = state.used + cost
  end,

  force = function(state, parameters, amount)
    local taken = min(amount, 2 * parameters[1] - state.used)
    if taken <= 0 then return false end
    state.used = state.used + taken
    return true
  end,
}

return quota
