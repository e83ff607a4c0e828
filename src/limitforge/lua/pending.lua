-- The open reservations of a bucket, in the order of their lapses: token 8, lapse 7, amount 7, source 7, refund 1.

local sub, pack, unpack_struct = string.sub, struct.pack, struct.unpack

local PENDING = '<c8I7I7I7B'
local WIDTH = use('buckets').PENDING_WIDTH

return {
  -- Gives back what was reserved for refund and is over, forgets what was to be kept.
  lapse = function(state, algorithm, numbers)
    local pending, keep_from = state.pending, 1
    while keep_from <= #pending do
      local _, lapses, amount, source, refund = unpack_struct(PENDING, pending, keep_from)
      if lapses > state.last then break end
      if refund == 1 then algorithm.give(state, numbers, amount, source) end
      keep_from = keep_from + WIDTH
    end
    if keep_from > 1 then state.pending = sub(pending, keep_from) end
  end,

  -- A reservation joins after those that lapse no later.
  add = function(state, token, lapses, amount, source, refund)
    local pending, at = state.pending, #state.pending
    while at > 0 do
      local _, earlier = unpack_struct(PENDING, pending, at - WIDTH + 1)
      if earlier <= lapses then break end
      at = at - WIDTH
    end
    state.pending = sub(pending, 1, at) .. pack(PENDING, token, lapses, amount, source, refund) .. sub(pending, at + 1)
  end,

  -- Takes a reservation off the list; its source, or nil if it is not there.
  remove = function(state, token)
    local pending = state.pending
    for at = 1, #pending, WIDTH do
      if sub(pending, at, at + 7) == token then
        local _, _, _, source = unpack_struct(PENDING, pending, at)
        state.pending = sub(pending, 1, at - 1) .. sub(pending, at + WIDTH)
        return source
      end
    end
    return nil
  end,
}
