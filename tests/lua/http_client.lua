-- A client of HTTP for tests whose server runs on the same thread: bash, which opens connections by itself and sends
-- what it is told to, a well-formed request or another, while the test drives the server.
--
--     local clients = dofile(here .. "http_client.lua")
--     local one = clients.start(port, "GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
--     clients.drive(function() server:poll(handler, 20) end, one)
--     local status, head, body = one:reply()
local ty = require "tycho"

local M = {}

--- Whether there is a bash with which this works.
M.works = os.execute "bash -c 'exec 3<>/dev/null' >/dev/null 2>&1" == true

-- Kept: its folder goes when nobody has it any more.
M.scratch = dofile((debug.getinfo(1, "S").source:match "^@(.*/)" or "./") .. "scratch.lua")
local folder = M.scratch.folder
local count = 0

local Client = {}
Client.__index = Client

local function write(path, bytes)
  local file <close> = assert(io.open(path, "wb"))
  file:write(bytes)
end

--- Begins to talk. what: bytes, or a list of bytes and of seconds to wait between them. options: leave (seconds for
-- which it listens; then the connection is closed), deaf (it sends, reads nothing and waits for so many seconds).
function M.start(port, what, options)
  local o = options or {}
  count = count + 1
  local path = ("%s/client-%d"):format(folder, count)
  local script = { ("exec 3<>/dev/tcp/127.0.0.1/%d || exit 1"):format(port) }
  for i, piece in ipairs(type(what) == "table" and what or { what }) do
    if type(piece) == "number" then
      script[#script + 1] = "sleep " .. piece
    else
      write(("%s.%d"):format(path, i), piece)
      script[#script + 1] = ("cat %s.%d >&3 || exit 0"):format(path, i)
    end
  end
  if o.deaf then script[#script + 1] = "sleep " .. o.deaf
  else script[#script + 1] = ("timeout %s cat <&3 >%s.got"):format(o.leave or 60, path) end
  write(path .. ".sh", table.concat(script, "\n") .. "\n")
  os.execute(("(timeout 90 bash %s.sh >/dev/null 2>%s.errors; mv %s.sh %s.over) &"):format(path, path, path, path))
  return setmetatable({ path = path }, Client)
end

--- Whether it is over.
function Client:over() return ty.io.exists(self.path .. ".over") end

--- What came so far.
function Client:got()
  local file = io.open(self.path .. ".got", "rb")
  if not file then return "" end
  local text = file:read "a"
  file:close()
  return text
end

-- A body in pieces as they are sent, put together; second whether its end came.
local function whole(body)
  local parts, at = {}, 1
  while true do
    local first, last, size = body:find("^(%x+)\r\n", at)
    if not first then return table.concat(parts), false end
    size = tonumber(size, 16)
    if size == 0 then return table.concat(parts), true end
    parts[#parts + 1] = body:sub(last + 1, last + size)
    at = last + 1 + size + 2
  end
end

--- The status, the head and the body of what came (status nil: no answer), and whether the body is whole.
function Client:reply()
  local text = self:got()
  local head, body = text:match "^(.-)\r\n\r\n(.*)$"
  head = head or text
  local complete = true
  if head:lower():find "transfer%-encoding: chunked" then body, complete = whole(body) end
  return tonumber(head:match "^HTTP/1%.1 (%d+)"), head, body or "", complete
end

--- Calls step() until all clients are over (or `holds`, a function, says so); false when that takes too long.
function M.drive(step, holds, ...)
  local list = type(holds) == "function" and {} or { holds, ... }
  local done = type(holds) == "function" and holds or function()
    for _, client in ipairs(list) do
      if not client:over() then return false end
    end
    return true
  end
  local clock, began = ty.system.clock, ty.system.clock()
  while not done() do
    step()
    if clock() - began > 60 then return false end
  end
  return true
end

--- A request as bytes. headers: lines, each with its end.
function M.request(method, path, body, headers)
  return ("%s %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n%s%s\r\n%s"):format(method, path, headers or "",
    body and ("Content-Length: %d\r\n"):format(#body) or "", body or "")
end

return M
