-- The pending entries of a bucket, in the order of their lapse: token 8, lapse 7, amount 7, source 7, kind 1.
--
-- kind: 0 a reservation whose cost stays when it lapses, 1 one whose cost is refunded, 2 a prepaid share of a token
-- bucket.

local sub, pack, unpack_struct = string.sub, struct.pack, struct.unpack

local PENDING = '<c8I7I7I7B'
local WIDTH = use('buckets').PENDING_WIDTH
local REFUND, SHARE = 1, 2
local TENTATIVE_TTL_US = 5000000 -- what a check over several slots holds lapses after 5 s

local list
list = {
  TENTATIVE_TTL_US = TENTATIVE_TTL_US,

  -- Remove the entries that have lapsed, and refund those of kind 1.
  lapse = function(state, algorithm, parameters)
    local pending, keep_from = state.pending, 1
    while keep_from <= #pending do
      local _, lapses_us, amount, source, kind = unpack_struct(PENDING, pending, keep_from)
      if lapses_us > state.last_us then break end
      if kind == REFUND then algorithm.give(state, parameters, amount, source) end
      keep_from = keep_from + WIDTH
    end
    if keep_from > 1 then state.pending = sub(pending, keep_from) end
  end,

  -- Insert an entry after those that lapse no later.
  add = function(state, token, lapses_us, amount, source, kind)
    local pending, at = state.pending, #state.pending
    while at > 0 do
      local _, earlier = unpack_struct(PENDING, pending, at - WIDTH + 1)
      if earlier <= lapses_us then break end
      at = at - WIDTH
    end
    state.pending = sub(pending, 1, at) .. pack(PENDING, token, lapses_us, amount, source, kind) .. sub(pending, at + 1)
  end,

  -- Remove the entry of a token; return its source and amount, or nil if there is none.
  remove = function(state, token)
    local pending = state.pending
    for at = 1, #pending, WIDTH do
      if sub(pending, at, at + 7) == token then
        local _, _, amount, source = unpack_struct(PENDING, pending, at)
        state.pending = sub(pending, 1, at - 1) .. sub(pending, at + WIDTH)
        return source, amount
      end
    end
    return nil
  end,

  -- Confirm a hold: its cost stays taken. With a ttl_us it becomes a reservation that began when the cost was taken.
  -- Return its source, or nil if there is none.
  confirm = function(state, token, ttl_us, kind)
    local pending = state.pending
    for at = 1, #pending, WIDTH do
      if sub(pending, at, at + 7) == token then
        local _, lapses_us, amount, source = unpack_struct(PENDING, pending, at)
        state.pending = sub(pending, 1, at - 1) .. sub(pending, at + WIDTH)
        if ttl_us > 0 then list.add(state, token, lapses_us - TENTATIVE_TTL_US + ttl_us, amount, source, kind) end
        return source
      end
    end
    return nil
  end,

  -- Return the sum of the prepaid shares, and when the last of them lapses.
  prepaid = function(pending)
    local sum, latest = 0, 0
    for at = 1, #pending, WIDTH do
      local _, lapses_us, amount, _, kind = unpack_struct(PENDING, pending, at)
      if kind == SHARE then sum, latest = sum + amount, lapses_us end
    end
    return sum, latest
  end,
}

return list
