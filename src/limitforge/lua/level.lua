-- What the two buckets share: a level in 1/per_us tokens, and its exact conversion to another rate.
-- An opened state keeps the `til` that was stored: if nothing is written now, the bucket is forgotten then, whatever numbers it has by now.
-- numbers: capacity, tokens, per_us. State: level 7 (signed), size 7, tokens 7, per_us 6: the numbers that it was written with.

local pack, unpack_struct = struct.pack, struct.unpack
local FORMAT = use('buckets').FORMAT

local BUCKET = '<BBBI7I7i7I7I7I6'

local stored = { last = 0, til = 0, level = 0, size = 0, tokens = 0, per = 0, pending = '' } -- what was read last

local level
level = {
  BUCKET = BUCKET,
  WIDTH = 44,

  read = function(raw, tail)
    local _, _, _, last, til, amount, size, tokens, per = unpack_struct(BUCKET, raw)
    if tokens == 0 or per == 0 then return nil end
    stored.last, stored.til, stored.level, stored.size, stored.tokens, stored.per = last, til, amount, size, tokens, per
    return stored, tail
  end,

  writer = function(code)
    return function(state)
      return pack(BUCKET, FORMAT, code, level.WIDTH, state.last, state.til, state.level, state.size, state.tokens, state.per)
    end
  end,

  numbers = function(state)
    return { state.size, state.tokens, state.per }
  end,

  -- The level in another rate's unit, rounded down and clamped. Whole tokens and the rest of one are converted apart, which keeps both exact.
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
