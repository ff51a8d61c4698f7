--- Training that is killed at any moment and goes on from its last checkpoint: whether anything is lost. A job is a
-- process of its own, which trains on ranks, saves in the background, and writes what it does to a log; run() starts
-- it, kills it, and starts it again.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local ranks = require "tycho.dist.ranks"
local trial = require "tycho.dist.universal_trial"
local universal = require "tycho.dist.universal"
local workload = require "tycho.dist.workload"

local expect = arguments.expect
local M = {}

local none = arguments.none
local DEFAULTS = { folder = none, tensor = 2, data = 1, steps = 100, every = 5, rate = 4000000, width = 64, layers = 2,
  length = 16, chapters = 12, dtype = "f32", seed = 0 }
local WANTED = { folder = "a string", tensor = "an integer >= 1", data = "an integer >= 1",
  steps = "an integer >= 1", every = "an integer >= 1", rate = "an integer >= 0", width = "an integer >= 1",
  layers = "an integer >= 1", length = "an integer >= 2", chapters = "an integer >= 10", dtype = '"f32" or "f64"',
  seed = "an integer" }

local function read(who, options, defaults, wanted)
  local o = arguments.read(who, options, defaults, wanted)
  expect(who, "folder", o.folder, "a string")
  return o
end

--- Trains dist.universal_trial up to a step, from the checkpoint in a folder where there is one, and saves there in the
-- background. The log in that folder gets lines: "resumed N", "STEP LOSS" (the bits of an f64), "committed N". options:
-- folder, tensor (2), data (1), steps (100: at which it ends), every (5: steps between saves), rate (4000000: bytes a
-- second that a rank writes), width (64), layers (2), length (16), chapters (12) of the workload, dtype ("f32"), seed.
---@param options table
function M.job(options)
  local o = read("dist.universal_kills.job", options, DEFAULTS, WANTED)
  local work = workload.open { length = o.length, width = o.width, heads = 4, layers = o.layers, rows = 8,
    chapters = o.chapters, vocabulary = 260 }
  ranks.run(o.tensor * o.data, function(group)
    local path = o.folder .. "/checkpoint"
    local log <close> = assert(io.open(o.folder .. "/log", "a"))
    local function say(text, ...)
      if group.rank > 0 then return end
      log:write(text:format(...), "\n")
      log:flush() -- what the system has outlives the process
    end
    local trainer = trial.new(group, work, { tensor = o.tensor, data = o.data, dtype = o.dtype,
      seed = o.seed })
    if universal.exists(path) then trainer:load(path, true) end
    say("resumed %d", trainer.steps)
    local saver <close> = universal.saver(group, { rate = o.rate })
    local saved
    while trainer.steps < o.steps do
      local loss = trainer:step()
      say("%d %016x", trainer.steps, string.unpack("<i8", string.pack("<d", loss)))
      if trainer.steps % o.every == 0 then
        trainer:save(path, saver) -- the one before counts by now
        if saved then say("committed %d", saved) end
        saved = trainer.steps
      end
    end
    saver:wait()
    if saved then say("committed %d", saved) end
  end)
end

-- The shell command that runs a Lua file with the interpreter that runs this program.
local function command_for(path)
  local i = 0
  while arg and arg[i - 1] do i = i - 1 end
  local program = arg and arg[i] or "lua5.4"
  local function quoted(text) return "'" .. text:gsub("'", "'\\''") .. "'" end
  return ("LUA_PATH=%s LUA_CPATH=%s %s %s"):format(quoted(package.path), quoted(package.cpath), quoted(program),
    quoted(path))
end

local function read_log(folder)
  local lines = {}
  if ty.io.exists(folder .. "/log") then
    for line in (ty.io.read(folder .. "/log")):gmatch "([^\n]*)\n" do lines[#lines + 1] = line end
  end
  return lines
end

-- Starts a job; kill(pid) may end it. Returns once it has ended.
local function start(o, kill)
  ty.io.mkdir(o.folder)
  local child, problems = o.folder .. "/job.lua", o.folder .. "/problems"
  ty.io.save_json(o.folder .. "/options.json", o)
  ty.io.write_atomic(child, ('require("tycho.dist").universal_kills.job(require("tycho").io.load_json(%q))\n')
    :format(o.folder .. "/options.json"))
  local pipe = io.popen(("%s >/dev/null 2>'%s' & echo $!; wait"):format(command_for(child), problems))
  local pid = pipe:read "l":match "^%d+$"
  if kill then kill(pid) end
  pipe:close() -- ends when the job has
  local said = ty.io.read(problems)
  if said ~= "" then arguments.fail("dist.universal_kills.run: the job failed: %s", said) end
end

--- Kills a job at random moments, and looks whether the checkpoint of which it was said that it counts is there, and
-- whether in the end all steps had the losses that they have without kills, bit for bit. options: those of job(), but
-- steps; kills (10), longest (1: seconds from a job's first step until it is killed), more (10: steps after the last).
---@param options table
---@return { kills: integer, during: integer, lost: integer, differ: integer, steps: integer, again: integer }  during:
-- kills while a checkpoint was being written; lost: kills after which a checkpoint that counted was not there; differ:
-- steps whose loss was another one; again: steps that were done more than once
function M.run(options)
  local who = "dist.universal_kills.run"
  local defaults, wanted = { kills = 10, longest = 1, more = 10 },
    { kills = "an integer >= 1", longest = "a finite number > 0", more = "an integer >= 1" }
  for key, value in pairs(DEFAULTS) do defaults[key], wanted[key] = value, WANTED[key] end
  local o = read(who, options, defaults, wanted)
  local moments = ty.seeded_noise(ty.empty(o.kills), o.seed + 1)
  local report = { kills = 0, during = 0, lost = 0, differ = 0, again = 0 }
  local folder = o.folder .. "/killed"
  local function job(where, steps)
    local of = {}
    for key in pairs(DEFAULTS) do of[key] = o[key] end
    of.folder, of.steps = where, steps
    return of
  end
  ty.io.mkdir(folder)
  for i = 1, o.kills do
    local before = #read_log(folder)
    start(job(folder, 1 << 40), function(pid)
      local until_when = ty.core.system.clock() + 60
      while #read_log(folder) < before + 2 and ty.core.system.clock() < until_when do ty.core.system.sleep(0.01) end
      local share = 1 / (1 + math.exp(-1.6 * moments[i - 1]:item())) -- nearly even
      ty.core.system.sleep(o.longest * share)
      os.execute(("kill -9 %s 2>/dev/null"):format(pid))
    end)
    report.kills = report.kills + 1
    for _, name in ipairs(ty.io.listdir(folder)) do
      if name:find "^checkpoint%.partial" then
        report.during = report.during + 1
        break
      end
    end
    local committed = 0
    for _, line in ipairs(read_log(folder)) do
      committed = math.max(committed, math.tointeger(tonumber(line:match "^committed (%d+)")) or 0)
    end
    if committed > 0 then
      local ok, steps = pcall(function()
        return ranks.run(1, function(group)
          local reader = universal.load(group, folder .. "/checkpoint")
          local language, list = universal.language { { "", "replicated" } }, {}
          for _, name in ipairs(reader.names) do
            for _, slot in ipairs(reader:slots(name)) do
              list[#list + 1] = { name = name, slot = slot, part = language:part(name, reader:shape(name), 0, 1) }
            end
          end
          reader:read(list) -- all of it, with its sums
          return reader.values.steps
        end)[1]
      end)
      if not ok or steps < committed then report.lost = report.lost + 1 end
    end
  end
  local reached = 0
  for _, line in ipairs(read_log(folder)) do
    reached = math.max(reached, math.tointeger(tonumber(line:match "^(%d+) ")) or 0)
  end
  report.steps = reached + o.more
  start(job(folder, report.steps))
  local whole = o.folder .. "/whole"
  start(job(whole, report.steps))
  local want, seen = {}, {}
  for _, line in ipairs(read_log(whole)) do
    local step, loss = line:match "^(%d+) (%x+)$"
    if step then want[step] = loss end
  end
  for _, line in ipairs(read_log(folder)) do
    local step, loss = line:match "^(%d+) (%x+)$"
    if step then
      if loss ~= want[step] then report.differ = report.differ + 1 end
      if seen[step] then report.again = report.again + 1 end
      seen[step] = true
    end
  end
  for step in pairs(want) do if not seen[step] then report.differ = report.differ + 1 end end
  return report
end

return M
