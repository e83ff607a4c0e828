-- Concurrency: leases that hold their cost until they are released, or until a TTL after they were taken or renewed.
-- parameters: slots, ttl_us. Entry: end 7, cost 2, token 8.

local sub, pack, unpack_struct = string.sub, struct.pack, struct.unpack

local LEASE = '<I7I2c8'
local LEASE_WIDTH = 17

local concurrency = use('ledger')(6, LEASE_WIDTH)

local function insert_lease(state, cost, token)
  local ends_us = state.last_us + state.span_us
  local at = concurrency.insertion_point(state.entries, ends_us)
  state.entries = concurrency.put(state.entries, at, pack(LEASE, ends_us, cost, token), at)
end

function concurrency.take(state, parameters, cost, token)
  state.used = state.used + cost
  insert_lease(state, cost, token)
end

-- Remove a lease; return its cost, or nil if there is none.
local function remove_lease(state, token)
  local entries = state.entries
  for at = 1, #entries, LEASE_WIDTH do
    if sub(entries, at + 9, at + 16) == token then
      local _, cost = unpack_struct(LEASE, entries, at)
      state.entries = sub(entries, 1, at - 1) .. sub(entries, at + LEASE_WIDTH)
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
