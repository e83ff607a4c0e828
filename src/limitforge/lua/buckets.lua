-- All buckets of one script call: read with one MGET, kept in tables while the call runs, and each changed one written once.

local format, states = string.format, use('state')

return {
  -- MGET says false for a key of another type, which must not read as empty: what seems to be missing is asked for once more, all at once.
  read = function(now, injected)
    local raw = redis.call('MGET', unpack(KEYS))
    local missing, count = {}, 0
    for at = 1, #KEYS do
      if not raw[at] then
        count = count + 1
        missing[count] = KEYS[at]
      end
    end
    if count > 0 and redis.call('EXISTS', unpack(missing)) > 0 then
      for at = 1, #KEYS do
        if not raw[at] and redis.call('EXISTS', KEYS[at]) > 0 then raw[at] = true end
      end
    end
    return { now = now, injected = injected, raw = raw, states = {}, changed = {} }
  end,

  -- The stored state of a key: false if there is none, nil if the value is not ours.
  state = function(call, key, code, algorithm)
    local state = call.states[key]
    if state == nil then
      local raw = call.raw[key]
      if raw == true then return nil end
      state = raw and states.read(raw, code, algorithm)
      if state == nil then return nil end
      call.states[key] = state
    end
    return state
  end,

  keep = function(call, key, algorithm, state)
    call.states[key] = state
    call.changed[key] = algorithm
  end,

  write = function(call)
    local now, injected, ttl = call.now, call.injected, states.ttl
    for key, algorithm in pairs(call.changed) do
      local state = call.states[key]
      local value = algorithm.write(state)
      if state.pending ~= '' then value = value .. state.pending end
      -- The TTL as text: Redis would print a number as a double, which takes longer than all the rest.
      redis.call('SET', KEYS[key], value, 'PX', format('%.0f', ttl(state.til, now, injected)))
    end
  end,
}
