-- Overrides. All of one subject lie under one key, so that a check reads them with its buckets, in the same MGET.
--
--   { 2, resource, expires_us, source, { name, code, count, numbers ... }, resource, ... }    as msgpack
--
-- `source` is the override as it was set, for people; the list beside it is compiled: a number that it does not name is -2, and the checked limit's holds. A subject with overrides is a member of its tenant's index, a
-- sorted set in the order of names, so that they can be listed by cursor. Both keys live a minute longer than the last override in them.

local max, ttl_of = math.max, use('buckets').ttl

local OVERRIDE_FORMAT = 2 -- an earlier release, which knows no -2, refuses it; its format 1 names every number
local ANY_RESOURCE = '*'
local UNCHANGED = -2
local WINDOW_AT, WINDOWED = 2, { [3] = true, [4] = true, [5] = true } -- which number is the window, in which algorithms
local LEAKY_BUCKET = 2 -- the last of the two buckets
local MOST_EXACT, TEN_YEARS_US = 2 ^ 52, 315360000000000
local FIELDS = 4 -- of one override in the list

local overrides = {}

-- The overrides under a key: a list, false if there are none, nil if the value is not ours.
function overrides.read(raw)
  if not raw then return false end
  local parsed, list = pcall(cmsgpack.unpack, raw)
  if not parsed or type(list) ~= 'table' or (list[1] ~= OVERRIDE_FORMAT and list[1] ~= 1) or (#list - 1) % FIELDS ~= 0 then return nil end
  return list
end

-- The live override of a resource that names this limit with this algorithm: a list, where its numbers begin in it, and how many there are. nil if there
-- is none.
local function find(list, resource, name, code, now)
  for at = 2, #list, FIELDS do
    if list[at] == resource and now < list[at + 1] then
      local compiled, i = list[at + 3], 1
      while compiled[i] do
        if compiled[i] == name and compiled[i + 1] == code then return compiled, i + 3, compiled[i + 2] end
        i = i + 3 + compiled[i + 2]
      end
    end
  end
  return nil
end

-- The numbers that hold for a rule now: those of the most specific live override that names its limit, else its own. A bucket that several resources share
-- has one window: there only an override of all resources changes it, or each switch between two resources would start the count afresh.
function overrides.applied(list, resource, rule, now)
  local code, name, numbers, is_shared = rule[1], rule[4], rule[5], rule[6] == 1
  local exact, first, count
  if resource ~= ANY_RESOURCE then exact, first, count = find(list, resource, name, code, now) end
  local chosen, wide, wide_first = exact, nil, nil
  if not exact or is_shared then
    local wide_count
    wide, wide_first, wide_count = find(list, ANY_RESOURCE, name, code, now)
    if not exact then chosen, first, count = wide, wide_first, wide_count end
  end
  if not chosen then return numbers end
  local changed = {}
  for n = 1, #numbers do
    local number = n <= count and chosen[first + n - 1] or UNCHANGED
    if exact and is_shared and n == WINDOW_AT and WINDOWED[code] then number = wide and wide[wide_first + n - 1] or UNCHANGED end
    changed[n] = number == UNCHANGED and numbers[n] or number
  end
  return overrides.is_exact(code, changed) and changed or numbers
end

-- Whether a level can be kept exactly by these numbers. What an override leaves unnamed may have changed since: then the plan's numbers hold.
function overrides.is_exact(code, numbers)
  if code > LEAKY_BUCKET then return true end
  local full = numbers[1] * numbers[3]
  return full <= MOST_EXACT and full <= TEN_YEARS_US * numbers[2]
end

-- What is left of a list at `now`, without one resource (nil: without none, true: without all), and when the last of it expires.
local function without(list, resource, now)
  local kept, last, dropped = { OVERRIDE_FORMAT }, 0, false
  for at = 2, #list, FIELDS do
    local live = now < list[at + 1]
    if live and (resource == true or list[at] == resource) then
      dropped = true
    elseif live then
      for field = at, at + FIELDS - 1 do kept[#kept + 1] = list[field] end
      last = max(last, list[at + 1])
    end
  end
  return kept, last, dropped
end

local function store(key, index, subject, list, last, now, injected)
  if #list == 1 then
    redis.call('DEL', key)
    redis.call('ZREM', index, subject)
    return
  end
  local ttl = ttl_of(last, now, injected)
  redis.call('SET', key, cmsgpack.pack(list), 'PX', ttl)
  redis.call('ZADD', index, 0, subject)
  if redis.call('PTTL', index) < ttl then redis.call('PEXPIRE', index, ttl) end
end

-- What a read answers, an error only if the key is of another type: any other is not about this key.
local function asked(...)
  local reply = redis.pcall(...)
  if type(reply) == 'table' and reply.err and string.sub(reply.err, 1, 9) ~= 'WRONGTYPE' then
    error((string.gsub(reply.err, '^ERR ', '')), 0) -- Redis puts it in front again
  end
  return reply
end

-- Whether the index is ours to write: nothing is half-written when it is not.
local function is_index(key)
  return type(asked('ZCARD', key)) == 'number'
end

-- What a key holds, whatever its type.
local function get(key)
  local found = asked('GET', key)
  if type(found) == 'table' then return nil end
  return overrides.read(found)
end

-- KEYS: overrides, index. request: ttl_us, compiled, most. ARGV: subject, resource, source. Answers 1 and the expiry, 2 if there are too many, -1 if
-- the key holds something that is not ours.
function overrides.set(request, now, injected)
  local found = get(KEYS[1])
  if found == nil or not is_index(KEYS[2]) then return { -1 } end
  local list, last = without(found or {}, ARGV[3], now)
  if (#list - 1) / FIELDS >= request[5] then return { 2 } end
  local expires, n = now + request[3], #list
  list[n + 1], list[n + 2], list[n + 3], list[n + 4] = ARGV[3], expires, ARGV[4], request[4]
  store(KEYS[1], KEYS[2], ARGV[2], list, max(last, expires), now, injected)
  return { 1, expires }
end

-- KEYS: index, then the overrides of each subject. ARGV: the subjects. Answers, for each, how many are live and when they expire; beside that, as
-- strings, their resources and sources. What has expired is dropped, so that it stays expired if the clock steps back.
function overrides.get(_, now, injected)
  if not is_index(KEYS[1]) then return { -1 } end
  local answer, strings = { 1 }, {}
  for at = 2, #KEYS do
    local found = get(KEYS[at])
    if found == nil then return { -1 } end
    local list, last = without(found or {}, nil, now)
    answer[#answer + 1] = (#list - 1) / FIELDS
    for i = 2, #list, FIELDS do
      answer[#answer + 1] = list[i + 1]
      strings[#strings + 1] = list[i]
      strings[#strings + 1] = list[i + 2]
    end
    if #list == 1 or #list < #found then store(KEYS[at], KEYS[1], ARGV[at], list, last, now, injected) end
  end
  return answer, strings
end

-- KEYS: for each override its key, then its index. ARGV: for each its subject, then its resource. Answers with the places, from 1, of those that are not
-- live or not in the index. Writes nothing. To read a key marks it as used: a Redis that evicts by use takes others first. What is not ours is left alone.
function overrides.missing(_, now)
  local answer = { 1 }
  for at = 1, #KEYS, 2 do
    local list, resource, live = get(KEYS[at]), ARGV[at + 2], false
    for place = 2, list and #list or 0, FIELDS do
      live = live or (list[place] == resource and now < list[place + 1])
    end
    if list ~= nil and not (live and asked('ZSCORE', KEYS[at + 1], ARGV[at + 1])) then answer[#answer + 1] = (at + 1) / 2 end
  end
  return answer
end

-- KEYS: index. request: how many. ARGV: the end of the page before, as ZRANGEBYLEX wants it. Answers with the next subjects as strings.
function overrides.list(request)
  if not is_index(KEYS[1]) then return { -1 } end
  return { 1 }, redis.call('ZRANGEBYLEX', KEYS[1], ARGV[2], '+', 'LIMIT', 0, request[3])
end

-- KEYS: index, then the overrides of each subject. request: 1 to delete all of them, whatever they hold, 0 for one resource. ARGV: that resource, then
-- the subjects. Answers with how many subjects had what is deleted.
function overrides.delete(request, now, injected)
  if not is_index(KEYS[1]) then return { -1 } end
  local all = request[3] == 1
  local found, count = {}, 0
  for at = 2, #KEYS do
    found[at] = get(KEYS[at])
    if found[at] == nil and not all then return { -1 } end
  end
  for at = 2, #KEYS do
    local list, last, dropped = without(found[at] or {}, all or ARGV[2], now)
    if dropped then count = count + 1 end
    store(KEYS[at], KEYS[1], ARGV[at + 1], list, last, now, injected)
  end
  return { 1, count }
end

return overrides
