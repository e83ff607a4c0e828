-- Shared by sliding window and concurrency: items with a cost, each of which counts until its own end, sorted by end.
--
-- State: used 2 (the sum of all items), size 2, span 7 (window or TTL), count 2, then the items, which start with their
-- end 7 and their cost 2. The fixed part has no `until`, because that is the end of the last item.
--
-- The items stay a string: expired ones are cut off at the front, new ones are added at the back, and those in between
-- are never touched.

local sub, pack, unpack_struct = string.sub, struct.pack, struct.unpack
local FORMAT = use('buckets').FORMAT

local NEVER = -1 -- waiting does not help
local LEDGER = '<BBBI7I2I2I7I2'
local LEDGER_WIDTH = 23
local ITEM = '<I7I2'

-- Return a ledger for items of this width, as the base of an algorithm.
return function(code, item_width)
  local function seal(state)
    local items = state.items
    state.until_us = items == '' and state.last or (unpack_struct(ITEM, items, #items - item_width + 1))
  end

  return {
    code = code,
    width = LEDGER_WIDTH,
    seal = seal,

    read = function(raw, tail)
      local _, _, _, last, used, size, span, count = unpack_struct(LEDGER, raw)
      local stop = tail + count * item_width
      if stop - 1 > #raw or (count == 0 and used > 0) then return nil end
      local state = { last = last, used = used, size = size, span = span, items = sub(raw, tail, stop - 1) }
      seal(state)
      return state, stop
    end,

    write = function(state)
      local items = state.items
      local count = #items / item_width
      return pack(LEDGER, FORMAT, code, LEDGER_WIDTH, state.last, state.used, state.size, state.span, count) .. items
    end,

    numbers = function(state)
      return { state.size, state.span }
    end,

    fresh = function(numbers, now)
      return { last = now, pending = '', used = 0, size = numbers[1], span = numbers[2], items = '' }
    end,

    open = function(state, numbers, now)
      local items, used, at = state.items, state.used, 1
      while at <= #items do
        local ends, cost = unpack_struct(ITEM, items, at)
        if ends > now then break end
        used = used - cost
        at = at + item_width
      end
      if at > 1 then items = sub(items, at) end
      return { last = now, pending = state.pending, used = used, size = numbers[1], span = numbers[2], items = items }
    end,

    wait = function(state, numbers, cost, share)
      if cost > share then return NEVER end
      local short = state.used + cost - share
      if short <= 0 then return 0 end
      local items = state.items
      for at = 1, #items, item_width do
        local ends, item_cost = unpack_struct(ITEM, items, at)
        short = short - item_cost
        if short <= 0 then return ends - state.last end
      end
      error('the sum of a ledger differs from its items')
    end,

    -- Return where to insert an item: after those that end no later. The newest item nearly always ends last.
    place = function(items, ends)
      local at = #items
      while at > 0 do
        local other = unpack_struct(ITEM, items, at - item_width + 1)
        if other <= ends then break end
        at = at - item_width
      end
      return at
    end,

    -- Return the items with those from `before` to `at` replaced by a new one. Lua hashes each new string as a whole,
    -- so appending at the end avoids cutting.
    put = function(items, before, item, at)
      if before == #items then return items .. item end
      return sub(items, 1, before) .. item .. sub(items, at + 1)
    end,
  }
end
