-- Quota: a fixed window on the calendar. numbers: limit, shape (48 bits that tell one calendar from another), then where three consecutive windows
-- begin, and where the last one ends: time-zone rules do not belong here.
-- State: used 7, size 7, shape 6. `until` is the window's end. In a script call also `kept_til`, as for a fixed window.

local min, pack, unpack_struct = math.min, struct.pack, struct.unpack
local fixed_window, FORMAT = use('fixed_window'), use('buckets').FORMAT

local QUOTA, WIDTH = '<BBBI7I7I7I7I6', 37

local stored = { last = 0, til = 0, kept_til = 0, used = 0, size = 0, shape = 0, pending = '' } -- what was read last

-- Where the window ends that holds this time; nil if none of them does.
local function window_end(numbers, now)
  if now < numbers[3] or now >= numbers[6] then return nil end
  return now < numbers[4] and numbers[4] or now < numbers[5] and numbers[5] or numbers[6]
end

-- Where the window begins that holds this time.
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
    local _, _, _, last, til, used, size, shape = unpack_struct(QUOTA, raw)
    stored.last, stored.til, stored.kept_til, stored.used, stored.size, stored.shape = last, til, til, used, size, shape
    return stored, tail
  end,

  write = function(state)
    return pack(QUOTA, FORMAT, 7, 37, state.last, state.til, state.used, state.size, state.shape)
  end,

  step = function(raw, numbers, cost, now)
    if #raw ~= WIDTH then return nil end
    local version, code, width, last, til, used, _, shape = unpack_struct(QUOTA, raw)
    if version ~= FORMAT or code ~= 7 or width ~= WIDTH or now < last or shape ~= numbers[2] or til ~= window_end(numbers, now) then return nil end
    local limit = numbers[1]
    used = used + cost
    if used > limit then return nil end
    return pack(QUOTA, version, code, width, now, til, used, limit, shape), til, limit - used
  end,

  start = function(numbers, cost, now)
    local limit, til = numbers[1], window_end(numbers, now)
    if not til or cost > limit then return nil end
    return pack(QUOTA, FORMAT, 7, WIDTH, now, til, cost, limit, numbers[2]), til, limit - cost
  end,

  numbers = function(state)
    return { state.size, state.shape, 0, state.til, state.til, state.til } -- a live state is in its own window
  end,

  fresh = function(numbers, now)
    local til = window_end(numbers, now)
    return til and { last = now, til = til, pending = '', used = 0, size = numbers[1], shape = numbers[2] }
  end,

  open = function(state, numbers, now)
    local opened = quota.fresh(numbers, now)
    if opened and state.shape == numbers[2] then
      opened.used, opened.pending, opened.kept_til = state.used, state.pending, state.kept_til
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
