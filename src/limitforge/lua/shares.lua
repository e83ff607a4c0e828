-- Shares of a limit, which a node prepays and then spends without asking.
--
-- What a share takes is taken: it counts like any cost. A window's share ends with its window. A token bucket refills while a share is out, so the share is
-- noted beside the level (a pending entry of kind 2): the bucket's ceiling is its capacity minus all shares out, until they are brought back or lapse.
--
-- KEYS: buckets and override keys. ARGV: resources and tokens. request[3]: rules, as for checks. request[4]: one after the other:
--   rule, key, override key (0: out of reach), resource, token, returned, starts, ends, kept, wanted, ttl_us
-- `returned` is brought back of what the node had, which it took in the window from `starts` to `ends` (0: a token bucket, or none); it is dropped unless that
-- is the bucket's window now: two windows may end at the same time, and differ in length. `kept` is what the node still has.
--
-- Answers with the time, then for each:
--   1, granted, limit, remaining, reset, starts, ends    granted: at most half of what is left, so that nodes near the end decide together again;
--                                                        starts, ends: of its window; ends is -1 if what the node kept had lapsed
--   2, time, 0, 0, 0, 0, 0                               its calendar does not reach that time: nothing was done
--   3, 0, 0, 0, 0, 0, 0                                  its key holds something that is not ours: nothing was done

local floor, max, min = math.floor, math.max, math.min
local algorithms, buckets, overrides, pending = use('algorithms'), use('buckets'), use('overrides'), use('pending')

local FIELDS, ANSWERS = 11, 7
local UNLIMITED = -1
local SHARE = 2
local TOKEN_BUCKET = 1

local function numbers_of(call, rule, override_key, resource)
  if override_key == 0 or not call.values[override_key] then return rule[5] end
  local list = overrides.read(call.values[override_key])
  return list and overrides.applied(list, resource, rule, call.now)
end

local function share(call, list, at, rules)
  local rule, key, token = rules[list[at]], list[at + 1], ARGV[list[at + 4]]
  local returned, kept, wanted = list[at + 5], list[at + 8], list[at + 9]
  local numbers = numbers_of(call, rule, list[at + 2], ARGV[list[at + 3]])
  if not numbers then return 3, 0, 0, 0, 0, 0, 0 end
  if numbers[1] == UNLIMITED then return 1, 0, UNLIMITED, UNLIMITED, 0, 0, -1 end -- by an override, which may end any time: nothing to prepay
  local algorithm = algorithms.of(rule[1])
  local work, judged_at = buckets.open(call, key, algorithm, numbers)
  if not work then return judged_at and 2 or 3, judged_at or 0, 0, 0, 0, 0, 0 end

  local is_bucket, changed = rule[1] == TOKEN_BUCKET, false
  local starts, ends = 0, 0
  if is_bucket then
    changed = pending.remove(work, token) ~= nil
    if not changed then
      if kept > 0 then ends = -1 end
      kept, returned = 0, 0
    end
  elseif list[at + 6] ~= algorithm.starts(work, numbers) or list[at + 7] ~= work.til then
    returned = 0
  end
  if call.budget and not call.values[key] then -- it would begin a bucket, which the tenant may not be allowed to
    local lane = call.budget.lane_of(key)
    if lane and lane.left < 1 then wanted = 0 end
  end
  if returned > 0 then
    algorithm.give(work, numbers, returned, 0)
    changed = true
  end
  algorithm.seal(work)
  local granted = min(wanted, floor(max(numbers[1] - work.used, 0) / 2))
  if granted > 0 then
    algorithm.take(work, numbers, granted)
    changed = true
  end
  if not is_bucket then starts, ends = algorithm.starts(work, numbers), work.til end -- what was granted may have opened the window
  if is_bucket and granted + kept > 0 then pending.add(work, token, work.last + list[at + 10], granted + kept, 0, SHARE) end
  algorithm.seal(work)
  if changed then buckets.keep(call, key, algorithm, work) end
  return 1, granted, numbers[1], max(numbers[1] - work.used, 0), work.til - work.last, starts, ends
end

return function(request, now, injected)
  local rules, list, out = request[3], request[4], { now }
  local call = buckets.read(now, injected, request[5], {})
  for at = 1, #list, FIELDS do
    local answer = { pcall(share, call, list, at, rules) }
    if not answer[1] then answer = { false, 3, 0, 0, 0, 0, 0, 0 } end
    for i = 1, ANSWERS do out[#out + 1] = answer[i + 1] end
  end
  buckets.write(call)
  return out
end
