-- Concurrency: leases that hold their cost until they are released, or until a TTL after they were taken or renewed.
-- numbers: slots, ttl_us. Item: end 7, cost 2, token 8.

local sub, pack, unpack_struct = string.sub, struct.pack, struct.unpack

local LEASE = '<I7I2c8'
local LEASE_WIDTH = 17

local concurrency = use('ledger')(6, LEASE_WIDTH)

local function insert_lease(state, cost, token)
  local ends = state.last + state.span
  local at = concurrency.place(state.items, ends)
  state.items = concurrency.put(state.items, at, pack(LEASE, ends, cost, token), at)
end

function concurrency.take(state, numbers, cost, token)
  state.used = state.used + cost
  insert_lease(state, cost, token)
end

-- Remove a lease; return its cost, or nil if there is none.
local function remove_lease(state, token)
  local items = state.items
  for at = 1, #items, LEASE_WIDTH do
    if sub(items, at + 9, at + 16) == token then
      local _, cost = unpack_struct(LEASE, items, at)
      state.items = sub(items, 1, at - 1) .. sub(items, at + LEASE_WIDTH)
      return cost
    end
  end
  return nil
end

function concurrency.release(state, token)
  local cost = remove_lease(state, token)
  if not cost then return false end
  state.used = state.used - cost
  return true
end

-- Renew a lease by the TTL that the bucket was last written with.
function concurrency.renew(state, token)
  local cost = remove_lease(state, token)
  if not cost then return false end
  insert_lease(state, cost, token)
  return true
end

return concurrency
