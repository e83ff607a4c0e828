-- Sliding window: an exact log, in which a cost counts for one window from when it was taken.
-- parameters: limit, window_us. Entry: end 7, cost 2. Costs taken in the same microsecond are one entry.

local min, sub, pack, unpack_struct = math.min, string.sub, struct.pack, struct.unpack

local ENTRY = '<I7I2'
local ENTRY_WIDTH = 9

local sliding_window = use('ledger')(4, ENTRY_WIDTH)

function sliding_window.take(state, parameters, cost)
  state.used = state.used + cost
  local entries, ends_us = state.entries, state.last_us + state.span_us
  local at = sliding_window.insertion_point(entries, ends_us)
  local before = at
  if at > 0 then
    local same, earlier = unpack_struct(ENTRY, entries, at - ENTRY_WIDTH + 1)
    if same == ends_us then
      before, cost = at - ENTRY_WIDTH, cost + earlier
    end
  end
  state.entries = sliding_window.put(entries, before, pack(ENTRY, ends_us, cost), at)
end

function sliding_window.force(state, parameters, amount)
  local taken = min(amount, 2 * parameters[1] - state.used)
  if taken <= 0 then return false end
  sliding_window.take(state, parameters, taken)
  return true
end

function sliding_window.give(state, parameters, amount, source)
  local entries = state.entries
  for at = 1, #entries, ENTRY_WIDTH do
    local ends_us, cost = unpack_struct(ENTRY, entries, at)
    if ends_us == source then
      local given = min(amount, cost)
      local rest = given < cost and pack(ENTRY, ends_us, cost - given) or ''
      state.used = state.used - given
      state.entries = sub(entries, 1, at - 1) .. rest .. sub(entries, at + ENTRY_WIDTH)
      return
    end
  end
end

function sliding_window.source(state)
  return state.last_us + state.span_us
end

return sliding_window
