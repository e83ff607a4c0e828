-- Ends what a check holds in this slot while limits of other slots are asked: confirmed once all had room, given back otherwise.
--
-- KEYS: the buckets. ARGV: tokens. request[3]: one after the other:
--   mode, token, ttl_us, refund, lapses_us, buckets, then each bucket
-- mode 0 refunds, also the slots of a concurrency limit.
-- mode 1 confirms: nothing is held any more, and what was taken stays; with a ttl_us it is a reservation from now on, as if it had been one since it was
--   taken. A negative bucket may have gone without (a monitored limit whose list was full).
-- mode 2 gives back what was confirmed: its buckets are followed by as many amounts, as many sources and as many starts.
--
-- Answers for each: 1 and of each bucket its source and its start (of a window: its end and its start, else 0; a source of -1: nothing is left to give back),
-- or 0 if it had lapsed, and nothing was changed.
-- Only who holds something ends it before it lapses: what is not found until then was forgotten with its bucket (full again, its window over), and is confirmed.

local byte, type = string.byte, type
local algorithms, buckets, pending = use('algorithms'), use('buckets'), use('pending')

local REFUND, CONFIRM, GIVE = 0, 1, 2
local HEAD = 6

-- A live bucket under the numbers that it was written with; nil if there is none, or none of ours.
local function open(call, key)
  local raw = call.values[key]
  local algorithm = call.algorithms[key]
  if type(raw) == 'string' then
    local code = byte(raw, 2)
    algorithm = code and code >= 1 and code <= algorithms.COUNT and algorithms.of(code)
    call.algorithms[key] = algorithm
  end
  local state = algorithm and buckets.state(call, key, algorithm)
  if not state or buckets.gone(state, call.now) then return nil end
  local numbers = algorithm.numbers(state)
  return buckets.open(call, key, algorithm, numbers), numbers, algorithm
end

local function keep(call, key, algorithm, work)
  algorithm.seal(work)
  buckets.keep(call, key, algorithm, work)
end

local function refund(call, token, key)
  local work, numbers, algorithm = open(call, key)
  if not work then return nil end
  local source, amount = 0, 0
  if algorithm.release then -- slots, which the token holds
    if not algorithm.release(work, token) then return nil end
  else
    source, amount = pending.remove(work, token)
    if not source then return nil end
    algorithm.give(work, numbers, amount, source)
  end
  keep(call, key, algorithm, work)
  return source
end

local function give(call, key, amount, source, starts)
  local work, numbers, algorithm = open(call, key)
  if work and (not algorithm.windows or (work.til == source and algorithm.starts(work, numbers) == starts)) then
    algorithm.give(work, numbers, amount, source)
    keep(call, key, algorithm, work)
  end
end

-- All of it, or nothing.
local function confirm(call, token, list, first, last, ttl_us, kind, lapses)
  local works, found, sources = {}, {}, {}
  for at = first, last do
    local key = math.abs(list[at])
    local work, numbers, algorithm = open(call, key)
    local source, starts = work and pending.settle(work, token, ttl_us, kind), 0
    if source then
      works[key], found[key] = work, algorithm
      if algorithm.windows then source, starts = work.til, algorithm.starts(work, numbers) end
    elseif list[at] > 0 and math.max(call.now, work and work.last or 0) >= lapses then
      return nil
    end
    sources[#sources + 1], sources[#sources + 2] = source or -1, starts
  end
  for key, work in pairs(works) do keep(call, key, found[key], work) end
  return sources
end

-- One of them; its sources, or nil.
local function finish(call, list, at)
  local mode, token, count = list[at], ARGV[list[at + 1]], list[at + 5]
  local first = at + HEAD
  local last = first + count - 1
  if mode == CONFIRM then return confirm(call, token, list, first, last, list[at + 2], list[at + 3], list[at + 4]) end
  local sources = {}
  for place = first, last do
    local key = math.abs(list[place])
    if mode == REFUND then
      sources[#sources + 1], sources[#sources + 2] = refund(call, token, key) or -1, 0
    else
      give(call, key, list[place + count], list[place + 2 * count], list[place + 3 * count])
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
    local made_sense, sources = pcall(finish, call, list, at) -- a senseless state spoils its own finish only
    if not made_sense then sources = nil end
    out[#out + 1] = sources and 1 or 0
    for i = 1, sources and #sources or 0 do out[#out + 1] = sources[i] end
    at = at + HEAD + list[at + 5] * (list[at] == GIVE and 4 or 1)
  end
  buckets.write(call)
  return out
end
