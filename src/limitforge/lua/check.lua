-- Evaluate checks in order. Each check sees what the earlier ones took. First probe every limit, then commit all or
-- none.
--
-- KEYS         each bucket, override key and reservation record once, then, with request[5], the counters of
--              new_buckets.lua
-- ARGV[2..]    byte strings that the request refers to by their index in ARGV: resources and tokens
-- request[3]   rules, each { algorithm, flags, percent, name, parameters, 1 if several resources share the bucket }
--     flags             1 enforced, 2 counts denials, 4 forced. A forced rule takes without asking for room, up to
--                       twice its limit, and never denies. It does not occur together with 2, with slots, or in a
--                       reservation.
-- request[4]   the checks, one after the other, each:
--     debits            the number of debits
--     lease             its token (0: none)
--     record            the key of the reservation record (0: holds nothing, -1: a hold without record). If not 0:
--         token
--         ttl_us        how long the cost is held
--         refund        what happens when the hold lapses: 0 keeps the cost, 1 refunds it. 2 more for the part of a
--                       reservation in one slot: it is refunded after 5 s unless it is confirmed.
--     for each debit:
--         rule, key, cost
--         override key  0: none. With a resource, the key of the subject's overrides. With resource 0, the index of
--                       overrides, which is expected not to exist.
--         resource      its index in ARGV, or 0
-- request[5], request[6]   the arguments of new_buckets.lua
--
-- Replies with the time, then for each check one of these:
--     1 or 0 (allowed), delay (-1: none), then for each debit: limit, remaining, reset, wait, flags (1: the bucket has
--                       an open reservation or lease, 2: its overflow bucket decided)
--     2, debit, time    its calendar does not contain that time
--     3, key            that key holds a foreign value
--     4, debit          its bucket holds the maximum of open reservations
--     5                 Redis is full and refused the write
--     6, index, 0       that index of overrides exists
--     7, then for each debit: remaining, reset    allowed under the parameters of the rules, nothing else to report
--     8, counter, 0     the lane of that counter has used up its budget of new buckets
-- After 2, 6 and 8 the call ends. The caller repeats it from this check on, with other calendar windows, the override
-- keys, or the overflow buckets.
--
-- `codec.py` writes this request and reads this reply. `not_written.lua` repeats the sizes and the statuses.
--
-- Each changed bucket is written once, with a TTL of its `until_us` plus a minute.

local algorithms, buckets = use('algorithms'), use('buckets')

-- Return the parameters of a debit under its overrides, or nil if the overrides are a foreign value.
local function apply_overrides(call, rule, override_key, resource)
  local list = call.overrides[override_key]
  if list == nil then
    list = use('overrides').read(call.values[override_key])
    if list == nil then return nil end
    call.overrides[override_key] = list
  end
  if not list then return rule[5] end
  return use('overrides').apply(list, resource, rule, call.now)
end

-- The fast path, which nearly every check takes: no reservation, no override, all limits enforced and whole, and each
-- admits its cost. A bucket goes in one step from its string to the next. Stops before the first check that is not like
-- this. Returns the position of that check, and the length of the reply so far.
local function evaluate_plain(call, rules, checks, at, out, o)
  local HEAD, DEBIT = 3, 5 -- integers of a check and of each of its debits
  local PARAMETERS, ALGORITHM, STEP, START = 5, 7, 8, 9 -- of a rule
  local ALLOWED_PLAIN = 7
  local now, values, changed, expiries = call.now, call.values, call.changed, call.expiries
  local is_new, steps, budget = call.is_new, call.steps, call.budget
  while checks[at] and checks[at + 2] == 0 do
    local first, n = at + HEAD, 0
    local last, written = first + (checks[at] - 1) * DEBIT, o + 1
    for place = first, last, DEBIT do
      local rule, value = rules[checks[place]], values[checks[place + 1]]
      local cost, override_key = checks[place + 2], checks[place + 3]
      local step, parameters = rule[STEP], rule[PARAMETERS]
      if not step or cost == 0 or (override_key > 0 and values[override_key]) then return at, o end
      call.current_key = checks[place + 1]
      local next_value, until_us, remaining
      if value then
        next_value, until_us, remaining = step(value, parameters, cost, now)
      else
        local lane = budget and budget.lane_of(call.current_key)
        if lane and lane.remaining < checks[at] then return at, o end
        next_value, until_us, remaining = rule[START](parameters, cost, now)
      end
      if not next_value then return at, o end
      steps[n + 1], steps[n + 2] = next_value, until_us
      n = n + 2
      out[written + 1], out[written + 2] = remaining, until_us - now
      written = written + 2
    end
    out[o + 1] = ALLOWED_PLAIN
    n = 0
    for place = first, last, DEBIT do
      local key = checks[place + 1]
      if not values[key] then
        is_new[key] = true
        if budget then budget.count_new(key) end
      end
      values[key], changed[key], expiries[key] = steps[n + 1], rules[checks[place]][ALGORITHM], steps[n + 2]
      n = n + 2
    end
    at, o = last + DEBIT, written
    call.position, call.reply_length = at, o
  end
  return at, o
end

-- Evaluate the checks from call.position on, and append the results to the first call.reply_length integers of `out`.
-- Both fields show the position if this fails.
--
-- Constants and helpers are locals of this function: Redis builds it with each call, and would build its upvalues as
-- well.
local function evaluate(call, rules, checks, out)
  local HEAD, HEAD_OF_RESERVATION, DEBIT = 3, 6, 5 -- integers of a check and of each of its debits
  local CODE, FLAGS, PERCENT, PARAMETERS, ALGORITHM = 1, 2, 3, 5, 7 -- of a rule
  local COUNTS_DENIALS, FORCED = 2, 4
  local NEEDS_CALENDAR, CORRUPT, TOO_MANY_RESERVATIONS, NEEDS_OVERRIDES, NEEDS_OVERFLOW_KEYS = 2, 3, 4, 6, 8
  local OPEN_HOLD, OVERFLOWED = 1, 2 -- flags of a limit in the reply
  local UNLIMITED, MAX_PENDING = -1, 1000 * buckets.PENDING_WIDTH
  local LEAKY_BUCKET, CONCURRENCY = algorithms.LEAKY_BUCKET, algorithms.CONCURRENCY
  local open, keep, values, budget = buckets.open, buckets.keep, call.values, call.budget

  -- Of each debit: its opened bucket (false: unlimited), share, wait and parameters.
  local probed = { false, 0, 0, false }
  local at, o = call.position, call.reply_length
  while true do
    at, o = evaluate_plain(call, rules, checks, at, out, o)
    call.position, call.reply_length = at, o
    if not checks[at] then return end
    local lease, record = checks[at + 1], checks[at + 2]
    local first = at + (record ~= 0 and HEAD_OF_RESERVATION or HEAD)
    local last = first + (checks[at] - 1) * DEBIT
    local allowed, n, latest, new_count = true, 0, call.now, 0
    local fault, where, effective_time, overflowed
    for place = first, last, DEBIT do
      local rule, key = rules[checks[place]], checks[place + 1]
      local cost, override_key = checks[place + 2], checks[place + 3]
      local parameters = rule[PARAMETERS]
      call.current_key = key
      if override_key > 0 and values[override_key] then
        if checks[place + 4] == 0 then
          fault, where, effective_time = NEEDS_OVERRIDES, override_key, 0
          break
        end
        parameters = apply_overrides(call, rule, override_key, ARGV[checks[place + 4]])
        if not parameters then
          fault, where = CORRUPT, override_key
          break
        end
      end
      local limit, opened, share, wait = parameters[1], false, 0, 0
      if limit ~= UNLIMITED then
        local algorithm = rule[ALGORITHM]
        if budget and not values[key] then
          local lane = rule[FLAGS] < FORCED and budget.lane_of(key)
          new_count = new_count + 1
          if lane and lane.remaining < new_count then
            local shared = budget.overflow_of[key]
            overflowed = overflowed or { keys = {} }
            if shared and not overflowed.keys[shared] then -- two debits of a check can't share a bucket
              new_count, parameters = new_count - 1, budget.shared_parameters(parameters, rule)
              key, checks[place + 1], call.current_key = shared, shared, shared
              overflowed[place], overflowed.keys[shared] = true, true
            elseif not lane.has_overflow_keys then
              fault, where, effective_time = NEEDS_OVERFLOW_KEYS, lane.key, 0
              break
            end
          end
        end
        opened, effective_time = open(call, key, algorithm, parameters)
        if not opened then
          fault = effective_time and NEEDS_CALENDAR or CORRUPT
          where = effective_time and (place - first) / DEBIT or key
          break
        end
        if effective_time > latest then latest = effective_time end
        share = rule[PERCENT] == 100 and limit or use('exact').percent_of(limit, rule[PERCENT])
        if cost > 0 and rule[FLAGS] < FORCED then
          local enforced = rule[FLAGS] % 2 == 1
          if record ~= 0 and enforced and #opened.pending >= MAX_PENDING then
            fault, where = TOO_MANY_RESERVATIONS, (place - first) / DEBIT
            break
          end
          wait = algorithm.wait(opened, parameters, cost, share)
          if wait ~= 0 then
            if rule[CODE] <= LEAKY_BUCKET and wait > opened.until_us - opened.last_us then
              -- The bucket expires before it would have that much room. 0 would mean room.
              wait = math.max(opened.until_us - opened.last_us, 1)
            end
            if enforced then allowed = false end
          end
        end
      end
      probed[n + 1], probed[n + 2], probed[n + 3], probed[n + 4] = opened, share, wait, parameters
      n = n + 4
    end

    if fault then
      out[o + 1], out[o + 2] = fault, where
      o = o + 2
      if fault == NEEDS_CALENDAR or fault == NEEDS_OVERRIDES or fault == NEEDS_OVERFLOW_KEYS then
        out[o + 1] = effective_time -- and end here: the following checks must see what this one takes
        call.reply_length = o + 1
        return
      end
    else
      local delay_at, delay = o + 2, -1
      out[o + 1], out[o + 2] = allowed and 1 or 0, -1
      o, n = o + 2, 0
      local reserved = record ~= 0 and allowed and {}
      -- A bucket may be ahead of the clock: the TTL of the reservation begins at the latest time of its buckets.
      local lapses_us = reserved and latest + checks[at + 4]
      local held_until, kind = lapses_us, reserved and checks[at + 5]
      if reserved and kind > 1 then held_until, kind = latest + use('pending').TENTATIVE_TTL_US, 1 end
      for place = first, last, DEBIT do
        local rule, opened, share = rules[checks[place]], probed[n + 1], probed[n + 2]
        local wait, parameters = probed[n + 3], probed[n + 4]
        local amount = false -- to settle later; false for a monitored limit whose list of reservations is full
        if opened then
          local code, flags, algorithm = rule[CODE], rule[FLAGS], rule[ALGORITHM]
          local cost, changed = checks[place + 2], false
          if cost == 0 then
            amount = 0
          elseif wait == 0 then
            if allowed and flags >= FORCED then
              changed = algorithm.force(opened, parameters, cost)
            elseif allowed then
              if code == LEAKY_BUCKET and flags % 2 == 1 then
                delay = math.max(delay, algorithm.delay(opened, parameters))
              end
              algorithm.take(opened, parameters, cost, ARGV[lease])
              if reserved and code ~= CONCURRENCY and #opened.pending < MAX_PENDING then
                amount = cost
                use('pending').add(opened, ARGV[checks[at + 3]], held_until, cost, algorithm.source(opened), kind)
              end
              changed = true
            end
          elseif flags >= COUNTS_DENIALS and not allowed then
            if algorithm.force(opened, parameters, math.min(cost, parameters[1])) then
              if wait > 0 then wait = algorithm.wait(opened, parameters, cost, share) end
              changed = true
            end
          end
          local stored_until_us = opened.until_us
          algorithm.seal(opened)
          if changed then
            keep(call, checks[place + 1], algorithm, opened)
          elseif code <= LEAKY_BUCKET and opened.until_us > stored_until_us then
            opened.until_us = stored_until_us
          end
          local remaining = share - opened.used
          local has_open_hold = (code == CONCURRENCY and opened.entries ~= '') or opened.pending ~= ''
          local is_overflowed = overflowed and overflowed[place]
          local reset_us = opened.until_us - opened.last_us
          out[o + 1], out[o + 2], out[o + 3] = parameters[1], remaining > 0 and remaining or 0, reset_us
          out[o + 4], out[o + 5] = wait, (has_open_hold and OPEN_HOLD or 0) + (is_overflowed and OVERFLOWED or 0)
        else
          out[o + 1], out[o + 2], out[o + 3], out[o + 4], out[o + 5] = UNLIMITED, UNLIMITED, 0, 0, 0
        end
        o, n = o + 5, n + 4
        if reserved and record > 0 then use('reservations').add(reserved, rule[CODE], amount, parameters) end
      end
      out[delay_at] = delay
      if reserved and record > 0 then
        call.records[#call.records + 1] = { KEYS[record], reserved, lapses_us, checks[at + 4] }
      end
    end
    at = last + DEBIT
  end
end

return function(request, now, injected)
  local rules, checks = request[3], request[4]
  local out = { now, 0, 0, 0, 0, 0, 0, 0 } -- the reply to a check of one limit has eight integers
  local call = buckets.read(now, injected, request[5], request[6])
  call.overrides, call.records, call.steps, call.position, call.reply_length = {}, {}, {}, 1, 1
  for i = 1, #rules do -- look up once, not for each debit
    local rule = rules[i]
    local algorithm, flags, percent = algorithms.of(rule[1]), rule[2], rule[3]
    local is_plain = (flags == 1 or flags == 3) and percent == 100 -- with room, counting denials has no effect
    rule[7], rule[8], rule[9] = algorithm, is_plain and algorithm.step, algorithm.start
  end
  while not pcall(evaluate, call, rules, checks, out) do -- a corrupt state in a valid format: go on with the next check
    local at, o = call.position, call.reply_length
    out[o + 1], out[o + 2] = 3, call.current_key
    call.position, call.reply_length = at + (checks[at + 2] ~= 0 and 6 or 3) + 5 * checks[at], o + 2
  end
  for i = call.reply_length + 1, #out do out[i] = nil end
  local is_written, problem = pcall(function()
    buckets.write(call)
    for _, record in ipairs(call.records) do use('reservations').write_record(unpack(record)) end
  end)
  if not is_written then
    -- A full Redis refuses the first write of a script or none: nothing was written. Checks that took nothing have
    -- their results all the same.
    problem = type(problem) == 'table' and problem.err or problem -- depends on the version of Redis
    if string.sub(problem, 1, 3) ~= 'OOM' then return nil, problem end
    out = use('not_written')(checks, out)
  end
  return out
end
