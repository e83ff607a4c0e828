-- Replace the results of a check call whose writes Redis refused. `checks` and `out` are those of check.lua.
--
-- Each check that took something is answered with 5 alone. So is each later check of a bucket that such a check took
-- from, because it saw a state that was not written. Other peeks and denials stay.

local ALLOWED, NEEDS_CALENDAR, NOT_WRITTEN, NEEDS_OVERRIDES = 1, 2, 5, 6
local ALLOWED_PLAIN, NEEDS_OVERFLOW_KEYS = 7, 8

return function(checks, out)
  local at, o, taken, replaced, n = 1, 1, {}, { out[1] }, 1
  while checks[at] and out[o + 1] do
    local debits, first = checks[at], at + (checks[at + 2] ~= 0 and 6 or 3)
    local status, cost, is_stale, width = out[o + 1], 0, false, 2
    if status == ALLOWED_PLAIN then
      width = 1 + 2 * debits
    elseif status <= ALLOWED then
      width = 2 + 5 * debits
    elseif status == NEEDS_CALENDAR or status == NEEDS_OVERRIDES or status == NEEDS_OVERFLOW_KEYS then
      width = 3
    end
    for place = first, first + 5 * (debits - 1), 5 do
      cost = cost + checks[place + 2]
      is_stale = is_stale or taken[checks[place + 1]]
    end
    local took = (status == ALLOWED_PLAIN or status == ALLOWED) and (cost > 0 or checks[at + 2] ~= 0)
    if took then
      for place = first, first + 5 * (debits - 1), 5 do taken[checks[place + 1]] = true end
    end
    if took or (is_stale and status <= ALLOWED) then
      replaced[n + 1] = NOT_WRITTEN
      n = n + 1
    else
      for i = 1, width do replaced[n + i] = out[o + i] end
      n = n + width
    end
    at, o = first + 5 * debits, o + width
  end
  return replaced
end
