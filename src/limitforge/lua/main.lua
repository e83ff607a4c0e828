-- The door. ARGV[1] is msgpack: { operation, time in microseconds (-1: Redis's own), ..., number of the call }; ARGV[2] and on are byte strings, since
-- msgpack strings in Redis are text. The answer is msgpack too: a flat list of integers that ends with the number of the call; where there are strings to
-- tell, a list of that and the strings.

local CHECK, SETTLE, RELEASE, RENEW, RESET, SET_OVERRIDE, GET_OVERRIDES, LIST_OVERRIDES, DELETE_OVERRIDES = 1, 2, 3, 4, 5, 6, 7, 8, 9
local FINISH, SHARES, NODES, MISSING_OVERRIDES = 10, 11, 12, 13

local request = cmsgpack.unpack(ARGV[1])
local operation, now = request[1], request[2]
local injected = now >= 0
if not injected then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end

local answer, strings
if operation == CHECK then
  local problem
  answer, problem = use('check')(request, now, injected)
  if not answer then return redis.error_reply(problem) end
elseif operation == SETTLE then
  answer = use('reserve').settle(request, now, injected)
elseif operation == RELEASE then
  answer = use('lease')('release', now, injected)
elseif operation == RENEW then
  answer = use('lease')('renew', now, injected)
elseif operation == RESET then
  answer = { redis.call('DEL', unpack(KEYS)) }
elseif operation == SET_OVERRIDE then
  answer = use('overrides').set(request, now, injected)
elseif operation == GET_OVERRIDES then
  answer, strings = use('overrides').get(request, now, injected)
elseif operation == LIST_OVERRIDES then
  answer, strings = use('overrides').list(request)
elseif operation == DELETE_OVERRIDES then
  answer = use('overrides').delete(request, now, injected)
elseif operation == FINISH then
  answer = use('finish')(request, now, injected)
elseif operation == SHARES then
  answer = use('shares')(request, now, injected)
elseif operation == NODES then
  answer = use('nodes')(request, now)
elseif operation == MISSING_OVERRIDES then
  answer = use('overrides').missing(request, now)
end
answer[#answer + 1] = request[#request]
if strings then return { cmsgpack.pack(answer), strings } end
return cmsgpack.pack(answer)
