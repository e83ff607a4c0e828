-- Shared by token bucket and leaky bucket: a level in units of 1/per_us token, and its exact conversion to another
-- rate. An opened state keeps the stored `until_us`: unless something is written now, the bucket expires then, even if
-- its parameters have changed.
--
-- parameters: capacity, tokens, per_us. State: level 7 (signed), limit 7, tokens 7, per_us 6. The last three are the
-- parameters that the bucket was written with.

local pack, unpack_struct = struct.pack, struct.unpack
local FORMAT = use('buckets').FORMAT

local BUCKET = '<BBBI7I7i7I7I7I6'

-- The state read last.
local stored = { last_us = 0, until_us = 0, level = 0, limit = 0, tokens = 0, per_us = 0, pending = '' }

local level
level = {
  BUCKET = BUCKET,
  WIDTH = 44,

  read = function(raw, tail)
    local _, _, _, last_us, until_us, amount, limit, tokens, per_us = unpack_struct(BUCKET, raw)
    if tokens == 0 or per_us == 0 then return nil end
    stored.last_us, stored.until_us, stored.level = last_us, until_us, amount
    stored.limit, stored.tokens, stored.per_us = limit, tokens, per_us
    return stored, tail
  end,

  writer = function(code)
    return function(state)
      local limit, tokens, per_us = state.limit, state.tokens, state.per_us
      return pack(BUCKET, FORMAT, code, level.WIDTH, state.last_us, state.until_us, state.level, limit, tokens, per_us)
    end
  end,

  parameters = function(state)
    return { state.limit, state.tokens, state.per_us }
  end,

  -- Return the level in the unit of another rate, rounded down and clamped. Whole tokens and the remaining fraction are
  -- converted separately, which keeps both exact.
  converted = function(state, parameters, lowest, highest)
    local amount, old, per_us = state.level, state.per_us, parameters[3]
    if old ~= per_us then
      local rest = amount % old
      local whole = (amount - rest) / old
      local limit = parameters[1]
      if whole > 2 * limit then return highest end
      if whole < -2 * limit then return lowest end
      amount = whole * per_us + (use('exact').muldiv(rest, per_us, old))
    end
    if amount > highest then return highest end
    if amount < lowest then return lowest end
    return amount
  end,
}

return level
