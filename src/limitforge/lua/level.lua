-- Shared by token bucket and leaky bucket: a level in units of 1/per_us token, and its exact conversion to another
-- rate. An opened state keeps the stored `until_us`: unless something is written now, the bucket expires then, even if
-- its numbers have changed.
--
-- numbers: capacity, tokens, per_us. State: level 7 (signed), size 7, tokens 7, per_us 6. The last three are the
-- numbers that the bucket was written with.

local pack, unpack_struct = struct.pack, struct.unpack
local FORMAT = use('buckets').FORMAT

local BUCKET = '<BBBI7I7i7I7I7I6'

local stored = { last = 0, until_us = 0, level = 0, size = 0, tokens = 0, per = 0, pending = '' } -- the state read last

local level
level = {
  BUCKET = BUCKET,
  WIDTH = 44,

  read = function(raw, tail)
    local _, _, _, last, until_us, amount, size, tokens, per = unpack_struct(BUCKET, raw)
    if tokens == 0 or per == 0 then return nil end
    stored.last, stored.until_us, stored.level = last, until_us, amount
    stored.size, stored.tokens, stored.per = size, tokens, per
    return stored, tail
  end,

  writer = function(code)
    return function(state)
      local size, tokens, per = state.size, state.tokens, state.per
      return pack(BUCKET, FORMAT, code, level.WIDTH, state.last, state.until_us, state.level, size, tokens, per)
    end
  end,

  numbers = function(state)
    return { state.size, state.tokens, state.per }
  end,

  -- Return the level in the unit of another rate, rounded down and clamped. Whole tokens and the remaining fraction are
  -- converted separately, which keeps both exact.
  convert = function(state, numbers, lowest, highest)
    local amount, old, per = state.level, state.per, numbers[3]
    if old ~= per then
      local rest = amount % old
      local whole = (amount - rest) / old
      local size = numbers[1]
      if whole > 2 * size then return highest end
      if whole < -2 * size then return lowest end
      amount = whole * per + (use('exact').muldiv(rest, per, old))
    end
    if amount > highest then return highest end
    if amount < lowest then return lowest end
    return amount
  end,
}

return level
