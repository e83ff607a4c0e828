-- After a write was refused: every check that took something is answered with 5 in place of 1. Looks and denials stand.
-- `checks` and `out` as in check.lua.

local TAKEN, UNWRITTEN = 1, 5

return function(checks, out)
  local at, o = 1, 1
  while checks[at] and out[o + 1] do
    local takes, first = checks[at], at + (checks[at + 2] > 0 and 6 or 3)
    local status, cost = out[o + 1], 0
    for take = 0, takes - 1 do cost = cost + checks[first + 5 * take + 2] end
    if status == TAKEN and (cost > 0 or checks[at + 2] > 0) then out[o + 1] = UNWRITTEN end
    if status <= TAKEN then
      o = o + 2 + 5 * takes
    else
      o = o + (status == 2 and 3 or 2)
    end
    at = first + 5 * takes
  end
end
