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

local ceil, byte, sub = math.ceil, string.byte, string.sub

local PENDING_WIDTH = 30
local MARGIN_MS = 60000            -- a key outlives `until` by a minute: garbage collection only, never a decision
local INJECTED_MARGIN_MS = 3600000 -- with a time from outside, Redis's clock says nothing about `until`

return {
  FORMAT = 1,
  PENDING_WIDTH = PENDING_WIDTH,

  -- The state in a string, or nil if it is none of this algorithm.
  read = function(raw, code, algorithm)
    local version, found, width = byte(raw, 1, 3)
    if not width or version == 0 or found ~= code or width < algorithm.width or #raw < width then return nil end
    local state, tail = algorithm.read(raw, width + 1)
    if not state or state.til < state.last then return nil end
    if tail > #raw then
      state.pending = ''
    else
      state.pending = sub(raw, tail)
      if #state.pending % PENDING_WIDTH ~= 0 then return nil end
    end
    return state
  end,

  -- The bucket as it is now under `numbers`, with what has lapsed given back; nil and the time if a calendar does not reach that far.
  open = function(state, algorithm, numbers, now)
    if not state or (now >= state.til and now >= state.last) then return algorithm.fresh(numbers, now), now end
    if now < state.last then now = state.last end
    local work = algorithm.open(state, numbers, now)
    if work and work.pending ~= '' then use('pending').lapse(work, algorithm, numbers) end
    return work, now
  end,

  -- In milliseconds, for a key that matters until then: never 0, never none.
  ttl = function(til, now, injected)
    local ttl = ceil((til - now) / 1000) + MARGIN_MS
    if injected and ttl < INJECTED_MARGIN_MS then return INJECTED_MARGIN_MS end
    return ttl
  end,
}
