--- What every recipe shares: its head, its arguments, the folder for results, timing, the closing table, records.
--
--     -- Digits by flow matching
--     -- claim: a class-conditional flow model draws digits that a classifier recognises
--     -- paper: Lipman et al. 2023, "Flow Matching for Generative Modeling"
--     -- time: 3 minutes on two CPU cores
--     local r = recipe.declare {
--       seeds = 3,
--       args = { { "steps", 800, "training steps", quick = 20 }, { "guidance", 1.5, "strength of guidance" } },
--     }
--     for _, seed in ipairs(r.seeds) do ... r.args.steps, r.device, r.quick, r:path "samples.png" ... end
--     os.exit(r:finish { { claim = "recognised", values = by_seed, bar = 0.95 } })
local ty = require "tycho"
local checks = require "tycho.arguments"
local arguments = require "tycho.recipe.arguments"
local head = require "tycho.recipe.head"
local measures = require "tycho.recipe.measures"
local records = require "tycho.recipe.records"
local rows = require "tycho.recipe.rows"
local stats = require "tycho.stats"

local M = { parse = arguments.parse, help_text = arguments.help, distance = measures.distance, apart = measures.apart,
  from_reference = measures.from_reference }

--- What recipe.declare returns: a recipe's arguments, seeds, folders and its end.
---@class Recipe
---@field name string             family/name
---@field head RecipeHead
---@field args table<string, any> the declared arguments
---@field seed integer
---@field seeds? integer[]        the seeds of the runs, where `seeds` was declared
---@field device string
---@field quick boolean
---@field out string              folder of the results
---@field plan boolean            whether the run stops after two training steps and says what they took
---@field footprint boolean       whether the life-cycle report is printed at the end
---@field metrics table           numbers by name that the recipe wants to keep besides its table
local Recipe = {}
Recipe.__index = Recipe

local function entries_of(spec)
  local lists, known, entries = { spec.args or {}, {}, arguments.common }, {}, {}
  if spec.seeds then table.insert(lists[2], arguments.seeds(spec.seeds, spec.recorded_seeds)) end
  if spec.base then table.insert(lists[2], arguments.base) end
  for _, list in ipairs(lists) do
    for _, entry in ipairs(list) do
      if known[entry[1]] then error(("recipe.declare: argument '%s' is declared twice"):format(entry[1]), 3) end
      known[entry[1]] = true
      entries[#entries + 1] = entry
    end
  end
  return entries
end

-- Ends the program with one line: the user's mistake, not the recipe's.
local function refuse(text)
  io.stderr:write((tostring(text):gsub("^.-:%d+: ", "")), "\n")
  os.exit(2, true)
end

--- Declares a recipe and reads the command line; title, claim, system, paper and time come from the head of the file.
-- spec: args, a list as tycho.recipe.arguments describes them; seeds (how many runs, for recipes that train: --seeds
-- and r.seeds); recorded_seeds (how many under --record: three at least, unless it says so); base (true for recipes
-- that begin with trained models: --base and r:base()); file (by default the caller's). --help prints and ends the
-- program; a mistake prints a line and ends it with status 2.
---@param spec { args?: RecipeArgument[], seeds?: integer, recorded_seeds?: integer, base?: boolean, file?: string }
---@param words? string[]  instead of the command line
---@return Recipe
function M.declare(spec, words)
  local file = spec.file or debug.getinfo(2, "S").source:match "^@(.*)$" or "recipe.lua"
  local entries = entries_of(spec)
  local self = setmetatable({ spec = spec, entries = entries, began = ty.system.clock(), metrics = {} }, Recipe)
  self.head = head.read(file)
  self.name, self.root = head.name(file)
  local given, problem = arguments.parse(entries, words or rawget(_G, "arg") or {})
  if problem == "help" then
    io.stdout:write(arguments.help(self.head, entries))
    os.exit(0, true)
  elseif problem then
    refuse(problem)
  end
  local args = arguments.values(entries, given)
  self.args = args
  for _, entry in ipairs(arguments.common) do self[entry[1]] = args[entry[1]] end
  if self.out == "" then self.out = "runs/" .. self.name end
  local fine, reason = pcall(function()
    if self.threads > 0 then ty.set_threads(self.threads) end
    local available, why = ty.device_available(self.device)
    if not available then error("--device: " .. why, 0) end
    if self.plan then
      if self.record then error("--plan: a run that stops after two steps is no record", 0) end
      require("tycho.recipe.plan").begin(self.device, function(text)
        io.stdout:write(text, "\n")
        os.exit(0, true)
      end)
    end
    if self.record then
      if self.quick then error("--record: a quick run judges nothing; run it without --quick", 0) end
      if not self.root then error(("--record: %s is in no folder recipes/"):format(file), 0) end
      self.commit = records.commit(self.root)
    end
    if self.footprint then self.meter = ty.energy.meter { device = self.device } end
    ty.io.mkdir(self.out)
    -- For `tycho watch`, while the recipe runs.
    ty.io.write_atomic(self:path "recipe.json", records.encode { recipe = self.name, title = self.head.title,
      args = args })
  end)
  if not fine then refuse(reason) end
  if spec.seeds then
    self.seeds = {}
    for i = 1, args.seeds do self.seeds[i] = self.seed + i - 1 end
  end
  ty.manual_seed(self.seed)
  debug.getregistry()["tycho.brief_errors"] = true -- what is wrong from here on is a line: src/cli/main.c
  return self
end

--- Keeps numbers of a run in the metrics, under "what/name", with a seed under "what/name/seed".
---@param what string
---@param values table<string, number>
---@param seed? integer
function Recipe:note(what, values, seed)
  for name, value in pairs(values) do
    self.metrics[seed and ("%s/%s/%d"):format(what, name, seed) or ("%s/%s"):format(what, name)] = value
  end
end

--- What a recipe tries: of a list all, under --quick the first alone.
---@generic T
---@param list T[]
---@return T[]
function Recipe:tries(list) return self.quick and { list[1] } or list end

--- What a way does with the best of its tries. The first call for a name runs try(entry, false) for all of `tries`
-- (under --quick for the first alone), which returns a result and its score, and puts the entry that was best into
-- metrics.chosen[name]; later ones, of the other seeds, run try(entry, true) for that alone. pick(scores): the place of
-- the best (ty.stats.least). The results of all tries are held until the choice.
---@generic T
---@param name string
---@param tries any[]
---@param try fun(entry: any, known: boolean): T, any
---@param pick? fun(scores: any[]): integer
---@return T result
---@return any score
function Recipe:choose(name, tries, try, pick)
  local who = "Recipe:choose"
  checks.expect(who, "name", name, "a string")
  checks.expect(who, "tries", tries, "a list")
  checks.expect(who, "try", try, "a function")
  checks.expect(who, "pick", pick, "a function or nil")
  if #tries == 0 then checks.fail("%s: tries: expected at least one, got none", who) end
  local chosen = self.metrics.chosen or {}
  self.metrics.chosen = chosen
  if chosen[name] ~= nil then return try(chosen[name], true) end
  local results, scores = {}, {}
  for i, entry in ipairs(self:tries(tries)) do results[i], scores[i] = try(entry, false) end
  local best = (pick or stats.least)(scores)
  chosen[name] = tries[best]
  return results[best], scores[best]
end

--- A path in the folder of the results.
function Recipe:path(name) return self.out .. "/" .. name end

--- A path in the folder of trained models: --base, or `base` in the folder of the results.
---@param name? string|integer  a file in it; of a seed: the model trained with it
function Recipe:base(name)
  local folder = self.args.base ~= "" and self.args.base or self:path "base"
  if math.type(name) == "integer" then name = "seed" .. name end
  return name and folder .. "/" .. name or folder
end

--- Prints a line of the recipe's report.
function Recipe:say(format, ...)
  io.stdout:write(select("#", ...) > 0 and format:format(...) or format, "\n")
  io.stdout:flush()
end

--- Seconds since the recipe began.
function Recipe:seconds() return ty.system.clock() - self.began end

--- Runs fn with new modules made on the recipe's device, and returns what it returns.
---@param fn function
---@param options? table  further defaults: dtype
function Recipe:place(fn, options)
  local defaults = { device = self.device }
  for key, value in pairs(options or {}) do defaults[key] = value end
  return ty.nn.with_defaults(defaults, fn)
end

--- The recorded run of another recipe, with the arguments that it has by itself, to compare with; nil where there is
-- none.
---@param name string  family/name
---@return table?
function Recipe:recorded(name)
  return self.root and records.plain_run(records.read(self.root, name)) or nil
end

--- Waits until the recipe's device has done what it was asked for.
function Recipe:wait()
  if self.device ~= "cpu" then ty.cuda.synchronize(self.device) end
end

--- Seconds that one call of fn takes, in a scope, until the recipe's device has done it.
---@param fn function
---@param calls? integer  how often it is called; the seconds are of one (1)
---@return number
function Recipe:clock(fn, calls)
  calls = calls or 1
  self:wait()
  local began = ty.system.clock()
  for _ = 1, calls do ty.scope(fn) end
  self:wait()
  return (ty.system.clock() - began) / calls
end

--- The most bytes on the recipe's device at once during fn, beyond those held before it.
---@param fn function
---@return integer
function Recipe:memory(fn)
  collectgarbage()
  collectgarbage()
  local before = ty.memory.stats(self.device).live
  ty.memory.reset_peak(self.device)
  ty.scope(fn)
  self:wait()
  return ty.memory.stats(self.device).peak - before
end

--- Watches the bytes on the recipe's device from now on, once what nobody holds any more is freed: for training that is
-- not all to be counted. Returns two functions: begin() begins to count anew, and most() says the most bytes at once
-- since, beyond those that there were when the watch began.
---@return fun() begin
---@return fun(): integer most
function Recipe:watch()
  collectgarbage()
  collectgarbage()
  local before = ty.memory.stats(self.device).live
  return function() ty.memory.reset_peak(self.device) end,
    function() return ty.memory.stats(self.device).peak - before end
end

--- Frees what nobody holds any more and what the allocator keeps of it: what is measured next begins with an empty
-- cache.
---@param device? string  the recipe's
function Recipe:clean(device)
  checks.expect("Recipe:clean", "device", device, "a string or nil")
  collectgarbage()
  collectgarbage()
  ty.memory.empty_cache(device or self.device)
end

--- The most bytes on a device at once within steps, with all that they need and that stays (weights, moments), beyond
-- what there was before; and what make() returned.
---@param make fun(): function  makes what a step needs and returns the step
---@param options? { warmup?: integer, steps?: integer, device?: string }  warmup: steps before (4); steps: those that
-- count (2); device: the recipe's
---@return integer bytes
---@return function step
function Recipe:peak(make, options)
  local who = "Recipe:peak"
  checks.expect(who, "make", make, "a function")
  local o = checks.read(who, options, { warmup = 4, steps = 2, device = self.device },
    { warmup = "an integer >= 0", steps = "an integer >= 1" })
  collectgarbage()
  collectgarbage()
  local before = ty.memory.stats(o.device).live
  local step = checks.expect(who, "what make gives", make(), "a function")
  for _ = 1, o.warmup do ty.scope(step) end
  self:clean(o.device)
  ty.memory.reset_peak(o.device)
  for _ = 1, o.steps do ty.scope(step) end
  return ty.memory.stats(o.device).peak - before, step
end

--- Seconds that functions take, by the names they have in the table: medians, and all times. They take turns in every
-- round, so that what disturbs one disturbs the others; each call is in a scope, and waited for.
---@generic K
---@param functions table<K, function>
---@param options { rounds: integer, warmup?: integer, calls?: table<K, integer> }  warmup: rounds that do not count
-- (1); calls: how often a function is called in a round, whose time is divided by it (1)
---@return table<K, number> medians, table<K, number[]> times
function Recipe:time(functions, options)
  local names, times, medians = {}, {}, {}
  for name in pairs(functions) do names[#names + 1] = name end
  table.sort(names)
  for round = 1 - (options.warmup or 1), options.rounds do
    for _, name in ipairs(names) do
      local seconds = self:clock(functions[name], options.calls and options.calls[name])
      times[name] = times[name] or {}
      if round > 0 then times[name][round] = seconds end
    end
  end
  for name, list in pairs(times) do medians[name] = stats.median(list) end
  return medians, times
end

--- The picture that stands for the recipe on its page: a small PNG in the folder of the results, which --record keeps.
---@param name string
---@return string path
function Recipe:picture(name)
  self.shown = self:path(name)
  return self.shown
end

local LARGEST = 200000 -- bytes of a recorded picture

-- The recorded picture stands beside the record, under the recipe's name. One that is too large is brought to half its
-- sides: a run of an hour is not lost for its picture.
local function keep_picture(self)
  if not self.shown then return nil end
  local content = ty.io.read(self.shown)
  local target = ("%s/records/%s.png"):format(self.root, self.name)
  while #content > LARGEST do
    local x = ty.io.load_image(self.shown)
    local h, w = x.shape[2] // 2, x.shape[3] // 2
    local small = self:path "small.png"
    ty.io.save_image(small, x:to("f32"):unsqueeze(0):interpolate({ h, w }, nil, "bilinear", false, true):squeeze(0)
      :clamp(0, 255):round():to "u8")
    io.stdout:write(("%s: %d bytes are more than the %d of a record; it is kept with half its sides\n"):format(
      self.shown, #content, LARGEST))
    content, self.shown = ty.io.read(small), small
  end
  ty.io.mkdir(target:match "^(.*)/")
  ty.io.write_atomic(target, content)
  return target:match "[^/]+$"
end

-- Where the recipe computed: its device, or the CPU where it took --device and made nothing there, which is said.
local function place_of(self)
  if self.device == "cpu" or ty.memory.stats(self.device).allocations > 0 then return self.device end
  io.stdout:write(("\n--device %s: this recipe made nothing there; it computed on the CPU\n"):format(self.device))
  return "cpu"
end

-- What --footprint asks for: a device is a core for every thread, or the GPU that a life-cycle assessment is known of.
local function print_footprint(self)
  local reading = self.meter:read()
  local gpu = self.device ~= "cpu"
  local report = ty.footprint.report { joules = reading.joules, hours = reading.seconds / 3600, grid = self.electricity,
    device = gpu and "a100" or "core", devices = gpu and 1 or ty.threads() }
  io.stdout:write("\n", tostring(reading), "\n\n", tostring(report), "\n")
  local kept = { joules = reading.joules, seconds = reading.seconds, measured = reading.measured, kwh = report.kwh }
  for _, row in ipairs(report.rows) do kept[row.key] = row.total end
  return kept
end

--- Ends the recipe: prints the table of claims and writes metrics.json, with --record also the record. Under --quick
-- nothing is judged. Returns the exit status: 0, or 1 with --strict when a row failed.
---@param list RecipeRow[]
---@return integer status
function Recipe:finish(list)
  if self.plan then
    io.stdout:write("nothing is trained by an optimizer of ty.optim: there is no step to plan\n")
    return 0
  end
  local results, failed = {}, 0
  for i, row in ipairs(list) do
    results[i] = rows.result(row, not self.quick)
    if results[i].pass == false then failed = failed + 1 end
  end
  io.stdout:write("\n", rows.text(results))
  local seconds = self:seconds()
  local run = { seed = self.seed, device = place_of(self), threads = ty.threads(), seconds = seconds, table = results,
    metrics = self.metrics, version = ty.version, arguments = arguments.changed(self.entries, self.args) }
  local metrics = { recipe = self.name, args = self.args }
  for key, value in pairs(run) do metrics[key] = value end
  if self.meter then metrics.footprint = print_footprint(self) end
  ty.io.write_atomic(self:path "metrics.json", records.encode(metrics))
  local note = self.quick and "quick run, bars not judged; " or ""
  io.stdout:write(("\n%s%.1f s, results in %s\n"):format(note, seconds, self.out))
  if self.record then
    run.commit, run.picture = self.commit, keep_picture(self)
    io.stdout:write("recorded in ", records.add(self.root, self.name, run), "\n")
  end
  return self.strict and failed > 0 and 1 or 0
end

return M
