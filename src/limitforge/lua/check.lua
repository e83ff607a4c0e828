-- Checks. Each is judged alone, in order, and sees what the earlier ones took: probe every limit, then commit all or none.
--
-- KEYS: every bucket, override key and reservation record of the call, each once.
-- ARGV: byte strings that the request refers to by index: resources and tokens.
-- request[3]: rules, each { algorithm, flags, percent, name, numbers ... }; flags: 1 enforced, 2 counts denials.
-- request[4]: the checks, one after the other:
--   takes, lease token (0: none), record key (0: no reservation) [, token, ttl_us, refund], then for each take:
--   rule, key, cost, override key (0: out of reach), resource
--
-- Answers with the time, then for each check:
--   1 or 0 (allowed), delay (-1: none), then for each take: limit, remaining, reset, wait, open
--   2, take, time       its calendar does not reach that time: ask again
--   3, key              that key holds something that is not ours
--   4, take             its bucket holds as many open reservations as it may
--
-- Writes each changed bucket once, with a TTL of `until` plus a minute.

local ceil, max, min = math.ceil, math.max, math.min
local exact, states, algorithms, buckets = use('exact'), use('state'), use('algorithms'), use('buckets')
local share_of, open_state, state_of, keep = exact.share_of, states.open, buckets.state, buckets.keep
local UNLIMITED = exact.UNLIMITED
local LEAKY_BUCKET, CONCURRENCY, QUOTA = algorithms.LEAKY_BUCKET, algorithms.CONCURRENCY, algorithms.QUOTA

local HEAD, HEAD_OF_RESERVATION, TAKE = 3, 6, 5 -- integers of a check and of each of its takes
local MOST_PENDING = 1000 * states.PENDING_WIDTH

-- A rule as it is used: read once a call, however many checks share it.
local function prepare(row)
  local numbers = {}
  for at = 5, #row do numbers[at - 4] = row[at] end
  return {
    code = row[1],
    algorithm = algorithms.of(row[1]),
    enforced = row[2] % 2 == 1,
    count_denied = row[2] >= 2,
    percent = row[3],
    name = row[4],
    numbers = numbers,
  }
end

-- The numbers that hold for a take now; nil if the subject's overrides are not ours.
local function overridden(call, rule, override_key, resource)
  local list = call.overrides[override_key]
  if list == nil then
    list = use('overrides').read(call.raw[override_key])
    if list == nil then return nil end
    call.overrides[override_key] = list
  end
  if not list then return rule.numbers end
  return use('overrides').applied(list, resource, rule.name, rule.code, call.now, rule.numbers)
end

-- Judges the check that starts at `at` of `checks`, and appends the answer to `out`.
local function judge(call, rules, checks, at, out)
  local now, raw = call.now, call.raw
  local lease, record = checks[at + 1], checks[at + 2]
  local first = at + (record > 0 and HEAD_OF_RESERVATION or HEAD)
  local last = first + (checks[at] - 1) * TAKE
  local allowed, probed = true, {}
  for place = first, last, TAKE do
    local rule, key, cost, override_key = rules[checks[place]], checks[place + 1], checks[place + 2], checks[place + 3]
    local numbers = rule.numbers
    if override_key > 0 and raw[override_key] then
      numbers = overridden(call, rule, override_key, ARGV[checks[place + 4]])
      if not numbers then
        out[#out + 1], out[#out + 2] = 3, override_key
        return
      end
    end
    local limit = numbers[1]
    if limit == UNLIMITED then
      probed[place] = false
    else
      local algorithm = rule.algorithm
      local state = state_of(call, key, rule.code, algorithm)
      if state == nil then
        out[#out + 1], out[#out + 2] = 3, key
        return
      end
      local work, judged_at = open_state(state, algorithm, numbers, now)
      if not work then
        out[#out + 1], out[#out + 2], out[#out + 3] = 2, (place - first) / TAKE, judged_at
        return
      end
      local share = rule.percent == 100 and limit or share_of(limit, rule.percent)
      local wait = 0
      if cost > 0 then
        if record > 0 and #work.pending >= MOST_PENDING and rule.enforced then
          out[#out + 1], out[#out + 2] = 4, (place - first) / TAKE
          return
        end
        wait = algorithm.wait(work, numbers, cost, share)
        if wait ~= 0 and rule.enforced then allowed = false end
      end
      probed[place], probed[place + 1], probed[place + 2], probed[place + 3] = work, share, wait, numbers
    end
  end

  local head = #out + 1
  local o, delay = head + 1, -1
  local held = record > 0 and allowed and {}
  for place = first, last, TAKE do
    local rule, work, wait, numbers = rules[checks[place]], probed[place], probed[place + 2], probed[place + 3]
    local noted = false -- what a reservation will settle; a monitored limit whose list is full goes without
    if work then
      local algorithm, code, cost = rule.algorithm, rule.code, checks[place + 2]
      if cost == 0 then noted = 0 end
      if wait == 0 then
        if allowed and cost > 0 then
          if code == LEAKY_BUCKET and rule.enforced then delay = max(delay, algorithm.delay(work, numbers)) end
          algorithm.take(work, numbers, cost, ARGV[lease])
          if held and code ~= CONCURRENCY and #work.pending < MOST_PENDING then
            noted = cost
            states.add_pending(work, ARGV[checks[at + 3]], now + checks[at + 4], cost, algorithm.source(work), checks[at + 5])
          end
          keep(call, checks[place + 1], algorithm, work)
        end
      elseif rule.count_denied and not allowed and algorithm.force(work, numbers, min(cost, numbers[1])) then
        if wait > 0 then wait = algorithm.wait(work, numbers, cost, probed[place + 1]) end
        keep(call, checks[place + 1], algorithm, work)
      end
      algorithm.seal(work)
      local left = probed[place + 1] - work.used
      local open = (work.pending ~= '' or (code == CONCURRENCY and work.items ~= '')) and 1 or 0
      out[o + 1], out[o + 2], out[o + 3], out[o + 4], out[o + 5] = numbers[1], left > 0 and left or 0, work.til - work.last, wait, open
    else
      out[o + 1], out[o + 2], out[o + 3], out[o + 4], out[o + 5] = UNLIMITED, UNLIMITED, 0, 0, 0
    end
    o = o + 5
    if held then use('reserve').hold(held, rule.code, noted, numbers) end
  end
  out[head], out[head + 1] = allowed and 1 or 0, delay
  if held then use('reserve').record(KEYS[record], held, now, checks[at + 4]) end
end

local function check_call(request, now, injected)
  local rules, checks, out = {}, request[4], { now }
  for index, row in ipairs(request[3]) do rules[index] = prepare(row) end
  local call = #KEYS > 0 and buckets.read(now, injected) or { now = now, raw = {}, changed = {} }
  call.overrides = {}
  local at = 1
  while checks[at] do
    local before, size = #out, (checks[at + 2] > 0 and HEAD_OF_RESERVATION or HEAD) + TAKE * checks[at]
    if not pcall(judge, call, rules, checks, at, out) then -- a state that has the right form, and makes no sense
      for i = #out, before + 1, -1 do out[i] = nil end
      out[before + 1], out[before + 2] = 3, checks[at + size - TAKE + 1]
    end
    at = at + size
  end
  buckets.write(call)
  return out
end

return check_call
