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
-- Reads all keys with one MGET, keeps each state in a table while the call runs, and writes each changed bucket once, with a TTL of `until` plus a minute.

local MAX_PENDING = 1000
local RECORD_FORMAT = 1
local RECORD_KEPT_MS = 86400000

local function new_call(now, injected)
  return { now = now, injected = injected, raw = {}, states = {}, overrides = {}, dirty = {}, codes = {} }
end

-- MGET says false for a key of another type, which must not read as empty: what seems to be missing is asked for once more, all at once.
local function read_keys(call)
  local raw = redis.call('MGET', unpack(KEYS))
  local missing, places = {}, {}
  for at = 1, #KEYS do
    if not raw[at] then
      missing[#missing + 1] = KEYS[at]
      places[#places + 1] = at
    end
  end
  if #missing > 0 and redis.call('EXISTS', unpack(missing)) > 0 then
    for at = 1, #missing do
      if redis.call('EXISTS', missing[at]) > 0 then raw[places[at]] = true end
    end
  end
  call.raw = raw
end

-- The stored state of a key: false if there is none, nil if the value is not ours.
local function state_of(call, key, code)
  local state = call.states[key]
  if state == nil then
    local raw = call.raw[key]
    if raw == true then return nil end
    state = raw and read_state(raw, code)
    if state == nil then return nil end
    call.states[key] = state
    call.codes[key] = code
  end
  return state
end

local function keep_state(call, key, state)
  call.states[key] = state
  call.dirty[key] = true
end

local function write_states(call)
  for key in pairs(call.dirty) do
    write_state(KEYS[key], call.states[key], algorithms[call.codes[key]], call.now, call.injected)
  end
end

local function numbers_of(call, rule, override_key, resource)
  local numbers = rule.numbers
  if not numbers then
    numbers = {}
    for at = 5, #rule do numbers[at - 4] = rule[at] end
    rule.numbers = numbers
  end
  if override_key == 0 then return numbers end
  local overrides = call.overrides[override_key]
  if overrides == nil then
    overrides = read_overrides(call.raw[override_key])
    if overrides == nil then return nil end
    call.overrides[override_key] = overrides
  end
  if not overrides then return numbers end
  return overridden(overrides, ARGV[resource], rule[4], rule[1], call.now, numbers)
end

-- Judges the check that starts at `at` of `checks`, and appends the answer to `out`.
local function judge(call, rules, checks, at, out)
  local now = call.now
  local takes, lease, record = checks[at], checks[at + 1], checks[at + 2]
  local first = at + (record > 0 and 6 or 3)
  local probed, allowed = {}, true
  for take = 0, takes - 1 do
    local place = first + take * 5
    local rule, key, cost = rules[checks[place]], checks[place + 1], checks[place + 2]
    local numbers = numbers_of(call, rule, checks[place + 3], checks[place + 4])
    if not numbers then
      out[#out + 1], out[#out + 2] = 3, checks[place + 3]
      return
    end
    local slot = take * 4
    if numbers[1] ~= UNLIMITED then
      local algorithm = algorithms[rule[1]]
      local state = state_of(call, key, rule[1])
      if state == nil then
        out[#out + 1], out[#out + 2] = 3, key
        return
      end
      local work, judged_at = open_state(state, algorithm, numbers, now)
      if not work then
        out[#out + 1], out[#out + 2], out[#out + 3] = 2, take, judged_at
        return
      end
      if record > 0 and cost > 0 and #work.pending >= MAX_PENDING * PENDING_WIDTH then
        out[#out + 1], out[#out + 2] = 4, take
        return
      end
      local share = share_of(numbers[1], rule[3])
      local wait = 0
      if cost > 0 then
        wait = algorithm.wait(work, numbers, cost, share)
        if wait ~= 0 and rule[2] % 2 == 1 then allowed = false end
      end
      probed[slot + 1], probed[slot + 2], probed[slot + 3] = work, share, wait
    end
    probed[slot + 4] = numbers
  end

  local head = #out + 1
  local o, delay = head + 1, -1
  local held = record > 0 and allowed and {}
  for take = 0, takes - 1 do
    local place, slot = first + take * 5, take * 4
    local rule, key, cost = rules[checks[place]], checks[place + 1], checks[place + 2]
    local work, share, wait, numbers = probed[slot + 1], probed[slot + 2], probed[slot + 3], probed[slot + 4]
    local code, taken, source = rule[1], -1, 0
    if work then
      local algorithm = algorithms[code]
      if allowed then
        if wait == 0 and code ~= CONCURRENCY then taken = cost end
        if cost > 0 and wait == 0 then
          if code == LEAKY_BUCKET and rule[2] % 2 == 1 then delay = max(delay, algorithm.delay(work, numbers)) end
          algorithm.take(work, numbers, cost, lease > 0 and ARGV[lease])
          if held and code ~= CONCURRENCY then
            source = algorithm.source(work)
            add_pending(work, ARGV[checks[at + 3]], now + checks[at + 4], cost, source, checks[at + 5])
          end
          keep_state(call, key, work)
        end
      elseif wait ~= 0 and rule[2] >= 2 and algorithm.force(work, numbers, min(cost, numbers[1])) then
        if wait > 0 then wait = algorithm.wait(work, numbers, cost, share) end
        keep_state(call, key, work)
      end
      algorithm.seal(work)
      local open = (work.pending ~= '' or (code == CONCURRENCY and work.items ~= '')) and 1 or 0
      out[o + 1], out[o + 2], out[o + 3], out[o + 4], out[o + 5] = numbers[1], max(share - work.used, 0), work.til - work.last, wait, open
    else
      out[o + 1], out[o + 2], out[o + 3], out[o + 4], out[o + 5] = -1, -1, 0, 0, 0
    end
    o = o + 5
    if held then
      local n = code == QUOTA_CODE and 2 or #numbers
      held[#held + 1], held[#held + 2], held[#held + 3], held[#held + 4] = code, taken, source, n
      for i = 1, n do held[#held + 1] = numbers[i] end
    end
  end
  out[head], out[head + 1] = allowed and 1 or 0, delay
  if held then
    local lapses = now + checks[at + 4]
    local ttl = ceil(checks[at + 4] / 1000) + RECORD_KEPT_MS
    redis.call('SET', KEYS[record], cmsgpack.pack({ RECORD_FORMAT, -1, lapses, lapses + RECORD_KEPT_MS * 1000, held }), 'PX', ttl)
  end
end

local function check_call(request, now, injected)
  local rules, checks = request[3], request[4]
  local call = new_call(now, injected)
  if #KEYS > 0 then read_keys(call) end
  local out = { now }
  local at = 1
  while checks[at] do
    local before = #out
    local judged = pcall(judge, call, rules, checks, at, out)
    if not judged then
      for i = #out, before + 1, -1 do out[i] = nil end
      out[before + 1], out[before + 2] = 3, checks[at + (checks[at + 2] > 0 and 6 or 3) + 1]
    end
    at = at + (checks[at + 2] > 0 and 6 or 3) + 5 * checks[at]
  end
  write_states(call)
  return out
end
