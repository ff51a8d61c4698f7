--- Programs that run beside this one, with their output in a file: what runs on a GPU for the first time may crash or
-- hang, and must take nothing else with it.
local ty = require "tycho"

local Job = {}
Job.__index = Job

local jobs = {}

local function write(path, text)
  local file <close> = assert(io.open(path, "w"))
  file:write(text)
end

--- Starts a command of the shell, which is ended after `seconds`. Its output goes to the file `log`.
function jobs.start(command, seconds, log)
  write(log .. ".sh", command .. "\n")
  for _, ending in ipairs { "", ".pid", ".rc" } do os.remove(log .. ending) end
  write(log, "")
  local quoted = "'" .. log
  local line = "{ timeout -k 5 SECONDS sh LOG.sh' >LOG' 2>&1 </dev/null & echo $! >LOG.pid'; wait $!; "
    .. "echo $? >LOG.tmp'; mv LOG.tmp' LOG.rc'; } 2>/dev/null &"
  assert(os.execute((line:gsub("%u%u%u+", { SECONDS = math.max(1, math.ceil(seconds)), LOG = quoted }))))
  return setmetatable({ log = log, at = 0, began = ty.system.clock(), moved = ty.system.clock() }, Job)
end

local function number(path)
  local file <close> = io.open(path)
  return file and file:read "n"
end

--- Its exit status when it has ended (124 or 137: it ran out of time).
function Job:ended()
  self.status = self.status or number(self.log .. ".rc")
  return self.status
end

--- What it has written since the last call; self.moved is when there was something.
function Job:news()
  local file <close> = assert(io.open(self.log))
  file:seek("set", self.at)
  local text = file:read "a"
  self.at = self.at + #text
  if #text > 0 then self.moved = ty.system.clock() end
  return text
end

function Job:output()
  local file <close> = assert(io.open(self.log))
  return file:read "a"
end

function Job:stop()
  local pid = number(self.log .. ".pid")
  if pid and not self:ended() then os.execute(("kill %d 2>/dev/null"):format(pid)) end
end

--- Runs starts, functions that start a job each, at most `together` at once, for at most `seconds`; done(job, i) when
-- one has ended. Returns whether all have ended in time.
function jobs.all(starts, together, seconds, done)
  local began, running, at, count = ty.system.clock(), {}, 1, 0
  while at <= #starts or count > 0 do
    while at <= #starts and count < together do
      running[at] = starts[at]()
      at, count = at + 1, count + 1
    end
    for i, job in pairs(running) do
      if job:ended() then
        running[i] = nil
        count = count - 1
        done(job, i)
      end
    end
    if ty.system.clock() - began > seconds then
      for _, job in pairs(running) do job:stop() end
      return false
    end
    ty.system.sleep(0.02)
  end
  return true
end

return jobs
