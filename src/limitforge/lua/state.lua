-- How a bucket is kept: one string, so that one MGET reads all buckets of a call and one SET writes each.
--
--   version  1 byte    who wrote it; 0 is none
--   code     1 byte    the algorithm
--   width    1 byte    length of the fixed part, these three bytes included
--   last     7 bytes   when it was last written, in microseconds
--   until    7 bytes   from when on it no longer matters, so also when it resets (a ledger finds it in its items)
--   ...                the algorithm's own fields, then the items of a ledger
--   pending  30 bytes each: open reservations in the order of their lapses: token 8, lapse 7, amount 7, source 7, refund 1
--
-- The fixed part only ever grows at its end. A release ignores the fields of a newer one, which has defaults for those that an older one left out: so
-- both work on the same keys during a deploy.
--
-- In a script call a state is a table with the same fields; `seal` sets `til` (until) and `used`, which is what counts against the limit, rounded up. An opened state is a copy: it replaces the stored one only when something was taken.

local ceil, byte, sub, pack, unpack_struct = math.ceil, string.byte, string.sub, struct.pack, struct.unpack

local states = { FORMAT = 1 }

local PENDING_WIDTH = 30
states.PENDING_WIDTH = PENDING_WIDTH
local PENDING = '<c8I7I7I7B'

local MARGIN_MS = 60000           -- a key outlives `until` by a minute: garbage collection only, never a decision
local INJECTED_MARGIN_MS = 3600000 -- with a time from outside, Redis's clock says nothing about `until`

-- The state in a string, or nil if it is none of this algorithm.
function states.read(raw, code, algorithm)
  local version, found, width = byte(raw, 1, 3)
  if not width or version == 0 or found ~= code or width < algorithm.width or #raw < width then return nil end
  local state, tail = algorithm.read(raw, width + 1)
  if not state then return nil end
  if tail > #raw then
    state.pending = ''
  else
    state.pending = sub(raw, tail)
    if #state.pending % PENDING_WIDTH ~= 0 then return nil end
  end
  return state
end

-- In milliseconds, for a key that matters until then: never 0, never none.
function states.ttl(til, now, injected)
  local ttl = ceil((til - now) / 1000) + MARGIN_MS
  if injected and ttl < INJECTED_MARGIN_MS then return INJECTED_MARGIN_MS end
  return ttl
end

function states.is_gone(state, now)
  return not state or (now >= state.til and now >= state.last)
end

-- The bucket as it is now under `numbers`, with what has lapsed given back; nil and the time if a calendar does not reach that far.
function states.open(state, algorithm, numbers, now)
  if not state or (now >= state.til and now >= state.last) then
    return algorithm.fresh(numbers, now), now
  end
  if now < state.last then now = state.last end
  local work = algorithm.open(state, numbers, now)
  if not work then return nil, now end
  if work.pending ~= '' then
    local pending, keep_from = work.pending, 1
    while keep_from <= #pending do
      local _, lapses, amount, source, refund = unpack_struct(PENDING, pending, keep_from)
      if lapses > now then break end
      if refund == 1 then algorithm.give(work, numbers, amount, source) end
      keep_from = keep_from + PENDING_WIDTH
    end
    if keep_from > 1 then work.pending = sub(pending, keep_from) end
  end
  return work, now
end

-- A reservation joins after those that lapse no later.
function states.add_pending(state, token, lapses, amount, source, refund)
  local pending, at = state.pending, #state.pending
  while at > 0 do
    local _, earlier = unpack_struct(PENDING, pending, at - PENDING_WIDTH + 1)
    if earlier <= lapses then break end
    at = at - PENDING_WIDTH
  end
  state.pending = sub(pending, 1, at) .. pack(PENDING, token, lapses, amount, source, refund) .. sub(pending, at + 1)
end

-- Takes a reservation off the list; its source, or nil if it is not there.
function states.remove_pending(state, token)
  local pending = state.pending
  for at = 1, #pending, PENDING_WIDTH do
    if sub(pending, at, at + 7) == token then
      local _, _, _, source = unpack_struct(PENDING, pending, at)
      state.pending = sub(pending, 1, at - 1) .. sub(pending, at + PENDING_WIDTH)
      return source
    end
  end
  return nil
end

return states
