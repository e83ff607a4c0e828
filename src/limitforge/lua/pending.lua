-- What is open on a bucket, in the order of the lapses: token 8, lapse 7, amount 7, source 7, kind 1.
-- kind: 0 a reservation whose cost stays when it lapses, 1 one whose cost is given back, 2 a node's share of a token bucket.

local sub, pack, unpack_struct = string.sub, struct.pack, struct.unpack

local PENDING = '<c8I7I7I7B'
local WIDTH = use('buckets').PENDING_WIDTH
local REFUND, SHARE = 1, 2
local HOLD_US = 5000000 -- what is held for a check over several slots lapses after this

local list
list = {
  HOLD_US = HOLD_US,

  -- Gives back what was reserved for refund and is over, forgets what was to be kept.
  lapse = function(state, algorithm, numbers)
    local pending, keep_from = state.pending, 1
    while keep_from <= #pending do
      local _, lapses, amount, source, kind = unpack_struct(PENDING, pending, keep_from)
      if lapses > state.last then break end
      if kind == REFUND then algorithm.give(state, numbers, amount, source) end
      keep_from = keep_from + WIDTH
    end
    if keep_from > 1 then state.pending = sub(pending, keep_from) end
  end,

  -- A reservation joins after those that lapse no later.
  add = function(state, token, lapses, amount, source, kind)
    local pending, at = state.pending, #state.pending
    while at > 0 do
      local _, earlier = unpack_struct(PENDING, pending, at - WIDTH + 1)
      if earlier <= lapses then break end
      at = at - WIDTH
    end
    state.pending = sub(pending, 1, at) .. pack(PENDING, token, lapses, amount, source, kind) .. sub(pending, at + 1)
  end,

  -- Takes one off the list; its source and amount, or nil if it is not there.
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

  -- What was held is no longer: it stays taken, or is a reservation with these terms since it was taken. Its source, or nil if it is not there.
  settle = function(state, token, ttl_us, kind)
    local pending = state.pending
    for at = 1, #pending, WIDTH do
      if sub(pending, at, at + 7) == token then
        local _, lapses, amount, source = unpack_struct(PENDING, pending, at)
        state.pending = sub(pending, 1, at - 1) .. sub(pending, at + WIDTH)
        if ttl_us > 0 then list.add(state, token, lapses - HOLD_US + ttl_us, amount, source, kind) end
        return source
      end
    end
    return nil
  end,

  -- Of the shares: how much is out, and when the last of it lapses.
  shares = function(pending)
    local out, latest = 0, 0
    for at = 1, #pending, WIDTH do
      local _, lapses, amount, _, kind = unpack_struct(PENDING, pending, at)
      if kind == SHARE then out, latest = out + amount, lapses end
    end
    return out, latest
  end,
}

return list
