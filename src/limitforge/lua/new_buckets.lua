-- A budget of buckets that a tenant may begin in a minute, counted where they begin: at a key that is not there yet.
--
-- request[5]: { how many a minute, then for each of the last KEYS 1 if overflow buckets are among the keys for its lane, else 0 }. Those last KEYS are the
--   counters of the lanes that the call touches. None is read before a bucket of its lane begins, so known subjects pay nothing.
-- request[6]: { key, its overflow bucket, ... }
--
-- A lane's counter is a sliding window counter of one minute, kept like any other bucket.

local match = string.match
local buckets, counter = use('buckets'), use('sliding_window_counter')

local MINUTE_US = 60000000
local FIXED_WINDOW, OFFSET_AT = 3, 4

return function(call, limits, overflow)
  local numbers, count, lanes, overflow_of, is_overflow = { limits[1], MINUTE_US }, #limits - 1, {}, {}, {}
  for i = 1, count do
    local key = #KEYS - count + i
    lanes[KEYS[key]] = { key = key, is_prepared = limits[i + 1] == 1, begun = 0 }
  end
  for i = 1, #overflow, 2 do
    overflow_of[overflow[i]], is_overflow[overflow[i + 1]] = overflow[i + 1], true
  end

  local function read(lane)
    if call.values[lane.key] == nil then call.values[lane.key] = redis.call('GET', KEYS[lane.key]) end
    lane.work = buckets.open(call, lane.key, counter, numbers)
    counter.seal(lane.work)
    lane.left = numbers[1] - lane.work.used
  end

  local budget = { overflow_of = overflow_of }

  -- The lane of a key, with how many buckets it may still begin; nil if nothing bounds it, or if its counter can't be read: that must not stop a check.
  function budget.lane_of(key)
    local name = match(KEYS[key], '^[^}]*}:') .. 'b'
    local lane = lanes[name]
    if lane and not lane.left and not pcall(read, lane) then
      lanes[name] = nil
      return nil
    end
    return lane
  end

  function budget.begin(key)
    local lane = not is_overflow[key] and budget.lane_of(key)
    if lane then lane.left, lane.begun = lane.left - 1, lane.begun + 1 end
  end

  -- The numbers of an overflow bucket, which subjects share, with overrides and without. An override changes how much its subject may take. The window and
  -- the rate are the rule's, with the same phase for all, or one subject would start the count afresh or refill the bucket for the others.
  function budget.shared_numbers(numbers, rule)
    local code, own, shared = rule[1], rule[5], {}
    for i = 1, #own do shared[i] = own[i] end
    shared[1] = numbers[1]
    if not use('overrides').is_exact(code, shared) then shared[1] = own[1] end
    if code == FIXED_WINDOW then shared[OFFSET_AT] = 0 end
    return shared
  end

  -- Counts what has begun, to be written with the buckets.
  function budget.charge()
    for _, lane in pairs(lanes) do
      if lane.begun > 0 then
        counter.take(lane.work, numbers, lane.begun)
        counter.seal(lane.work)
        call.values[lane.key], call.changed[lane.key] = lane.work, counter
      end
    end
  end

  return budget
end
