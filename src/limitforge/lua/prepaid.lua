-- Top up and return prepaid shares, which a process debits in advance and then spends without asking.
--
-- A share is debited like any cost. The share of a window ends with the window. A token bucket refills while a share is
-- out, so the share is also noted as a pending entry of kind 2: the bucket refills only to its capacity minus all
-- shares, until they are returned or lapse.
--
-- KEYS         buckets and override keys, then the counters of new_buckets.lua if request[5] is given
-- ARGV[2..]    resources and tokens
-- request[3]   rules, as for checks
-- request[4]   the requests, one after the other, each:
--     rule, key, override key (0: none), resource, token
--     returned        what the process returns of the share that was debited in the window from `starts` to `ends`.
--                     It is dropped unless that is still the window: two windows may end at the same time and differ in
--                     length.
--     starts, ends    0 for a token bucket, or without a share
--     kept            what the process still has
--     wanted          what it asks for
--     ttl_us          when the share of a token bucket lapses
-- request[5]   the first argument of new_buckets.lua
--
-- Replies with the time, then for each request one of these:
--     1, granted, limit, remaining, reset, starts, ends    starts and ends of the window. An end of -1 says that the
--                                                          kept part of the share had lapsed.
--     2, time, 0, 0, 0, 0, 0                               its calendar does not contain that time, nothing was done
--     3, 0, 0, 0, 0, 0, 0                                  its key holds a foreign value, nothing was done
-- At most half of what remains is granted, so that near the limit the processes decide together again.

local floor, max, min = math.floor, math.max, math.min
local algorithms, buckets, overrides, pending = use('algorithms'), use('buckets'), use('overrides'), use('pending')

local FIELDS, RESULTS = 11, 7
local UNLIMITED = -1
local SHARE = 2
local TOKEN_BUCKET = 1

local function parameters_of(call, rule, override_key, resource)
  if override_key == 0 or not call.values[override_key] then return rule[5] end
  local list = overrides.read(call.values[override_key])
  return list and overrides.apply(list, resource, rule, call.now)
end

local function top_up(call, list, at, rules)
  local rule, key, token = rules[list[at]], list[at + 1], ARGV[list[at + 4]]
  local returned, kept, wanted = list[at + 5], list[at + 8], list[at + 9]
  local parameters = parameters_of(call, rule, list[at + 2], ARGV[list[at + 3]])
  if not parameters then return 3, 0, 0, 0, 0, 0, 0 end
  -- Unlimited by an override, which may end at any time: nothing to prepay.
  if parameters[1] == UNLIMITED then return 1, 0, UNLIMITED, UNLIMITED, 0, 0, -1 end
  local algorithm = algorithms.of(rule[1])
  local opened, effective_time = buckets.open(call, key, algorithm, parameters)
  if not opened then return effective_time and 2 or 3, effective_time or 0, 0, 0, 0, 0, 0 end

  local refills, changed = rule[1] == TOKEN_BUCKET, false
  local starts, ends = 0, 0
  if refills then
    changed = pending.remove(opened, token) ~= nil
    if not changed then
      if kept > 0 then ends = -1 end
      kept, returned = 0, 0
    end
  elseif list[at + 6] ~= algorithm.starts(opened, parameters) or list[at + 7] ~= opened.until_us then
    returned = 0
  end
  if call.budget and not call.values[key] then -- the tenant may not be allowed to begin this bucket
    local lane = call.budget.lane_of(key)
    if lane and lane.remaining < 1 then wanted = 0 end
  end
  if returned > 0 then
    algorithm.give(opened, parameters, returned, 0)
    changed = true
  end
  algorithm.seal(opened)
  local granted = min(wanted, floor(max(parameters[1] - opened.used, 0) / 2))
  if granted > 0 then
    algorithm.take(opened, parameters, granted)
    changed = true
  end
  -- After `take`, because the grant may have opened the window.
  if not refills then starts, ends = algorithm.starts(opened, parameters), opened.until_us end
  if refills and granted + kept > 0 then
    pending.add(opened, token, opened.last_us + list[at + 10], granted + kept, 0, SHARE)
  end
  algorithm.seal(opened)
  if changed then buckets.keep(call, key, algorithm, opened) end
  return 1, granted, parameters[1], max(parameters[1] - opened.used, 0), opened.until_us - opened.last_us, starts, ends
end

return function(request, now, injected)
  local rules, list, out = request[3], request[4], { now }
  local call = buckets.read(now, injected, request[5], {})
  for at = 1, #list, FIELDS do
    local result = { pcall(top_up, call, list, at, rules) }
    if not result[1] then result = { false, 3, 0, 0, 0, 0, 0, 0 } end
    for i = 1, RESULTS do out[#out + 1] = result[i + 1] end
  end
  buckets.write(call)
  return out
end
