-- Finish what a check holds in this hash slot while the limits of other hash slots are asked: confirm it if all had
-- room, else refund.
--
-- KEYS         the buckets
-- ARGV[2..]    tokens
-- request[3]   the holds to finish, one after the other, each:
--     action       0 refunds, and releases leases.
--                  1 confirms: the cost stays taken.
--                  2 undoes a confirmation.
--     token        its index in ARGV
--     ttl_us       Unless it is 0, a confirmed hold becomes a reservation that began when the cost was taken.
--     refund       of that reservation, when it lapses: 0 keeps the cost, 1 refunds it
--     lapses_us    when the hold lapses, at the latest
--     buckets      the number of buckets, then each bucket. With action 1, a negative one may hold nothing (a monitored
--                  limit whose list of reservations was full). With action 2, as many amounts, sources and starts
--                  follow.
--
-- Replies for each hold: 0 if a confirmation found that it had lapsed, and changed nothing, or if a state was corrupt;
-- else 1, then for each bucket its source and its start. For a window these are its end and its start. Otherwise the
-- start is 0. A source of -1 means: nothing to undo. A refund or an undo replies 1 even if the hold is missing. A
-- corrupt state ends either of them, but what it changed in earlier buckets stays.
--
-- If a hold is missing before `lapses_us`, its bucket expired or was evicted, because only the owner finishes a hold
-- before it lapses. Such a hold counts as confirmed.

local byte, type = string.byte, type
local algorithms, buckets, pending = use('algorithms'), use('buckets'), use('pending')

local REFUND, CONFIRM, UNDO_CONFIRM = 0, 1, 2
local HEAD = 6

-- Return a live bucket under the parameters that it was written with, or nil if it is missing or holds a foreign value.
local function open(call, key)
  local raw = call.values[key]
  local algorithm = call.algorithms[key]
  if type(raw) == 'string' then
    local code = byte(raw, 2)
    algorithm = code and code >= 1 and code <= algorithms.COUNT and algorithms.of(code)
    call.algorithms[key] = algorithm
  end
  local state = algorithm and buckets.state(call, key, algorithm)
  if not state or buckets.is_expired(state, call.now) then return nil end
  local parameters = algorithm.parameters(state)
  return buckets.open(call, key, algorithm, parameters), parameters, algorithm
end

local function keep(call, key, algorithm, opened)
  algorithm.seal(opened)
  buckets.keep(call, key, algorithm, opened)
end

local function refund(call, token, key)
  local opened, parameters, algorithm = open(call, key)
  if not opened then return nil end
  local source, amount = 0, 0
  if algorithm.release then -- the leases of the token
    if not algorithm.release(opened, token) then return nil end
  else
    source, amount = pending.remove(opened, token)
    if not source then return nil end
    algorithm.give(opened, parameters, amount, source)
  end
  keep(call, key, algorithm, opened)
  return source
end

local function undo_confirm(call, key, amount, source, starts)
  local opened, parameters, algorithm = open(call, key)
  if not opened then return end
  if not algorithm.is_windowed or (opened.until_us == source and algorithm.starts(opened, parameters) == starts) then
    algorithm.give(opened, parameters, amount, source)
    keep(call, key, algorithm, opened)
  end
end

-- Confirm all buckets or none.
local function confirm(call, token, list, first, last, ttl_us, kind, lapses_us)
  local all_opened, found, sources = {}, {}, {}
  for at = first, last do
    local key = math.abs(list[at])
    local opened, parameters, algorithm = open(call, key)
    local source, starts = opened and pending.confirm(opened, token, ttl_us, kind), 0
    if source then
      all_opened[key], found[key] = opened, algorithm
      if algorithm.is_windowed then source, starts = opened.until_us, algorithm.starts(opened, parameters) end
    elseif list[at] > 0 and math.max(call.now, opened and opened.last_us or 0) >= lapses_us then
      return nil
    end
    sources[#sources + 1], sources[#sources + 2] = source or -1, starts
  end
  for key, opened in pairs(all_opened) do keep(call, key, found[key], opened) end
  return sources
end

-- Finish one hold; return its sources, or nil if it had lapsed.
local function finish(call, list, at)
  local action, token, count = list[at], ARGV[list[at + 1]], list[at + 5]
  local first = at + HEAD
  local last = first + count - 1
  if action == CONFIRM then
    return confirm(call, token, list, first, last, list[at + 2], list[at + 3], list[at + 4])
  end
  local sources = {}
  for place = first, last do
    local key = math.abs(list[place])
    if action == REFUND then
      sources[#sources + 1], sources[#sources + 2] = refund(call, token, key) or -1, 0
    else
      undo_confirm(call, key, list[place + count], list[place + 2 * count], list[place + 3 * count])
      sources[#sources + 1], sources[#sources + 2] = -1, 0
    end
  end
  return sources
end

return function(request, now, injected)
  local list, call, out = request[3], buckets.read(now, injected), {}
  call.algorithms = {}
  local at = 1
  while list[at] do
    local is_valid, sources = pcall(finish, call, list, at) -- a corrupt state fails its own hold only
    if not is_valid then sources = nil end
    out[#out + 1] = sources and 1 or 0
    for i = 1, sources and #sources or 0 do out[#out + 1] = sources[i] end
    at = at + HEAD + list[at + 5] * (list[at] == UNDO_CONFIRM and 4 or 1)
  end
  buckets.write(call)
  return out
end
