-- Exact integers in doubles. Every value stays within 2^53; a product that could pass it goes through muldiv.
-- floor(a / b) is right for integers below 2^53: the quotient's distance from the next integer is at least 1 / b, more than a double's error there.

local floor = math.floor

return {
  -- floor(a * b / m) and the remainder, for 0 <= a <= m <= 2^42 and 0 <= b < 2^50: b goes in by digits of 10 bits, so that nothing passes 2^53.
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

  -- floor(limit * percent / 100), where the product could pass 2^53.
  share_of = function(limit, percent)
    local rest = limit % 100
    return (limit - rest) / 100 * percent + floor(rest * percent / 100)
  end,
}
