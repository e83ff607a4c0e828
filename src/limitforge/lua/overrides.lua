-- Overrides. All overrides of one subject are under one key, so that a check reads them with its buckets in one MGET.
--
--   { 2, resource, expires_us, source, { name, code, count, parameters ... }, resource, ... }    as msgpack
--
-- `source` is the override as it was set, for people. The list beside it is compiled. A parameter of -2 is unchanged:
-- that of the checked limit applies. A subject with overrides is a member of its tenant's index, a sorted set in the
-- order of names, so that overrides can be listed by cursor. Both keys live a minute longer than the last override in
-- them.

local max, ttl_of = math.max, use('buckets').ttl

-- An older release, which does not know -2, rejects format 2. In its format 1 no parameter is unchanged.
local OVERRIDE_FORMAT = 2
local ANY_RESOURCE = '*'
local UNCHANGED = -2
local WINDOW_AT, WINDOWED = 2, { [3] = true, [4] = true, [5] = true } -- parameter 2 is the window, in these algorithms
local LEAKY_BUCKET = 2 -- codes up to this one are buckets with a level
local MAX_EXACT, TEN_YEARS_US = 2 ^ 52, 315360000000000
local FIELDS = 4 -- per override in the list

local overrides = {}

-- Return the list of overrides in a value, false if there is none, nil for a foreign value.
function overrides.read(raw)
  if not raw then return false end
  local parsed, list = pcall(cmsgpack.unpack, raw)
  if not parsed or type(list) ~= 'table' or (list[1] ~= OVERRIDE_FORMAT and list[1] ~= 1) then return nil end
  if (#list - 1) % FIELDS ~= 0 then return nil end
  return list
end

-- Find the live override of a resource for this limit and algorithm. Return the compiled list, the index of the first
-- parameter in it, and the count of parameters; or nil.
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

-- Return the parameters of a rule under the live overrides: the most specific one that names its limit applies. Several
-- resources that share a bucket share its window, which only an override of all resources changes. Otherwise each
-- switch between two resources would restart the count.
function overrides.apply(list, resource, rule, now)
  local code, name, parameters, is_shared = rule[1], rule[4], rule[5], rule[6] == 1
  local exact, first, count
  if resource ~= ANY_RESOURCE then exact, first, count = find(list, resource, name, code, now) end
  local chosen, wide, wide_first = exact, nil, nil
  if not exact or is_shared then
    local wide_count
    wide, wide_first, wide_count = find(list, ANY_RESOURCE, name, code, now)
    if not exact then chosen, first, count = wide, wide_first, wide_count end
  end
  if not chosen then return parameters end
  local changed = {}
  for n = 1, #parameters do
    local value = n <= count and chosen[first + n - 1] or UNCHANGED
    if exact and is_shared and n == WINDOW_AT and WINDOWED[code] then
      value = wide and wide[wide_first + n - 1] or UNCHANGED
    end
    changed[n] = value == UNCHANGED and parameters[n] or value
  end
  return overrides.is_exact(code, changed) and changed or parameters
end

-- Return whether a level stays exact with these parameters. A plan that changed after the override was set may combine
-- with it to parameters that are not exact; then the plan's parameters apply.
function overrides.is_exact(code, parameters)
  if code > LEAKY_BUCKET then return true end
  local full = parameters[1] * parameters[3]
  return full <= MAX_EXACT and full <= TEN_YEARS_US * parameters[2]
end

-- Return the live overrides of a list without those of one resource (true: of all resources, nil: of none), when the
-- last of them expires, and whether a live one was dropped.
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

-- Run a read command and return its reply. A key of another type returns an error; any other error is raised.
local function read_or_wrong_type(...)
  local reply = redis.pcall(...)
  if type(reply) == 'table' and reply.err and string.sub(reply.err, 1, 9) ~= 'WRONGTYPE' then
    error((string.gsub(reply.err, '^ERR ', '')), 0) -- Redis adds the prefix again
  end
  return reply
end

-- Return whether the index can be written, to check before anything is written.
local function is_index(key)
  return type(read_or_wrong_type('ZCARD', key)) == 'number'
end

-- Read the overrides of a key, which may be of any type.
local function get(key)
  local found = read_or_wrong_type('GET', key)
  if type(found) == 'table' then return nil end
  return overrides.read(found)
end

-- Set the override of a resource.
--
-- KEYS          overrides, index
-- ARGV[2..4]    subject, resource, source
-- request[3..]  ttl_us, compiled, the maximum of overrides
--
-- Replies 1 and the expiry, 2 if there are too many, -1 if a key holds a foreign value.
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

-- Read the overrides of subjects.
--
-- KEYS        index, then the overrides of each subject
-- ARGV[2..]   the subjects
--
-- Replies 1, then for each subject the count of live overrides and their expiries; and as strings their resources and
-- sources. Replies -1 if a key holds a foreign value. Expired overrides are deleted, so that they stay expired if the
-- clock steps back.
function overrides.get(_, now, injected)
  if not is_index(KEYS[1]) then return { -1 } end
  local reply, strings = { 1 }, {}
  for at = 2, #KEYS do
    local found = get(KEYS[at])
    if found == nil then return { -1 } end
    local list, last = without(found or {}, nil, now)
    reply[#reply + 1] = (#list - 1) / FIELDS
    for i = 2, #list, FIELDS do
      reply[#reply + 1] = list[i + 1]
      strings[#strings + 1] = list[i]
      strings[#strings + 1] = list[i + 2]
    end
    if #list == 1 or #list < #found then store(KEYS[at], KEYS[1], ARGV[at], list, last, now, injected) end
  end
  return reply, strings
end

-- Find the overrides that are missing.
--
-- KEYS        for each override its key, then its index
-- ARGV[2..]   for each its subject, then its resource
--
-- Replies 1, then the positions, from 1, of those that are not live or not in the index. Writes nothing. Reading a key
-- marks it as used, so that a Redis with an LRU or LFU policy evicts other keys first. A foreign value counts as
-- present.
function overrides.find_missing(_, now)
  local reply = { 1 }
  for at = 1, #KEYS, 2 do
    local list, resource, live = get(KEYS[at]), ARGV[at + 2], false
    for place = 2, list and #list or 0, FIELDS do
      live = live or (list[place] == resource and now < list[place + 1])
    end
    if list ~= nil and not (live and read_or_wrong_type('ZSCORE', KEYS[at + 1], ARGV[at + 1])) then
      reply[#reply + 1] = (at + 1) / 2
    end
  end
  return reply
end

-- List the subjects that have overrides.
--
-- KEYS         index
-- ARGV[2]      the start, in the syntax of ZRANGEBYLEX
-- request[3]   the maximum of subjects
--
-- Replies 1, and the next subjects as strings; or -1 if the key holds a foreign value.
function overrides.list(request)
  if not is_index(KEYS[1]) then return { -1 } end
  return { 1 }, redis.call('ZRANGEBYLEX', KEYS[1], ARGV[2], '+', 'LIMIT', 0, request[3])
end

-- Delete overrides of subjects.
--
-- KEYS         index, then the overrides of each subject
-- ARGV[2..]    a resource, then the subjects
-- request[3]   0 to delete the overrides of that resource, 1 to delete all overrides, even foreign values
--
-- Replies 1 and the number of subjects that had such an override; or -1 if a key holds a foreign value.
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
