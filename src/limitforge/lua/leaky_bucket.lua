-- Leaky bucket: starts empty and drains continuously. Each cost is delayed until everything before it has drained.

local ceil, max, min = math.ceil, math.max, math.min
local level = use('level')

local NEVER = -1 -- waiting does not help

local leaky_bucket = {
  code = 2,
  width = level.WIDTH,
  read = level.read,
  write = level.writer(2),
  parameters = level.parameters,

  fresh = function(parameters, now)
    local limit, tokens, per_us = parameters[1], parameters[2], parameters[3]
    return { last_us = now, until_us = now, pending = '', level = 0, limit = limit, tokens = tokens, per_us = per_us }
  end,

  open = function(state, parameters, now)
    local limit, tokens, per_us = parameters[1], parameters[2], parameters[3]
    local amount = state.level
    if state.per_us ~= per_us or state.limit ~= limit then
      amount = level.converted(state, parameters, 0, 2 * limit * per_us)
    end
    local elapsed = now - state.last_us
    if elapsed >= ceil(amount / tokens) then
      amount = 0
    else
      amount = amount - elapsed * tokens
    end
    return {
      last_us = now, until_us = state.until_us, pending = state.pending,
      level = amount, limit = limit, tokens = tokens, per_us = per_us,
    }
  end,

  wait = function(state, parameters, cost, share)
    if cost > share then return NEVER end
    local over = state.level - (share - cost) * parameters[3]
    if over <= 0 then return 0 end
    return ceil(over / parameters[2])
  end,

  -- Return how long to delay what was just taken.
  delay = function(state, parameters)
    return ceil(state.level / parameters[2])
  end,

  take = function(state, parameters, cost)
    state.level = state.level + cost * parameters[3]
  end,

  force = function(state, parameters, amount)
    local before, most = state.level, 2 * parameters[1] * parameters[3]
    state.level = max(before, min(before + min(amount, 2 * parameters[1]) * parameters[3], most))
    return state.level > before
  end,

  give = function(state, parameters, amount)
    state.level = max(state.level - min(amount, 2 * parameters[1]) * parameters[3], 0)
  end,

  source = function()
    return 0
  end,

  seal = function(state)
    state.used = ceil(state.level / state.per_us)
    state.until_us = state.last_us + ceil(state.level / state.tokens)
  end,
}

return leaky_bucket
