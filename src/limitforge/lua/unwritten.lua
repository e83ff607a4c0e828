-- After a write was refused: the answers, but every check that took something is answered with 5 alone, and so is every one that came after it to a bucket
-- that it took from. Other looks and denials stand. `checks` and `out` as in check.lua.

local ALLOWED, AGAIN, UNWRITTEN, OVERRIDDEN, PLAIN, OVERFLOWS = 1, 2, 5, 6, 7, 8

return function(checks, out)
  local at, o, taken, told, n = 1, 1, {}, { out[1] }, 1
  while checks[at] and out[o + 1] do
    local takes, first = checks[at], at + (checks[at + 2] ~= 0 and 6 or 3)
    local status, cost, misled, width = out[o + 1], 0, false, 2
    if status == PLAIN then
      width = 1 + 2 * takes
    elseif status <= ALLOWED then
      width = 2 + 5 * takes
    elseif status == AGAIN or status == OVERRIDDEN or status == OVERFLOWS then
      width = 3
    end
    for place = first, first + 5 * (takes - 1), 5 do
      cost = cost + checks[place + 2]
      misled = misled or taken[checks[place + 1]]
    end
    local took = (status == PLAIN or status == ALLOWED) and (cost > 0 or checks[at + 2] ~= 0)
    if took then
      for place = first, first + 5 * (takes - 1), 5 do taken[checks[place + 1]] = true end
    end
    if took or (misled and status <= ALLOWED) then
      told[n + 1] = UNWRITTEN
      n = n + 1
    else
      for i = 1, width do told[n + i] = out[o + i] end
      n = n + width
    end
    at, o = first + 5 * takes, o + width
  end
  return told
end
