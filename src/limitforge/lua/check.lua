-- Checks. Each is judged alone, in order, and sees what the earlier ones took: probe every limit, then commit all or none.
--
-- KEYS: every bucket, override key and reservation record of the call, each once; then the counters of new_buckets.lua, if request[5] bounds what begins.
-- ARGV: byte strings that the request refers to by index: resources and tokens.
-- request[3]: rules, each { algorithm, flags, percent, name, numbers, 1 if several resources share the bucket }. flags: 1 enforced, 2 counts denials, 4 forced: it takes without asking for room, up
--   to twice its limit, and so never denies; never together with 2, with slots or in a reservation.
-- request[4]: the checks, one after the other:
--   takes, lease token (0: none), record key (0: no reservation, -1: one without a record) [, token, ttl_us, refund], then for each take:
--   rule, key, cost, override key (0: out of reach), resource; or, with resource 0, the key of the index of overrides, which should not be there
--   refund: 0 keeps what lapses, 1 gives it back; 2 more if it is held for a check over several slots: given back after 5 s, unless it is confirmed
--
-- Answers with the time, then for each check:
--   1 or 0 (allowed), delay (-1: none), then for each take: limit, remaining, reset, wait, open (2 more if its overflow bucket decided)
--   2, take, time       its calendar does not reach that time: ask again, for this check and all that follow, which were not judged
--   3, key              that key holds something that is not ours
--   4, take             its bucket holds as many open reservations as it may
--   5                   Redis is full: what it would have taken could not be written
--   6, index, 0         that index of overrides is there: ask again with the override keys, as after 2
--   8, counter, 0       the lane of that counter may begin no more buckets: ask again with its overflow buckets, as after 2
--   7, then for each take: remaining, reset       allowed, and nothing else to say: each limit is the rule's
--
-- Writes each changed bucket once, with a TTL of `until` plus a minute.

local algorithms, buckets = use('algorithms'), use('buckets')

-- The numbers that hold for a take now; nil if the subject's overrides are not ours.
local function overridden(call, rule, override_key, resource)
  local list = call.overrides[override_key]
  if list == nil then
    list = use('overrides').read(call.values[override_key])
    if list == nil then return nil end
    call.overrides[override_key] = list
  end
  if not list then return rule[5] end
  return use('overrides').applied(list, resource, rule, call.now)
end

-- The short way, which nearly every check goes: no reservation, no override, all limits enforced and whole, and room in each. A bucket goes in one step from
-- its string to the next. Stops before the first check that is not like this; returns where that is, and how many integers are answered by then.
local function stride(call, rules, checks, at, out, o)
  local HEAD, TAKE = 3, 5 -- integers of a check and of each of its takes
  local NUMBERS, ALGORITHM, STEP, START = 5, 7, 8, 9 -- of a rule
  local PLAIN = 7
  local now, values, changed, ends, begun, steps, budget = call.now, call.values, call.changed, call.ends, call.begun, call.steps, call.budget
  while checks[at] and checks[at + 2] == 0 do
    local first, n = at + HEAD, 0
    local last, answered = first + (checks[at] - 1) * TAKE, o + 1
    for place = first, last, TAKE do
      local rule, value, cost, override_key = rules[checks[place]], values[checks[place + 1]], checks[place + 2], checks[place + 3]
      local step, numbers = rule[STEP], rule[NUMBERS]
      if not step or cost == 0 or (override_key > 0 and values[override_key]) then return at, o end
      call.judging = checks[place + 1]
      local next_value, til, left
      if value then
        next_value, til, left = step(value, numbers, cost, now)
      else
        local lane = budget and budget.lane_of(call.judging)
        if lane and lane.left < checks[at] then return at, o end
        next_value, til, left = rule[START](numbers, cost, now)
      end
      if not next_value then return at, o end
      steps[n + 1], steps[n + 2] = next_value, til
      n = n + 2
      out[answered + 1], out[answered + 2] = left, til - now
      answered = answered + 2
    end
    out[o + 1] = PLAIN
    n = 0
    for place = first, last, TAKE do
      local key = checks[place + 1]
      if not values[key] then
        begun[key] = true
        if budget then budget.begin(key) end
      end
      values[key], changed[key], ends[key] = steps[n + 1], rules[checks[place]][ALGORITHM], steps[n + 2]
      n = n + 2
    end
    at, o = last + TAKE, answered
    call.at, call.answered = at, o
  end
  return at, o
end

-- Judges the checks from call.at on, and writes their answers behind the first call.answered integers of `out`. Both tell where it was if it fails.
--
-- Its constants and helpers are locals of its own: Redis builds this function with each call, and whatever it captured would be built with it.
local function judge(call, rules, checks, out)
  local HEAD, HEAD_OF_RESERVATION, TAKE = 3, 6, 5 -- integers of a check and of each of its takes
  local CODE, FLAGS, PERCENT, NUMBERS, ALGORITHM = 1, 2, 3, 5, 7 -- of a rule
  local COUNTS_DENIALS, FORCED = 2, 4
  local AGAIN, CORRUPT, TOO_MANY, OVERRIDDEN, OVERFLOWS = 2, 3, 4, 6, 8
  local UNLIMITED, MOST_PENDING = -1, 1000 * buckets.PENDING_WIDTH
  local LEAKY_BUCKET, CONCURRENCY = algorithms.LEAKY_BUCKET, algorithms.CONCURRENCY
  local open, keep, values, budget = buckets.open, buckets.keep, call.values, call.budget

  local probed = { false, 0, 0, false } -- of each take: its opened bucket (false: unlimited), share, wait and numbers
  local at, o = call.at, call.answered
  while true do
    at, o = stride(call, rules, checks, at, out, o)
    call.at, call.answered = at, o
    if not checks[at] then return end
    local lease, record = checks[at + 1], checks[at + 2]
    local first = at + (record ~= 0 and HEAD_OF_RESERVATION or HEAD)
    local last = first + (checks[at] - 1) * TAKE
    local allowed, n, latest, begins = true, 0, call.now, 0
    local fault, where, judged_at, redirected
    for place = first, last, TAKE do
      local rule, key, cost, override_key = rules[checks[place]], checks[place + 1], checks[place + 2], checks[place + 3]
      local numbers = rule[NUMBERS]
      call.judging = key
      if override_key > 0 and values[override_key] then
        if checks[place + 4] == 0 then
          fault, where, judged_at = OVERRIDDEN, override_key, 0
          break
        end
        numbers = overridden(call, rule, override_key, ARGV[checks[place + 4]])
        if not numbers then
          fault, where = CORRUPT, override_key
          break
        end
      end
      local limit, work, share, wait = numbers[1], false, 0, 0
      if limit ~= UNLIMITED then
        local algorithm = rule[ALGORITHM]
        if budget and not values[key] then
          local lane = rule[FLAGS] < FORCED and budget.lane_of(key)
          begins = begins + 1
          if lane and lane.left < begins then
            local shared = budget.overflow_of[key]
            redirected = redirected or { keys = {} }
            if shared and not redirected.keys[shared] then -- two takes of one check can't share a bucket: the second begins its own
              begins, numbers = begins - 1, budget.shared_numbers(numbers, rule)
              key, checks[place + 1], call.judging = shared, shared, shared
              redirected[place], redirected.keys[shared] = true, true
            elseif not lane.is_prepared then
              fault, where, judged_at = OVERFLOWS, lane.key, 0
              break
            end
          end
        end
        work, judged_at = open(call, key, algorithm, numbers)
        if not work then
          fault, where = judged_at and AGAIN or CORRUPT, judged_at and (place - first) / TAKE or key
          break
        end
        if judged_at > latest then latest = judged_at end
        share = rule[PERCENT] == 100 and limit or use('exact').share_of(limit, rule[PERCENT])
        if cost > 0 and rule[FLAGS] < FORCED then
          local enforced = rule[FLAGS] % 2 == 1
          if record ~= 0 and enforced and #work.pending >= MOST_PENDING then
            fault, where = TOO_MANY, (place - first) / TAKE
            break
          end
          wait = algorithm.wait(work, numbers, cost, share)
          if wait ~= 0 then
            if rule[CODE] <= LEAKY_BUCKET and wait > work.til - work.last then
              wait = math.max(work.til - work.last, 1) -- forgotten before it is as full as that; 0 would be room
            end
            if enforced then allowed = false end
          end
        end
      end
      probed[n + 1], probed[n + 2], probed[n + 3], probed[n + 4] = work, share, wait, numbers
      n = n + 4
    end

    if fault then
      out[o + 1], out[o + 2] = fault, where
      o = o + 2
      if fault == AGAIN or fault == OVERRIDDEN or fault == OVERFLOWS then -- what follows must see what this check will take
        out[o + 1] = judged_at
        call.answered = o + 1
        return
      end
    else
      local delay_at, delay = o + 2, -1
      out[o + 1], out[o + 2] = allowed and 1 or 0, -1
      o, n = o + 2, 0
      local reserved = record ~= 0 and allowed and {}
      local lapses = reserved and latest + checks[at + 4] -- a bucket may be ahead of the clock: its TTL after the latest of them
      local held_until, kind = lapses, reserved and checks[at + 5]
      if reserved and kind > 1 then held_until, kind = latest + use('pending').HOLD_US, 1 end
      for place = first, last, TAKE do
        local rule, work, share, wait, numbers = rules[checks[place]], probed[n + 1], probed[n + 2], probed[n + 3], probed[n + 4]
        local noted = false -- what a reservation will settle; a monitored limit whose list is full goes without
        if work then
          local code, cost, flags, algorithm, written = rule[CODE], checks[place + 2], rule[FLAGS], rule[ALGORITHM], false
          if cost == 0 then
            noted = 0
          elseif wait == 0 then
            if allowed and flags >= FORCED then
              written = algorithm.force(work, numbers, cost)
            elseif allowed then
              if code == LEAKY_BUCKET and flags % 2 == 1 then delay = math.max(delay, algorithm.delay(work, numbers)) end
              algorithm.take(work, numbers, cost, ARGV[lease])
              if reserved and code ~= CONCURRENCY and #work.pending < MOST_PENDING then
                noted = cost
                use('pending').add(work, ARGV[checks[at + 3]], held_until, cost, algorithm.source(work), kind)
              end
              written = true
            end
          elseif flags >= COUNTS_DENIALS and not allowed and algorithm.force(work, numbers, math.min(cost, numbers[1])) then
            if wait > 0 then wait = algorithm.wait(work, numbers, cost, share) end
            written = true
          end
          local forgotten = work.til
          algorithm.seal(work)
          if written then
            keep(call, checks[place + 1], algorithm, work)
          elseif code <= LEAKY_BUCKET and work.til > forgotten then
            work.til = forgotten
          end
          local left = share - work.used
          local is_open = (code == CONCURRENCY and work.items ~= '') or work.pending ~= ''
          out[o + 1], out[o + 2], out[o + 3], out[o + 4], out[o + 5] = numbers[1], left > 0 and left or 0, work.til - work.last, wait, (is_open and 1 or 0) + (redirected and redirected[place] and 2 or 0)
        else
          out[o + 1], out[o + 2], out[o + 3], out[o + 4], out[o + 5] = UNLIMITED, UNLIMITED, 0, 0, 0
        end
        o, n = o + 5, n + 4
        if reserved and record > 0 then use('reserve').hold(reserved, rule[CODE], noted, numbers) end
      end
      out[delay_at] = delay
      if reserved and record > 0 then call.records[#call.records + 1] = { KEYS[record], reserved, lapses, checks[at + 4] } end
    end
    at = last + TAKE
  end
end

local function check_call(request, now, injected)
  local rules, checks = request[3], request[4]
  local out = { now, 0, 0, 0, 0, 0, 0, 0 } -- a check of one limit answers with eight integers
  local call = buckets.read(now, injected, request[5], request[6])
  call.overrides, call.records, call.steps, call.at, call.answered = {}, {}, {}, 1, 1
  for i = 1, #rules do -- looked up once, not for each take
    local rule = rules[i]
    local algorithm, flags, percent = algorithms.of(rule[1]), rule[2], rule[3]
    local is_plain = (flags == 1 or flags == 3) and percent == 100 -- where there is room, it does not matter whether denials count
    rule[7], rule[8], rule[9] = algorithm, is_plain and algorithm.step, algorithm.start
  end
  while not pcall(judge, call, rules, checks, out) do -- a state that has the right form, and makes no sense: on with the next check
    local at, o = call.at, call.answered
    out[o + 1], out[o + 2] = 3, call.judging
    call.at, call.answered = at + (checks[at + 2] ~= 0 and 6 or 3) + 5 * checks[at], o + 2
  end
  for i = call.answered + 1, #out do out[i] = nil end
  local written, problem = pcall(function()
    buckets.write(call)
    for _, record in ipairs(call.records) do use('reserve').record(unpack(record)) end
  end)
  if not written then
    -- A full Redis refuses the first write of a script or none: nothing was written. Those who took nothing have their answer all the same.
    problem = type(problem) == 'table' and problem.err or problem -- by the version of Redis
    if string.sub(problem, 1, 3) ~= 'OOM' then return nil, problem end
    out = use('unwritten')(checks, out)
  end
  return out
end

return check_call
