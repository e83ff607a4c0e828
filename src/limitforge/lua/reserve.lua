-- Settling a reservation: what was held is replaced by what it really cost, once.
--
-- KEYS: the record, then the bucket of each limit that was reserved, in order.
-- ARGV: the reservation's token.
-- request: cost, then the amount of each limit, then each quota's windows (empty for the rest).
--
-- Answers { 1, cost } settled (also if it was before, with the cost that counted), { 2 } lapsed, { 3 } unknown, { 4, limit, time } if a calendar does not
-- reach that time, { -1, key } if that key holds something that is not ours.
--
-- The record: { format, settled cost (-1: open), lapses_us, expires_us, { code, amount (-1: nothing), source, count, numbers ... } } as msgpack. It is
-- written by the check that reserves, lives for its TTL and a day, and a day longer once it is settled.

local function settle_call(request, now, injected)
  local call = new_call(now, injected)
  read_keys(call)
  local raw = call.raw[1]
  if not raw then return { 3 } end
  local parsed, record = pcall(cmsgpack.unpack, raw)
  if raw == true or not parsed or type(record) ~= 'table' or record[1] ~= RECORD_FORMAT then return { -1, 1 } end
  if now >= record[4] then return { 3 } end
  if record[2] >= 0 then return { 1, record[2] } end
  if now >= record[3] then return { 2 } end

  local cost, amounts, calendars, held = request[3], request[4], request[5], record[5]
  local at, changed = 1, {}
  for limit = 1, #amounts do
    local code, amount, count = held[at], held[at + 1], held[at + 3]
    if amount >= 0 then
      local algorithm, key = algorithms[code], limit + 1
      local state = state_of(call, key, code)
      if state == nil then return { -1, key } end
      local numbers
      if is_gone(state, now) then
        numbers = {}
        for i = 1, count do numbers[i] = held[at + 3 + i] end
        for i = 1, #calendars[limit] do numbers[count + i] = calendars[limit][i] end
      else -- a live bucket knows the numbers that it was last written with: the plan may have changed since the reservation
        numbers = algorithm.numbers(state)
      end
      local work, judged_at = open_state(state, algorithm, numbers, now)
      if not work then return { 4, limit - 1, judged_at } end
      local more = amounts[limit] - amount
      local source = remove_pending(work, ARGV[2])
      if source and more < 0 then algorithm.give(work, numbers, -more, source) end
      local forced = more > 0 and algorithm.force(work, numbers, more)
      if forced or source then
        algorithm.seal(work)
        changed[key] = work
      end
    end
    at = at + 4 + count
  end
  for key, state in pairs(changed) do keep_state(call, key, state) end
  write_states(call)
  record[2], record[4] = cost, now + RECORD_KEPT_MS * 1000
  redis.call('SET', KEYS[1], cmsgpack.pack(record), 'PX', RECORD_KEPT_MS)
  return { 1, cost }
end
