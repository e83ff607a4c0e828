-- Sliding window: an exact log, in which a cost counts for one window from when it was taken.
-- numbers: limit, window_us. Item: end 7, cost 2. Costs taken in the same microsecond are one item.

local min, sub, pack, unpack_struct = math.min, string.sub, struct.pack, struct.unpack

local ITEM = '<I7I2'
local ITEM_WIDTH = 9

local sliding_window = use('ledger')(4, ITEM_WIDTH)

function sliding_window.take(state, numbers, cost)
  state.used = state.used + cost
  local items, ends = state.items, state.last + state.span
  local at = sliding_window.place(items, ends)
  local before = at
  if at > 0 then
    local same, earlier = unpack_struct(ITEM, items, at - ITEM_WIDTH + 1)
    if same == ends then
      before, cost = at - ITEM_WIDTH, cost + earlier
    end
  end
  state.items = sliding_window.put(items, before, pack(ITEM, ends, cost), at)
end

function sliding_window.force(state, numbers, amount)
  local taken = min(amount, 2 * numbers[1] - state.used)
  if taken <= 0 then return false end
  sliding_window.take(state, numbers, taken)
  return true
end

function sliding_window.give(state, numbers, amount, source)
  local items = state.items
  for at = 1, #items, ITEM_WIDTH do
    local ends, cost = unpack_struct(ITEM, items, at)
    if ends == source then
      local given = min(amount, cost)
      local rest = given < cost and pack(ITEM, ends, cost - given) or ''
      state.used = state.used - given
      state.items = sub(items, 1, at - 1) .. rest .. sub(items, at + ITEM_WIDTH)
      return
    end
  end
end

function sliding_window.source(state)
  return state.last + state.span
end

return sliding_window
