-- Reservations: what a check held, and how it is settled, once.
--
-- The record: { format, settled cost (-1: open), lapses_us, expires_us, { code, amount (-1: nothing), count, numbers ... } } as msgpack. The check that
-- reserves writes it; it lives for its TTL and a day, and a day longer once it is settled.

local ceil = math.ceil
local pending, algorithms, buckets = use('pending'), use('algorithms'), use('buckets')

local RECORD_FORMAT = 1
local KEPT_MS = 86400000

local reserve = {}

-- Notes what one take took: an amount, or nothing (false). Slots are not part of a reservation.
function reserve.hold(held, code, amount, numbers)
  if code == algorithms.CONCURRENCY or not amount then
    held[#held + 1], held[#held + 2], held[#held + 3] = code, -1, 0
    return
  end
  local count = code == algorithms.QUOTA and 2 or #numbers -- the calendar of the settlement's day comes with the settlement
  held[#held + 1], held[#held + 2], held[#held + 3] = code, amount, count
  for i = 1, count do held[#held + 1] = numbers[i] end
end

function reserve.record(key, held, lapses, ttl_us)
  local record = { RECORD_FORMAT, -1, lapses, lapses + KEPT_MS * 1000, held }
  redis.call('SET', key, cmsgpack.pack(record), 'PX', ceil(ttl_us / 1000) + KEPT_MS)
end

-- What was held is replaced by what it really cost.
--
-- KEYS: the record, then the bucket of each limit that was reserved, in order.
-- ARGV: the reservation's token.
-- request: cost, then the amount of each limit, then each quota's windows (empty for the rest).
--
-- Answers { 1, cost } settled (also if it was before, with the cost that counted), { 2 } lapsed, { 3 } unknown, { 4, limit, time } if a calendar does
-- not reach that time, { 5 } if other limits were reserved, { -1, key } if that key holds something that is not ours.
function reserve.settle(request, now, injected)
  local call = buckets.read(now, injected)
  local raw = call.values[1]
  if not raw then return { 3 } end
  local parsed, record = pcall(cmsgpack.unpack, raw)
  if not parsed or type(record) ~= 'table' or record[1] ~= RECORD_FORMAT then return { -1, 1 } end
  if now >= record[4] then return { 3 } end
  if record[2] >= 0 then return { 1, record[2] } end

  local cost, amounts, calendars, held = request[3], request[4], request[5], record[5]
  local at, latest = 1, now
  for limit = 1, #amounts do
    local code = held[at]
    if not code then return { 5 } end
    local state = buckets.state(call, limit + 1, algorithms.of(code))
    if state == nil then return { -1, limit + 1 } end
    if state and state.last > latest then latest = state.last end
    at = at + 3 + held[at + 2]
  end
  if latest >= record[3] then return { 2 } end -- by the clock, or by that of a bucket which is ahead of it
  if held[at] then return { 5 } end

  at = 1
  for limit = 1, #amounts do
    local code, amount, count = held[at], held[at + 1], held[at + 2]
    if amount >= 0 then
      local algorithm, key = algorithms.of(code), limit + 1
      local state = buckets.state(call, key, algorithm)
      local numbers
      if not state or buckets.gone(state, now) then
        numbers = {}
        for i = 1, count do numbers[i] = held[at + 2 + i] end
        for i = 1, #calendars[limit] do numbers[count + i] = calendars[limit][i] end
      else -- a live bucket knows the numbers that it was last written with: the plan may have changed since the reservation
        numbers = algorithm.numbers(state)
      end
      local work, judged_at = buckets.open(call, key, algorithm, numbers)
      if not work then return { 4, limit - 1, judged_at } end
      local more = amounts[limit] - amount
      local source = pending.remove(work, ARGV[2])
      if source and more < 0 then algorithm.give(work, numbers, -more, source) end
      local forced = more > 0 and algorithm.force(work, numbers, more)
      if forced or source then
        algorithm.seal(work)
        buckets.keep(call, key, algorithm, work)
      end
    end
    at = at + 3 + count
  end
  buckets.write(call) -- nothing is written before all limits were found in order
  record[2], record[4] = cost, now + KEPT_MS * 1000
  redis.call('SET', KEYS[1], cmsgpack.pack(record), 'PX', KEPT_MS)
  return { 1, cost }
end

return reserve
