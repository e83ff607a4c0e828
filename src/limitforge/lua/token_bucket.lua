-- Token bucket: starts full, refills continuously, and its level is at least minus its capacity. It does not refill
-- what processes have prepaid (prepaid.lua): the level stays below the capacity minus that.

local floor, ceil, max, min, pack, unpack_struct = math.floor, math.ceil, math.max, math.min, struct.pack, struct.unpack
local level, FORMAT = use('level'), use('buckets').FORMAT
local BUCKET, WIDTH = level.BUCKET, level.WIDTH

local NEVER = -1 -- waiting does not help

-- Return how high the level may rise beside the prepaid shares.
local function ceiling(state, full, per)
  if state.pending == '' then return full end
  return full - use('pending').prepaid(state.pending) * per
end

local function refilled(amount, elapsed, tokens, highest)
  if elapsed >= ceil((highest - amount) / tokens) then return max(amount, highest) end -- clamp before multiplying
  return amount + elapsed * tokens
end

local token_bucket = {
  code = 1,
  width = WIDTH,
  read = level.read,
  write = level.writer(1),
  numbers = level.numbers,

  fresh = function(numbers, now)
    local size, tokens, per = numbers[1], numbers[2], numbers[3]
    return { last = now, until_us = now, pending = '', level = size * per, size = size, tokens = tokens, per = per }
  end,

  open = function(state, numbers, now)
    local size, tokens, per = numbers[1], numbers[2], numbers[3]
    local full = size * per
    local amount = state.level
    if state.per ~= per or state.size ~= size then amount = level.convert(state, numbers, -full, full) end
    amount = refilled(amount, now - state.last, tokens, ceiling(state, full, per))
    return {
      last = now, until_us = state.until_us, pending = state.pending,
      level = amount, size = size, tokens = tokens, per = per,
    }
  end,

  step = function(raw, numbers, cost, now)
    local size, tokens, per = numbers[1], numbers[2], numbers[3]
    if #raw ~= WIDTH or cost > size then return nil end
    local version, code, width, last, until_us, amount, old_size, old_tokens, old_per = unpack_struct(BUCKET, raw)
    if version ~= FORMAT or code ~= 1 or width ~= WIDTH or now < last or now >= until_us then return nil end
    if size ~= old_size or tokens ~= old_tokens or per ~= old_per then return nil end
    local full = size * per
    amount = refilled(amount, now - last, tokens, full) - cost * per
    if amount < 0 or amount >= full then return nil end -- no room, or a corrupt level
    until_us = now + ceil((full - amount) / tokens)
    return pack(BUCKET, version, code, width, now, until_us, amount, size, tokens, per), until_us, floor(amount / per)
  end,

  start = function(numbers, cost, now)
    local size, tokens, per = numbers[1], numbers[2], numbers[3]
    if cost > size then return nil end
    local until_us = now + ceil(cost * per / tokens)
    return pack(BUCKET, FORMAT, 1, WIDTH, now, until_us, (size - cost) * per, size, tokens, per), until_us, size - cost
  end,

  wait = function(state, numbers, cost, share)
    if cost > share then return NEVER end
    local short = (numbers[1] - share + cost) * numbers[3] - state.level
    if short <= 0 then return 0 end
    return ceil(short / numbers[2])
  end,

  take = function(state, numbers, cost)
    state.level = state.level - cost * numbers[3]
  end,

  force = function(state, numbers, amount)
    local before, full = state.level, numbers[1] * numbers[3]
    state.level = max(before - min(amount, 2 * numbers[1]) * numbers[3], -full)
    return state.level < before
  end,

  give = function(state, numbers, amount)
    local highest = ceiling(state, numbers[1] * numbers[3], numbers[3])
    state.level = max(state.level, min(state.level + min(amount, 2 * numbers[1]) * numbers[3], highest))
  end,

  source = function()
    return 0
  end,

  seal = function(state)
    local amount, per = state.level, state.per
    state.used = state.size - floor(amount / per)
    state.until_us = state.last + ceil((state.size * per - amount) / state.tokens)
    if state.pending ~= '' then
      local prepaid, latest = use('pending').prepaid(state.pending)
      if prepaid > 0 then state.until_us = max(state.until_us, latest + ceil(prepaid * per / state.tokens)) end
    end
  end,
}

return token_bucket
