-- Generates the requests of wrk: always the same one, each time for another subject.
--
--   wrk ... -s load.lua URL -- METHOD BODY SUBJECTS ORDER LINES DENIAL
--
-- "#######" is replaced by the number of a subject, and "@line@" by a line of the file LINES. ORDER is "random", or "once"
-- to send each combination once and exit. Bodies that contain the text DENIAL are counted, unless it is empty, because
-- reading bodies takes time.

local SPARE = 64 -- one request per connection, so that all earlier ones are answered

over = 0
local threads, requests = {}, {}
local subjects, is_once, denial, at = 1, false, "", -1

function setup(thread)
  table.insert(threads, thread)
end

function init(args)
  local method, body, lines = args[1], args[2], args[5]
  subjects, is_once, denial = tonumber(args[3]), args[4] == "once", args[6]
  math.randomseed(os.time())
  for line in io.lines(lines) do
    local headers, parts = {}, {}
    for name, value in pairs(wrk.headers) do
      headers[name] = value:gsub("@line@", line)
    end
    local whole = wrk.format(method, nil, headers, body ~= "" and body:gsub("@line@", line) or nil)
    for part in (whole .. "#######"):gmatch("(.-)#######") do
      table.insert(parts, part)
    end
    table.insert(requests, parts)
  end
  if denial ~= "" then
    response = count
  end
end

function request()
  local line, subject
  if is_once then
    at = at + 1
    line, subject = at % #requests, math.floor(at / #requests) % subjects
    if at == #requests * subjects + SPARE then
      os.exit(0)
    end
  else
    line, subject = math.random(0, #requests - 1), math.random(0, subjects - 1)
  end
  return table.concat(requests[line + 1], string.format("%07d", subject))
end

function count(status, headers, body)
  if body:find(denial, 1, true) then
    over = over + 1
  end
end

function done()
  for _, thread in ipairs(threads) do
    io.write("Denials in bodies: " .. thread:get("over") .. "\n")
  end
end
