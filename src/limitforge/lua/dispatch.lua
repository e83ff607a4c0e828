-- Entry point: run one operation.
--
-- ARGV[1] is msgpack: { operation, time in microseconds (-1: the clock of Redis), ..., call id }. The other ARGV are
-- byte strings, because cmsgpack decodes strings as text. The reply is msgpack as well: a flat list of integers that
-- ends with the call id. An operation that returns strings replies with a list of that blob and the strings.

local CHECK, SETTLE, RELEASE, RENEW, RESET, SET_OVERRIDE, GET_OVERRIDES, LIST_OVERRIDES = 1, 2, 3, 4, 5, 6, 7, 8
local DELETE_OVERRIDES, FINISH_HOLDS, TOP_UP, HEARTBEAT, FIND_MISSING_OVERRIDES = 9, 10, 11, 12, 13

local request = cmsgpack.unpack(ARGV[1])
local operation, now = request[1], request[2]
local injected = now >= 0
if not injected then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end

local reply, strings
if operation == CHECK then
  local problem
  reply, problem = use('check')(request, now, injected)
  if not reply then return redis.error_reply(problem) end
elseif operation == SETTLE then
  reply = use('reservations').settle(request, now, injected)
elseif operation == RELEASE then
  reply = use('leases')('release', now, injected)
elseif operation == RENEW then
  reply = use('leases')('renew', now, injected)
elseif operation == RESET then
  reply = { redis.call('DEL', unpack(KEYS)) }
elseif operation == SET_OVERRIDE then
  reply = use('overrides').set(request, now, injected)
elseif operation == GET_OVERRIDES then
  reply, strings = use('overrides').get(request, now, injected)
elseif operation == LIST_OVERRIDES then
  reply, strings = use('overrides').list(request)
elseif operation == DELETE_OVERRIDES then
  reply = use('overrides').delete(request, now, injected)
elseif operation == FINISH_HOLDS then
  reply = use('finish_holds')(request, now, injected)
elseif operation == TOP_UP then
  reply = use('prepaid')(request, now, injected)
elseif operation == HEARTBEAT then
  reply = use('heartbeat')(request, now)
elseif operation == FIND_MISSING_OVERRIDES then
  reply = use('overrides').find_missing(request, now)
end
reply[#reply + 1] = request[#request]
if strings then return { cmsgpack.pack(reply), strings } end
return cmsgpack.pack(reply)
