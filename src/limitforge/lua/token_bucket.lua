-- Token bucket: starts full, refills continuously, and is down to minus its capacity at the lowest. What nodes have prepaid (shares.lua) is not refilled: the
-- level stays below the capacity minus that.

local floor, ceil, max, min, pack, unpack_struct = math.floor, math.ceil, math.max, math.min, struct.pack, struct.unpack
local level, FORMAT = use('level'), use('buckets').FORMAT
local BUCKET, WIDTH = level.BUCKET, level.WIDTH

local NEVER = -1 -- a wait that does not end

-- As high as the level may rise, beside the shares that are out.
local function ceiling(state, full, per)
  if state.pending == '' then return full end
  return full - use('pending').shares(state.pending) * per
end

local function refilled(amount, elapsed, tokens, highest)
  if elapsed >= ceil((highest - amount) / tokens) then return max(amount, highest) end -- clamped before it is multiplied
  return amount + elapsed * tokens
end

local token_bucket = {
  code = 1,
  width = WIDTH,
  read = level.read,
  write = level.writer(1),
  numbers = level.numbers,

  fresh = function(numbers, now)
    return { last = now, til = now, pending = '', level = numbers[1] * numbers[3], size = numbers[1], tokens = numbers[2], per = numbers[3] }
  end,

  open = function(state, numbers, now)
    local size, tokens, per = numbers[1], numbers[2], numbers[3]
    local full = size * per
    local amount = state.level
    if state.per ~= per or state.size ~= size then amount = level.convert(state, numbers, -full, full) end
    amount = refilled(amount, now - state.last, tokens, ceiling(state, full, per))
    return { last = now, til = state.til, pending = state.pending, level = amount, size = size, tokens = tokens, per = per }
  end,

  step = function(raw, numbers, cost, now)
    local size, tokens, per = numbers[1], numbers[2], numbers[3]
    if #raw ~= WIDTH or cost > size then return nil end
    local version, code, width, last, til, amount, old_size, old_tokens, old_per = unpack_struct(BUCKET, raw)
    if version ~= FORMAT or code ~= 1 or width ~= WIDTH or now < last or now >= til then return nil end
    if size ~= old_size or tokens ~= old_tokens or per ~= old_per then return nil end
    local full = size * per
    amount = refilled(amount, now - last, tokens, full) - cost * per
    if amount < 0 or amount >= full then return nil end -- no room, or no sense
    til = now + ceil((full - amount) / tokens)
    return pack(BUCKET, version, code, width, now, til, amount, size, tokens, per), til, floor(amount / per)
  end,

  start = function(numbers, cost, now)
    local size, tokens, per = numbers[1], numbers[2], numbers[3]
    if cost > size then return nil end
    local til = now + ceil(cost * per / tokens)
    return pack(BUCKET, FORMAT, 1, WIDTH, now, til, (size - cost) * per, size, tokens, per), til, size - cost
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
    state.til = state.last + ceil((state.size * per - amount) / state.tokens)
    if state.pending ~= '' then
      local out, latest = use('pending').shares(state.pending)
      if out > 0 then state.til = max(state.til, latest + ceil(out * per / state.tokens)) end
    end
  end,
}

return token_bucket
