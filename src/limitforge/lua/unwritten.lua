-- After a write was refused: every check that took something is answered with 5, and so is every one that came after it to a bucket that it took from.
-- Other looks and denials stand. `checks` and `out` as in check.lua.

local TAKEN, UNWRITTEN = 1, 5

return function(checks, out)
  local at, o, taken = 1, 1, {}
  while checks[at] and out[o + 1] do
    local takes, first = checks[at], at + (checks[at + 2] ~= 0 and 6 or 3)
    local status, cost, misled = out[o + 1], 0, false
    for place = first, first + 5 * (takes - 1), 5 do
      cost = cost + checks[place + 2]
      misled = misled or taken[checks[place + 1]]
    end
    local took = status == TAKEN and (cost > 0 or checks[at + 2] ~= 0)
    if took then
      for place = first, first + 5 * (takes - 1), 5 do taken[checks[place + 1]] = true end
    end
    if status <= TAKEN then
      if took or misled then out[o + 1] = UNWRITTEN end
      o = o + 2 + 5 * takes
    else
      o = o + ((status == 2 or status == 6) and 3 or 2)
    end
    at = first + 5 * takes
  end
end
