-- Leaky bucket: starts empty and drains continuously. What is taken is delayed until the level before it has drained.

local ceil, max, min = math.ceil, math.max, math.min
local level = use('level')

local NEVER = -1 -- waiting does not help

local leaky_bucket = {
  code = 2,
  width = level.WIDTH,
  read = level.read,
  write = level.writer(2),
  numbers = level.numbers,

  fresh = function(numbers, now)
    local size, tokens, per = numbers[1], numbers[2], numbers[3]
    return { last = now, until_us = now, pending = '', level = 0, size = size, tokens = tokens, per = per }
  end,

  open = function(state, numbers, now)
    local size, tokens, per = numbers[1], numbers[2], numbers[3]
    local amount = state.level
    if state.per ~= per or state.size ~= size then amount = level.convert(state, numbers, 0, 2 * size * per) end
    local elapsed = now - state.last
    if elapsed >= ceil(amount / tokens) then
      amount = 0
    else
      amount = amount - elapsed * tokens
    end
    return {
      last = now, until_us = state.until_us, pending = state.pending,
      level = amount, size = size, tokens = tokens, per = per,
    }
  end,

  wait = function(state, numbers, cost, share)
    if cost > share then return NEVER end
    local over = state.level - (share - cost) * numbers[3]
    if over <= 0 then return 0 end
    return ceil(over / numbers[2])
  end,

  -- Return how long to delay what was just taken.
  delay = function(state, numbers)
    return ceil(state.level / numbers[2])
  end,

  take = function(state, numbers, cost)
    state.level = state.level + cost * numbers[3]
  end,

  force = function(state, numbers, amount)
    local before, most = state.level, 2 * numbers[1] * numbers[3]
    state.level = max(before, min(before + min(amount, 2 * numbers[1]) * numbers[3], most))
    return state.level > before
  end,

  give = function(state, numbers, amount)
    state.level = max(state.level - min(amount, 2 * numbers[1]) * numbers[3], 0)
  end,

  source = function()
    return 0
  end,

  seal = function(state)
    state.used = ceil(state.level / state.per)
    state.until_us = state.last + ceil(state.level / state.tokens)
  end,
}

return leaky_bucket
