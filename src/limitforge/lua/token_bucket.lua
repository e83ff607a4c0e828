-- Token bucket: starts full, refills continuously, and its level is at least minus its capacity. It does not refill
-- what processes have prepaid (prepaid.lua): the level stays below the capacity minus that.

local floor, ceil, max, min, pack, unpack_struct = math.floor, math.ceil, math.max, math.min, struct.pack, struct.unpack
local level, FORMAT = use('level'), use('buckets').FORMAT
local BUCKET, WIDTH = level.BUCKET, level.WIDTH

local CODE = 1
local NEVER = -1 -- waiting does not help

-- Return how high the level may rise beside the prepaid shares.
local function ceiling(state, full, per_us)
  if state.pending == '' then return full end
  return full - use('pending').prepaid(state.pending) * per_us
end

local function refilled(amount, elapsed, tokens, highest)
  if elapsed >= ceil((highest - amount) / tokens) then return max(amount, highest) end -- clamp before multiplying
  return amount + elapsed * tokens
end

local token_bucket = {
  code = CODE,
  width = WIDTH,
  read = level.read,
  write = level.writer(CODE),
  parameters = level.parameters,

  fresh = function(parameters, now)
    local limit, tokens, per_us = parameters[1], parameters[2], parameters[3]
    return {
      last_us = now, until_us = now, pending = '',
      level = limit * per_us, limit = limit, tokens = tokens, per_us = per_us,
    }
  end,

  open = function(state, parameters, now)
    local limit, tokens, per_us = parameters[1], parameters[2], parameters[3]
    local full = limit * per_us
    local amount = state.level
    if state.per_us ~= per_us or state.limit ~= limit then amount = level.converted(state, parameters, -full, full) end
    amount = refilled(amount, now - state.last_us, tokens, ceiling(state, full, per_us))
    return {
      last_us = now, until_us = state.until_us, pending = state.pending,
      level = amount, limit = limit, tokens = tokens, per_us = per_us,
    }
  end,

  step = function(raw, parameters, cost, now)
    local limit, tokens, per_us = parameters[1], parameters[2], parameters[3]
    if #raw ~= WIDTH or cost > limit then return nil end
    local version, code, width, last_us, until_us, amount, old_limit, old_tokens, old_per_us =
      unpack_struct(BUCKET, raw)
    if version ~= FORMAT or code ~= CODE or width ~= WIDTH or now < last_us or now >= until_us then return nil end
    if limit ~= old_limit or tokens ~= old_tokens or per_us ~= old_per_us then return nil end
    local full = limit * per_us
    amount = refilled(amount, now - last_us, tokens, full) - cost * per_us
    if amount < 0 or amount >= full then return nil end -- no room, or a corrupt level
    until_us = now + ceil((full - amount) / tokens)
    local remaining = floor(amount / per_us)
    return pack(BUCKET, version, code, width, now, until_us, amount, limit, tokens, per_us), until_us, remaining
  end,

  start = function(parameters, cost, now)
    local limit, tokens, per_us = parameters[1], parameters[2], parameters[3]
    if cost > limit then return nil end
    local until_us, remaining = now + ceil(cost * per_us / tokens), limit - cost
    local amount = remaining * per_us
    return pack(BUCKET, FORMAT, CODE, WIDTH, now, until_us, amount, limit, tokens, per_us), until_us, remaining
  end,

  wait = function(state, parameters, cost, share)
    if cost > share then return NEVER end
    local short = (parameters[1] - share + cost) * parameters[3] - state.level
    if short <= 0 then return 0 end
    return ceil(short / parameters[2])
  end,

  take = function(state, parameters, cost)
    state.level = state.level - cost * parameters[3]
  end,

  force = function(state, parameters, amount)
    local before, full = state.level, parameters[1] * parameters[3]
    state.level = max(before - min(amount, 2 * parameters[1]) * parameters[3], -full)
    return state.level < before
  end,

  give = function(state, parameters, amount)
    local highest = ceiling(state, parameters[1] * parameters[3], parameters[3])
    state.level = max(state.level, min(state.level + min(amount, 2 * parameters[1]) * parameters[3], highest))
  end,

  source = function()
    return 0
  end,

  seal = function(state)
    local amount, per_us = state.level, state.per_us
    state.used = state.limit - floor(amount / per_us)
    state.until_us = state.last_us + ceil((state.limit * per_us - amount) / state.tokens)
    if state.pending ~= '' then
      local prepaid, latest = use('pending').prepaid(state.pending)
      if prepaid > 0 then state.until_us = max(state.until_us, latest + ceil(prepaid * per_us / state.tokens)) end
    end
  end,
}

return token_bucket
