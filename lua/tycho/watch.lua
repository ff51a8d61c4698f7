--- `tycho watch`: a page, served on this machine, that shows the training runs below a folder and follows them.
--
--     tycho watch [DIR] [--port 6060] [--host 127.0.0.1]
--
-- The parts: watch/runs.lua finds runs and says how they stand, watch/site.lua answers requests, and page.html,
-- page.css and page.js beside them are the page.
local core = require "tycho.core"
local arguments = require "tycho.arguments"

local watch = {}

local usage = [[
usage: tycho watch [DIR] [--port N] [--host NAME]

  DIR     the folder below which runs are (runs); each folder with a metrics.jsonl is one
  --port  where the page is (6060; 0: any port that is free)
  --host  the name or address to listen at (127.0.0.1: this machine alone; 0.0.0.0: all that can reach it)

Ctrl-C ends it.
]]

-- The values of the words; nil and what is wrong with them.
local function parse(words)
  local o, i = { port = 6060, host = "127.0.0.1" }, 1
  while i <= #words do
    local word = words[i]
    local name, value = word:match "^%-%-(%a+)=?(.*)$"
    if word == "--help" or word == "-h" then return { help = true } end
    if name == "port" or name == "host" then
      if not word:find "=" then
        i = i + 1
        value = words[i]
      end
      if not value or value == "" then return nil, ("--%s: expected a value, got none"):format(name) end
      if name == "port" then
        local port = math.tointeger(tonumber(value))
        if not port or port < 0 or port > 65535 then
          return nil, ("--port: expected an integer in [0, 65535], got '%s'"):format(value)
        end
        value = port
      end
      o[name] = value
    elseif word:sub(1, 1) == "-" then
      return nil, ("unknown argument '%s'; there are DIR, --port and --host"):format(word)
    elseif o.folder then
      return nil, ("expected one folder, got '%s' and '%s'"):format(o.folder, word)
    else
      o.folder = word
    end
    i = i + 1
  end
  o.folder = o.folder or "runs"
  return o
end

function watch.command(words)
  local o, problem = parse(words)
  if not o then
    io.stderr:write(problem, "\n")
    return 2
  end
  if o.help then
    io.stdout:write(usage)
    return 0
  end
  local info = core.io.stat(o.folder)
  local root = info and info.kind == "directory" and core.http_core.real(o.folder)
  if not root then
    io.stderr:write(("watch: %s: expected a folder, %s\n"):format(o.folder,
      info and "got a file" or "there is none of that name"))
    return 2
  end
  local fine, server, port = pcall(core.http_core.listen, o.host, o.port, { body = 0 })
  if not fine then
    io.stderr:write((tostring(server):gsub("^[^\n]-%.lua:%d+: ", "")), "\n")
    return 1
  end
  local answer = require("tycho.watch.site").new(root, o.host, o.folder)
  local shown = (o.host == "0.0.0.0" or o.host == "::") and "localhost" or o.host
  if shown:find(":", 1, true) then shown = "[" .. shown .. "]" end
  io.stdout:write(("watching %s at http://%s:%d/ (Ctrl-C ends)\n"):format(o.folder, shown, port))
  io.stdout:flush()
  repeat
    fine, problem = pcall(server.serve, server, answer, 3600)
  until not fine
  server:close()
  if not arguments.interrupted(problem) then error(problem, 0) end
  io.stdout:write "\n"
  return 0
end

return watch
