-- Quota: a fixed window on the calendar. numbers: limit, shape (48 bits that identify the calendar), the starts of
-- three consecutive windows, and the end of the last one. The caller computes these, because Lua knows no time zones.
--
-- State: used 7, size 7, shape 6. `until` is the end of the window. In a script call also `kept_until_us`, as for a
-- fixed window.

local min, pack, unpack_struct = math.min, struct.pack, struct.unpack
local fixed_window, FORMAT = use('fixed_window'), use('buckets').FORMAT

local QUOTA, WIDTH = '<BBBI7I7I7I7I6', 37

-- The state read last.
local stored = { last = 0, until_us = 0, kept_until_us = 0, used = 0, size = 0, shape = 0, pending = '' }

-- Return the end of the window that contains this time, or nil if none of the three does.
local function window_end(numbers, now)
  if now < numbers[3] or now >= numbers[6] then return nil end
  return now < numbers[4] and numbers[4] or now < numbers[5] and numbers[5] or numbers[6]
end

-- Return the start of the window that contains this time.
local function window_start(numbers, now)
  return now < numbers[4] and numbers[3] or now < numbers[5] and numbers[4] or numbers[5]
end

local quota
quota = {
  code = 7,
  windows = true,
  width = WIDTH,
  wait = fixed_window.wait,
  give = fixed_window.give,
  source = fixed_window.source,
  seal = fixed_window.seal,

  read = function(raw, tail)
    local _, _, _, last, until_us, used, size, shape = unpack_struct(QUOTA, raw)
    stored.last, stored.until_us, stored.kept_until_us = last, until_us, until_us
    stored.used, stored.size, stored.shape = used, size, shape
    return stored, tail
  end,

  write = function(state)
    return pack(QUOTA, FORMAT, 7, 37, state.last, state.until_us, state.used, state.size, state.shape)
  end,

  step = function(raw, numbers, cost, now)
    if #raw ~= WIDTH then return nil end
    local version, code, width, last, until_us, used, _, shape = unpack_struct(QUOTA, raw)
    if version ~= FORMAT or code ~= 7 or width ~= WIDTH or now < last then return nil end
    if shape ~= numbers[2] or until_us ~= window_end(numbers, now) then return nil end
    local limit = numbers[1]
    used = used + cost
    if used > limit then return nil end
    return pack(QUOTA, version, code, width, now, until_us, used, limit, shape), until_us, limit - used
  end,

  start = function(numbers, cost, now)
    local limit, until_us = numbers[1], window_end(numbers, now)
    if not until_us or cost > limit then return nil end
    return pack(QUOTA, FORMAT, 7, WIDTH, now, until_us, cost, limit, numbers[2]), until_us, limit - cost
  end,

  numbers = function(state)
    local until_us = state.until_us
    return { state.size, state.shape, 0, until_us, until_us, until_us } -- a live state is in its own window
  end,

  fresh = function(numbers, now)
    local until_us = window_end(numbers, now)
    if not until_us then return nil end
    return { last = now, until_us = until_us, pending = '', used = 0, size = numbers[1], shape = numbers[2] }
  end,

  open = function(state, numbers, now)
    local opened = quota.fresh(numbers, now)
    if opened and state.shape == numbers[2] then
      opened.used, opened.pending, opened.kept_until_us = state.used, state.pending, state.kept_until_us
    end
    return opened
  end,

  starts = function(state, numbers)
    return window_start(numbers, state.last)
  end,

  take = function(state, numbers, cost)
    state.used = state.used + cost
  end,

  force = function(state, numbers, amount)
    local taken = min(amount, 2 * numbers[1] - state.used)
    if taken <= 0 then return false end
    state.used = state.used + taken
    return true
  end,
}

return quota
