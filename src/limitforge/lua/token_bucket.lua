-- Token bucket. numbers: capacity, tokens, per_us. Starts full, refills continuously, down to minus its capacity at the lowest.
-- State: level 7 (signed, in 1/per_us tokens), size 7, tokens 7, per_us 6: the numbers that it was written with.

local BUCKET = '<BBBI7I7i7I7I7I6'

-- What both buckets share.

local function read_bucket(raw, tail)
  local _, _, _, last, til, level, size, tokens, per = unpack_struct(BUCKET, raw)
  if tokens == 0 or per == 0 then return nil end
  return { last = last, til = til, level = level, size = size, tokens = tokens, per = per }, tail
end

local function write_bucket(code)
  return function(state)
    return pack(BUCKET, FORMAT, code, 44, state.last, state.til, state.level, state.size, state.tokens, state.per)
  end
end

local function bucket_numbers(state)
  return { state.size, state.tokens, state.per }
end

-- The level in another rate's unit, rounded down and clamped. Whole tokens and the rest of one are converted apart, which keeps both exact.
local function convert_level(state, numbers, lowest, highest)
  local level, old, per = state.level, state.per, numbers[3]
  if old ~= per then
    local rest = level % old
    local whole = (level - rest) / old
    local size = numbers[1]
    if whole > 2 * size then return highest end
    if whole < -2 * size then return lowest end
    level = whole * per + (muldiv(rest, per, old))
  end
  if level > highest then return highest end
  if level < lowest then return lowest end
  return level
end

local token_bucket = { width = 44, read = read_bucket, write = write_bucket(1), numbers = bucket_numbers }

function token_bucket.fresh(numbers, now)
  return { last = now, pending = '', level = numbers[1] * numbers[3], size = numbers[1], tokens = numbers[2], per = numbers[3] }
end

function token_bucket.open(state, numbers, now)
  local size, tokens, per = numbers[1], numbers[2], numbers[3]
  local full = size * per
  local level = state.level
  if state.per ~= per or state.size ~= size then level = convert_level(state, numbers, -full, full) end
  local elapsed = now - state.last
  if elapsed >= ceil((full - level) / tokens) then -- clamped before it is multiplied
    level = full
  else
    level = level + elapsed * tokens
  end
  return { last = now, pending = state.pending, level = level, size = size, tokens = tokens, per = per }
end

function token_bucket.wait(state, numbers, cost, share)
  if cost > share then return NEVER end
  local short = (numbers[1] - share + cost) * numbers[3] - state.level
  if short <= 0 then return 0 end
  return ceil(short / numbers[2])
end

function token_bucket.take(state, numbers, cost)
  state.level = state.level - cost * numbers[3]
end

function token_bucket.force(state, numbers, amount)
  local before, full = state.level, numbers[1] * numbers[3]
  state.level = max(before - min(amount, 2 * numbers[1]) * numbers[3], -full)
  return state.level < before
end

function token_bucket.give(state, numbers, amount)
  state.level = min(state.level + min(amount, 2 * numbers[1]) * numbers[3], numbers[1] * numbers[3])
end

function token_bucket.source()
  return 0
end

function token_bucket.seal(state)
  local level, per = state.level, state.per
  state.used = state.size - floor(level / per)
  state.til = state.last + ceil((state.size * per - level) / state.tokens)
end
