-- Shared by sliding window and concurrency: entries with a cost, each of which counts until its own end, sorted by end.
--
-- State: used 2 (the sum of all entries), limit 2, span_us 7 (window or TTL), count 2, then the entries, which start
-- with their end 7 and their cost 2. The fixed part has no `until_us`, because that is the end of the last entry.
--
-- The entries stay a string: expired ones are cut off at the front, new ones are added at the back, and those in
-- between are never touched.

local sub, pack, unpack_struct = string.sub, struct.pack, struct.unpack
local FORMAT = use('buckets').FORMAT

local NEVER = -1 -- waiting does not help
local LEDGER = '<BBBI7I2I2I7I2'
local LEDGER_WIDTH = 23
local ENTRY = '<I7I2'

-- Return a ledger for entries of this width, as the base of an algorithm.
return function(code, entry_width)
  local function seal(state)
    local entries = state.entries
    state.until_us = entries == '' and state.last_us or (unpack_struct(ENTRY, entries, #entries - entry_width + 1))
  end

  return {
    code = code,
    width = LEDGER_WIDTH,
    seal = seal,

    read = function(raw, tail)
      local _, _, _, last_us, used, limit, span_us, count = unpack_struct(LEDGER, raw)
      local stop = tail + count * entry_width
      if stop - 1 > #raw or (count == 0 and used > 0) then return nil end
      local entries = sub(raw, tail, stop - 1)
      local state = { last_us = last_us, used = used, limit = limit, span_us = span_us, entries = entries }
      seal(state)
      return state, stop
    end,

    write = function(state)
      local last_us, entries = state.last_us, state.entries
      local count = #entries / entry_width
      return pack(LEDGER, FORMAT, code, LEDGER_WIDTH, last_us, state.used, state.limit, state.span_us, count) .. entries
    end,

    parameters = function(state)
      return { state.limit, state.span_us }
    end,

    fresh = function(parameters, now)
      return { last_us = now, pending = '', used = 0, limit = parameters[1], span_us = parameters[2], entries = '' }
    end,

    open = function(state, parameters, now)
      local entries, used, at = state.entries, state.used, 1
      while at <= #entries do
        local ends_us, cost = unpack_struct(ENTRY, entries, at)
        if ends_us > now then break end
        used = used - cost
        at = at + entry_width
      end
      if at > 1 then entries = sub(entries, at) end
      return {
        last_us = now, pending = state.pending, used = used,
        limit = parameters[1], span_us = parameters[2], entries = entries,
      }
    end,

    wait = function(state, parameters, cost, share)
      if cost > share then return NEVER end
      local short = state.used + cost - share
      if short <= 0 then return 0 end
      local entries = state.entries
      for at = 1, #entries, entry_width do
        local ends_us, entry_cost = unpack_struct(ENTRY, entries, at)
        short = short - entry_cost
        if short <= 0 then return ends_us - state.last_us end
      end
      error('the sum of a ledger differs from its entries')
    end,

    -- Return where to insert an entry: after those that end no later. The newest entry nearly always ends last.
    insertion_point = function(entries, ends_us)
      local at = #entries
      while at > 0 do
        local other = unpack_struct(ENTRY, entries, at - entry_width + 1)
        if other <= ends_us then break end
        at = at - entry_width
      end
      return at
    end,

    -- Return the entries with the bytes from `before` to `at` replaced by a new entry. Lua hashes each new string as a
    -- whole, so appending at the end avoids cutting.
    put = function(entries, before, entry, at)
      if before == #entries then return entries .. entry end
      return sub(entries, 1, before) .. entry .. sub(entries, at + 1)
    end,
  }
end
