-- Bound how many buckets a tenant may create in a minute. A bucket is counted when its key does not exist.
--
-- KEYS         The last ones are the counters of the lanes. A counter is read only when a bucket of its lane is
--              created, so checks of known subjects cost nothing more.
-- request[5]   { budget per minute, then for each counter: 1 if KEYS has the overflow buckets of its lane, else 0 }
-- request[6]   { key, its overflow bucket, ... }
--
-- A counter is a sliding window counter of one minute, stored like any other bucket.

local match = string.match
local buckets, counter = use('buckets'), use('sliding_window_counter')

local MINUTE_US = 60000000
local FIXED_WINDOW, OFFSET_AT = 3, 4

return function(call, budget_args, overflow)
  local parameters, count, lanes, overflow_of, is_overflow = { budget_args[1], MINUTE_US }, #budget_args - 1, {}, {}, {}
  for i = 1, count do
    local key = #KEYS - count + i
    lanes[KEYS[key]] = { key = key, has_overflow_keys = budget_args[i + 1] == 1, new_count = 0 }
  end
  for i = 1, #overflow, 2 do
    overflow_of[overflow[i]], is_overflow[overflow[i + 1]] = overflow[i + 1], true
  end

  local function read(lane)
    if call.values[lane.key] == nil then call.values[lane.key] = redis.call('GET', KEYS[lane.key]) end
    lane.opened = buckets.open(call, lane.key, counter, parameters)
    counter.seal(lane.opened)
    lane.remaining = parameters[1] - lane.opened.used
  end

  local budget = { overflow_of = overflow_of }

  -- Return the lane of a key with its remaining budget, or nil if it has no bound. A counter that can't be read bounds
  -- nothing, because it must not stop a check.
  function budget.lane_of(key)
    local name = match(KEYS[key], '^[^}]*}:') .. 'b'
    local lane = lanes[name]
    if lane and not lane.remaining and not pcall(read, lane) then
      lanes[name] = nil
      return nil
    end
    return lane
  end

  function budget.count_new(key)
    local lane = not is_overflow[key] and budget.lane_of(key)
    if lane then lane.remaining, lane.new_count = lane.remaining - 1, lane.new_count + 1 end
  end

  -- Return the parameters of an overflow bucket, which subjects with and without overrides share. An override changes
  -- how much its subject may take. Window, rate and phase are those of the rule for all subjects: otherwise one subject
  -- would restart the count, or refill the bucket, for the others.
  function budget.shared_parameters(parameters, rule)
    local code, own, shared = rule[1], rule[5], {}
    for i = 1, #own do shared[i] = own[i] end
    shared[1] = parameters[1]
    if not use('overrides').is_exact(code, shared) then shared[1] = own[1] end
    if code == FIXED_WINDOW then shared[OFFSET_AT] = 0 end
    return shared
  end

  -- Add the new buckets to the counters, which are written with the buckets.
  function budget.update_counters()
    for _, lane in pairs(lanes) do
      if lane.new_count > 0 then
        counter.take(lane.opened, parameters, lane.new_count)
        counter.seal(lane.opened)
        call.values[lane.key], call.changed[lane.key] = lane.opened, counter
      end
    end
  end

  return budget
end
