-- Exact integer arithmetic in doubles. Every value stays within 2^53; a product that may exceed it goes through muldiv.
--
-- floor(a / b) is exact for integers below 2^53: the distance of the quotient to the next integer is at least 1 / b,
-- which is more than the error of a double there.

local floor = math.floor

return {
  -- Return floor(a * b / m) and the remainder, for 0 <= a <= m <= 2^42 and 0 <= b < 2^50. It multiplies by 10 bits of b
  -- at a time, so that nothing exceeds 2^53.
  muldiv = function(a, b, m)
    if a * b < 9007199254740992 then
      local product = a * b
      return floor(product / m), product % m
    end
    local quotient, rest = 0, 0
    for shift = 4, 0, -1 do
      local digit = floor(b / 1024 ^ shift) % 1024
      rest = rest * 1024 + a * digit
      quotient = quotient * 1024 + floor(rest / m)
      rest = rest % m
    end
    return quotient, rest
  end,

  -- Return floor(limit * percent / 100), where the product may exceed 2^53.
  percent_of = function(limit, percent)
    local rest = limit % 100
    return (limit - rest) / 100 * percent + floor(rest * percent / 100)
  end,
}
