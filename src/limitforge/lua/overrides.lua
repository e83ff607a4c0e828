-- Overrides. All of one subject lie under one key, so that a check reads them with its buckets, in the same MGET.
--
--   { 1, resource, expires_us, source, { name, code, count, numbers ... }, resource, ... }    as msgpack
--
-- `source` is the override as it was set, for people; the list beside it is compiled. A subject with overrides is a member of its tenant's index, a sorted
-- set in the order of names, so that they can be listed by cursor. Both keys live a minute longer than the last override in them.

local OVERRIDE_FORMAT = 1
local ANY_RESOURCE = '*'
local FIELDS = 4 -- of one override in the list

-- The overrides under a key: a list, false if there are none, nil if the value is not ours.
local function read_overrides(raw)
  if not raw then return false end
  if raw == true then return nil end
  local parsed, overrides = pcall(cmsgpack.unpack, raw)
  if not parsed or type(overrides) ~= 'table' or overrides[1] ~= OVERRIDE_FORMAT or (#overrides - 1) % FIELDS ~= 0 then return nil end
  return overrides
end

-- Whether an override is live and names this limit with this algorithm; then its numbers, which replace the leading ones of the plan.
local function override_in(overrides, resource, name, code, now, numbers)
  for at = 2, #overrides, FIELDS do
    if overrides[at] == resource and now < overrides[at + 1] then
      local compiled = overrides[at + 3]
      local i = 1
      while compiled[i] do
        local count = compiled[i + 2]
        if compiled[i] == name and compiled[i + 1] == code then
          local changed = {}
          for n = 1, #numbers do changed[n] = n <= count and compiled[i + 2 + n] or numbers[n] end
          return changed
        end
        i = i + 3 + count
      end
    end
  end
  return nil
end

local function overridden(overrides, resource, name, code, now, numbers)
  return override_in(overrides, resource, name, code, now, numbers)
      or override_in(overrides, ANY_RESOURCE, name, code, now, numbers)
      or numbers
end

local function key_ttl(expires, now, injected)
  local ttl = ceil((expires - now) / 1000) + MARGIN_MS
  return injected and max(ttl, INJECTED_MARGIN_MS) or ttl
end

-- What is left of a list at `now`, without one resource (nil for none; true for all), and when the last of it expires.
local function without(overrides, resource, now)
  local kept, last, dropped = { OVERRIDE_FORMAT }, 0, false
  for at = 2, #overrides, FIELDS do
    local live = now < overrides[at + 1]
    if live and (resource == true or overrides[at] == resource) then
      dropped = true
    elseif live then
      for field = at, at + FIELDS - 1 do kept[#kept + 1] = overrides[field] end
      last = max(last, overrides[at + 1])
    end
  end
  return kept, last, dropped
end

local function store_overrides(key, index, subject, overrides, last, now, injected)
  if #overrides == 1 then
    redis.call('DEL', key)
    redis.call('ZREM', index, subject)
    return
  end
  local ttl = key_ttl(last, now, injected)
  redis.call('SET', key, cmsgpack.pack(overrides), 'PX', ttl)
  redis.call('ZADD', index, 0, subject)
  if redis.call('PTTL', index) < ttl then redis.call('PEXPIRE', index, ttl) end
end

local override_calls = {}

-- KEYS: overrides, index. request: ttl_us, compiled, most. ARGV: subject, resource, source. Answers 1 and the expiry, 2 if there are too many.
function override_calls.set(request, now, injected)
  local found = read_overrides(redis.call('GET', KEYS[1]))
  if found == nil then return { -1 } end
  local overrides, last = without(found or {}, ARGV[3], now)
  if (#overrides - 1) / FIELDS >= request[5] then return { 2 } end
  local expires = now + request[3]
  local n = #overrides
  overrides[n + 1], overrides[n + 2], overrides[n + 3], overrides[n + 4] = ARGV[3], expires, ARGV[4], request[4]
  store_overrides(KEYS[1], KEYS[2], ARGV[2], overrides, max(last, expires), now, injected)
  return { 1, expires }
end

-- KEYS: index, then the overrides of each subject. ARGV: the subjects. Answers, for each, how many are live and when they expire; beside that, as strings,
-- their resources and sources. A subject that has none any more leaves the index.
function override_calls.get(request, now)
  local answer, strings = { 1 }, {}
  for at = 2, #KEYS do
    local found = read_overrides(redis.call('GET', KEYS[at]))
    if found == nil then return { -1 } end
    local overrides = without(found or {}, nil, now)
    answer[#answer + 1] = (#overrides - 1) / FIELDS
    for i = 2, #overrides, FIELDS do
      answer[#answer + 1] = overrides[i + 1]
      strings[#strings + 1] = overrides[i]
      strings[#strings + 1] = overrides[i + 2]
    end
    if #overrides == 1 then redis.call('ZREM', KEYS[1], ARGV[at]) end
  end
  return answer, strings
end

-- KEYS: index. request: how many. ARGV: the end of the page before, as ZRANGEBYLEX wants it. Answers with the next subjects as strings.
function override_calls.list(request)
  return { 1 }, redis.call('ZRANGEBYLEX', KEYS[1], ARGV[2], '+', 'LIMIT', 0, request[3])
end

-- KEYS: index, then the overrides of each subject. request: 1 to delete all of them, 0 for one resource. ARGV: that resource, then the subjects.
-- Answers with how many subjects had what is deleted.
function override_calls.delete(request, now, injected)
  local count = 0
  local found = {}
  for at = 2, #KEYS do
    found[at] = read_overrides(redis.call('GET', KEYS[at]))
    if found[at] == nil and request[3] == 0 then return { -1 } end
  end
  for at = 2, #KEYS do
    local overrides, last, dropped = without(found[at] or {}, request[3] == 1 or ARGV[2], now)
    if dropped then count = count + 1 end
    store_overrides(KEYS[at], KEYS[1], ARGV[at + 1], overrides, last, now, injected)
  end
  return { 1, count }
end
