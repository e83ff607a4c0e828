-- Reservations: what a check has reserved, and its settlement, which happens once.
--
-- The record is msgpack: { format, settled cost (-1: open), lapses_us, expires_us, { code, amount (-1: nothing), count,
-- parameters ... } }. The check that reserves writes it. It lives for its TTL and a day, and a day longer once it is
-- settled.

local ceil = math.ceil
local pending, algorithms, buckets = use('pending'), use('algorithms'), use('buckets')

local RECORD_FORMAT = 1
local RESULT_TTL_MS = 86400000

local reservations = {}

-- Add what one debit has taken: an amount, or false for nothing. Slots are not part of a reservation.
function reservations.add(reserved, code, amount, parameters)
  if code == algorithms.CONCURRENCY or not amount then
    reserved[#reserved + 1], reserved[#reserved + 2], reserved[#reserved + 3] = code, -1, 0
    return
  end
  local count = code == algorithms.QUOTA and 2 or #parameters -- the settlement brings the calendar of its own day
  reserved[#reserved + 1], reserved[#reserved + 2], reserved[#reserved + 3] = code, amount, count
  for i = 1, count do reserved[#reserved + 1] = parameters[i] end
end

function reservations.write_record(key, reserved, lapses_us, ttl_us)
  local record = { RECORD_FORMAT, -1, lapses_us, lapses_us + RESULT_TTL_MS * 1000, reserved }
  redis.call('SET', key, cmsgpack.pack(record), 'PX', ceil(ttl_us / 1000) + RESULT_TTL_MS)
end

-- Replace the reserved cost by the actual cost.
--
-- KEYS          the record, then the bucket of each reserved limit, in order
-- ARGV[2]       the token of the reservation
-- request[3..]  cost, the amount of each limit, the calendar windows of each quota (empty for the other limits)
--
-- Replies one of these:
--   { 1, cost }          settled. If it was settled before, with the earlier cost.
--   { 2 }                lapsed
--   { 3 }                unknown
--   { 4, limit, time }   its calendar does not contain that time
--   { 5 }                other limits were reserved
--   { -1, key }          that key holds a foreign value
function reservations.settle(request, now, injected)
  local call = buckets.read(now, injected)
  local raw = call.values[1]
  if not raw then return { 3 } end
  local parsed, record = pcall(cmsgpack.unpack, raw)
  if not parsed or type(record) ~= 'table' or record[1] ~= RECORD_FORMAT then return { -1, 1 } end
  if now >= record[4] then return { 3 } end
  if record[2] >= 0 then return { 1, record[2] } end

  local cost, amounts, calendars, reserved = request[3], request[4], request[5], record[5]
  local at, latest = 1, now
  for limit = 1, #amounts do
    local code = reserved[at]
    if not code then return { 5 } end
    local state = buckets.state(call, limit + 1, algorithms.of(code))
    if state == nil then return { -1, limit + 1 } end
    if state and state.last_us > latest then latest = state.last_us end
    at = at + 3 + reserved[at + 2]
  end
  if latest >= record[3] then return { 2 } end -- by the clock, or by the time of a bucket that is ahead of it
  if reserved[at] then return { 5 } end

  at = 1
  for limit = 1, #amounts do
    local code, amount, count = reserved[at], reserved[at + 1], reserved[at + 2]
    if amount >= 0 then
      local algorithm, key = algorithms.of(code), limit + 1
      local state = buckets.state(call, key, algorithm)
      local parameters
      if not state or buckets.is_expired(state, now) then
        parameters = {}
        for i = 1, count do parameters[i] = reserved[at + 2 + i] end
        for i = 1, #calendars[limit] do parameters[count + i] = calendars[limit][i] end
      else -- the plan may have changed since the reservation: use the parameters that the bucket was last written with
        parameters = algorithm.parameters(state)
      end
      local opened, effective_time = buckets.open(call, key, algorithm, parameters)
      if not opened then return { 4, limit - 1, effective_time } end
      local more = amounts[limit] - amount
      local source = pending.remove(opened, ARGV[2])
      if source and more < 0 then algorithm.give(opened, parameters, -more, source) end
      local forced = more > 0 and algorithm.force(opened, parameters, more)
      if forced or source then
        algorithm.seal(opened)
        buckets.keep(call, key, algorithm, opened)
      end
    end
    at = at + 3 + count
  end
  buckets.write(call) -- only now, when every limit has been checked
  record[2], record[4] = cost, now + RESULT_TTL_MS * 1000
  redis.call('SET', KEYS[1], cmsgpack.pack(record), 'PX', RESULT_TTL_MS)
  return { 1, cost }
end

return reservations
