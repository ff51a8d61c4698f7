-- The walk of arguments_test.lua, in a process and a folder of its own: calls every public Lua function with arguments
-- that are missing or wrong, and prints what no user should see.
--
--   tycho arguments_walk.lua CALLS SEED [PATTERN]      PATTERN: only functions whose name matches
--
-- Functions that write files are called too, with names that come by chance: it runs in a folder that may be spoilt.

local calls, seed, pattern = math.tointeger(tonumber(arg[1])), math.tointeger(tonumber(arg[2])), arg[3]
local here = arg[0]:match ".*/" or "./"
local ty = require "tycho"
local objects = dofile(here .. "arguments_objects.lua")
if not calls or not seed or ty.io.exists "CMakeLists.txt" then
  error("expected CALLS and SEED, and another folder to run in than the source tree", 0)
end

-- ---- what is walked ----

local gptq = "a step of GPTQ, which quant.eora and prune.sparsegpt call with what they have checked"

local layers = "of what networks are made: called by the files of tycho.models, once a layer"
local sampling = "called by samplers, once a step, with what they have made"
local checks = "a check, which other functions call about what they were given"

local declared = "called by recipe.declare with what a recipe declares, which is no user's argument"

-- Names of functions that are not called, and why.
local skipped = {
  ["memory.fail_at"] = "lets an allocation fail: those of the walk too",
  ["system.sleep"] = "sleeps as long as it is told",
  ["thread.new"] = "starts a thread for every function it is given",
  ["recipe.parse"] = declared, ["recipe.help_text"] = declared,
  ["recipe.declare"] = "ends the program when its words are wrong, as recipes want it",
  ["nn.options"] = "raises about the defaults of its caller, which are no user's",
  ["quant.gptq.grid"] = gptq, ["quant.gptq.inverse_factor"] = gptq,
  ["quant.gptq.solve"] = gptq, ["quant.gptq.solved"] = gptq, ["quant.gptq.weight_of"] = gptq,
  ["quant.gptq.check_solver"] = gptq, ["quant.gptq.error"] = gptq,
  ["hub.gguf"] = "the parts of the reader that hub.load calls with what a file holds, which the fuzzers make hostile",
  ["peft.audit.gate"] = "called by peft.merge, with its own name",
  ["llm.trials"] = "what recipes share: a call trains a model",
  ["distill.digits"] = "the same", ["distill.shape_painter"] = "the same",
  ["zoo.language"] = "what recipes share: a call trains a model",
  ["zoo.scenes"] = "the same",
  ["zoo.chapters"] = "the same: a call writes token files",
  ["zoo.judge"] = "the same",
  ["zoo.painter"] = "the same", ["zoo.drawings"] = "the same",
  ["zoo.answerer"] = "the same", ["zoo.watcher"] = "the same", ["zoo.describer"] = "the same",
  ["zoo.canvas"] = "the same", ["zoo.workloads"] = "the same", ["zoo.clips"] = "the same", ["zoo.crops"] = "the same",
  ["zoo.yardstick"] = "the same: a call loads models",
  ["zoo.rater.train"] = "trains a network, which takes seconds", ["zoo.geometry.kept"] = "the same",
  ["models.layers"] = layers, ["models.rotary"] = layers, ["models.classifier"] = layers,
  ["diffusion.solver.frame"] = sampling, ["diffusion.guidance.rescale"] = sampling,
  ["diffusion.prediction.new"] = sampling, ["diffusion.condition.keys"] = sampling,
  ["diffusion.condition.like"] = sampling, ["diffusion.condition.check_batch"] = checks,
  ["diffusion.condition.check"] = checks, ["diffusion.guidance.read"] = checks,
  ["diffusion.prediction.check"] = checks, ["data.expect_dataset"] = checks,
  ["datasets.kjv_names.corpora"] = "labels the whole Bible, which takes a second",
  ["local.tasks.things"] = "draws thousands of pictures, which takes seconds",
  ["estimate.pipeline.machine"] = "measures the machine, which takes seconds",
  ["core"] = "the table that ty itself is made of",
  ["tokenizer_core"] = "called by ty.tokenizer, which is walked",
  ["http_core"] = "called by `tycho watch` and `tycho serve`, which have tests of their own",
  ["program"] = "called by ty.compile and the optimizers, which are walked",
  ["Tensor"] = "the metatable of tensors; its methods are walked with the ops",
  ["nn.Module"] = "the class of all modules: its methods are walked on objects",
}

local items = {}

local function is_class(value)
  local meta = type(value) == "table" and getmetatable(value)
  return type(meta) == "table" and meta.__call ~= nil
end

local function add(name, fn, make) items[#items + 1] = { name = name, fn = fn, make = make, options = {} } end

local seen = {}

local function sorted(t)
  local keys = {}
  for key in pairs(t) do if type(key) == "string" then keys[#keys + 1] = key end end
  local meta = getmetatable(t)
  for _, key in ipairs(type(meta) == "table" and meta.__names or {}) do
    if rawget(t, key) == nil then keys[#keys + 1] = key end
  end
  table.sort(keys)
  return keys
end

local function visit(prefix, t)
  if seen[t] then return end
  seen[t] = true
  local methods = rawget(t, "__index") == t -- a class: all but its constructor is walked on objects
  for _, key in ipairs(sorted(t)) do
    local name, value = prefix .. key, t[key]
    if not skipped[name] and key:sub(1, 1) ~= "_" and (not methods or key == "new") then
      if type(value) == "function" or is_class(value) then add(name, value)
      elseif type(value) == "table" then visit(name .. ".", value) end
    end
  end
end

local ops = {}
for _, op in ipairs(ty.core.ops()) do ops[op.name] = true end

visit("", ty)
for _, family in ipairs(objects.families) do visit(family .. ".", require("tycho." .. family)) end

-- Methods of objects: what their classes have under a name.
for _, object in ipairs(objects.list) do
  local done, class = {}, getmetatable(object.make())
  if class.__call then add(object.name .. "()", function(self, ...) return self(...) end, object.make) end
  local methods = class.__index
  while type(methods) == "table" do
    for _, key in ipairs(sorted(methods)) do
      local name = object.name .. ":" .. key
      if type(methods[key]) == "function" and key:sub(1, 1) ~= "_" and not done[key] and not objects.skipped[key] then
        add(name, methods[key], object.make)
      end
      done[key] = true
    end
    local meta = getmetatable(methods)
    methods = type(meta) == "table" and meta.__index
  end
end

for _, key in ipairs(sorted(ty.core.Tensor.methods)) do
  if not ops[key] then add("Tensor:" .. key, ty.core.Tensor.methods[key], function() return ty.ones(2, 2) end) end
end

-- Words that may stand at the beginning of an error: the names of functions and of what they are in.
local known = {}
for _, item in ipairs(items) do
  for word in item.name:gmatch "[%w_]+" do known[word] = true end
end
for name in pairs(ops) do known[name] = true end
for name in pairs(ty) do known[name] = true end
for name in pairs(ty.core.Tensor.methods) do known[name] = true end
for _, name in ipairs(objects.words) do known[name] = true end

-- The op tests walk the ops (tests/ops/harness/arguments.lua); one in eight stays, for the border's sake.
do
  local kept, count = {}, 0
  for _, item in ipairs(items) do
    local op = ops[item.name:gsub("_$", "")]
    count = count + (op and 1 or 0)
    if (not op or count % 8 == 0) and (not pattern or item.name:find(pattern)) then kept[#kept + 1] = item end
  end
  items = kept
end

-- ---- arguments ----

local state = seed
local function random(n) -- 0 to n - 1
  state = state * 6364136223846793005 + 1442695040888963407
  return (state >> 33) % n
end

local function released()
  local t = ty.ones(2)
  t:free()
  return t
end

local plain = {
  function() return nil end, function() return -1 end, function() return 0 end, function() return 1 end,
  function() return 2 end, function() return 2.5 end, function() return 0 / 0 end, function() return math.huge end,
  function() return 1 << 40 end, function() return math.mininteger end, function() return true end,
  function() return false end, function() return "" end, function() return "cpu" end, function() return "f32" end,
  function() return "x" end, function() return "none" end, function() return "/dev/null/x" end,
  function() return "\xff\0\xfe" end, function() return ("long "):rep(50) end, function() return "some/where.png" end,
  function() return function() return 1 end end, function() return function(...) return ... end end,
  function() return os.clock end, function() return coroutine.create(function() end) end,
  function() return ty.tensor(1.5) end, function() return ty.ones(2, 3) end, function() return ty.ones(2, 2) end,
  function() return ty.empty(0) end, function() return ty.tensor { 0, 1 } end,
  function() return ty.ones(1, 2, 3, 4) end,
  function() return ty.ones(2):requires_grad_() end, function() return ty.zeros(2, 2, { dtype = "f16" }) end,
  released, function() return ty.empty(2, 2, { device = "meta" }) end,
  function() return ty.nn.Linear(2, 2) end, function() return ty.nn.module "Own" end,
  function() return setmetatable({}, { __name = "own" }) end,
}

local value

local function some_table(item, depth)
  local kind = random(9)
  if kind == 0 or depth > 2 then return {} end
  local t = {}
  if kind < 4 then -- a list
    for i = 1, 1 + random(3) do t[i] = value(item, depth + 1) end
    return t
  end
  local names = #item.options > 0 and random(8) > 0 and item.options or { "a", "lr", "size", "params", 3 }
  for _ = 1, 1 + random(3) do t[names[1 + random(#names)]] = value(item, depth + 1)
  end
  return t
end

function value(item, depth)
  if random(4) == 0 then return some_table(item, depth) end
  if objects.good[1] and random(6) == 0 then return objects.good[1 + random(#objects.good)]() end
  return plain[1 + random(#plain)]()
end

local function show(v, depth)
  if type(v) == "string" then return #v > 40 and "<long text>" or '"' .. v:gsub("[^ -~]", "?") .. '"' end
  if ty.is_tensor(v) then return pcall(v.numel, v) and "tensor[" .. table.concat(v.shape, ",") .. "]" or "released" end
  if type(v) == "table" and not getmetatable(v) and depth < 2 then
    local parts = {}
    for key, x in pairs(v) do parts[#parts + 1] = tostring(key) .. "=" .. show(x, depth + 1) end
    return "{" .. table.concat(parts, ", ") .. "}"
  end
  if type(v) == "table" then return "<" .. tostring((getmetatable(v) or {}).__name or "table") .. ">" end
  return tostring(v)
end

-- ---- what an error must be ----

local raw = { "attempt to", "bad argument #", "'for' ", "stack overflow", "no integer representation", "runs on",
  "invalid value %(", "invalid order function", "too large", "not enough memory", "overflow", "too many results",
  "invalid conversion", "invalid option", "table index is", "string slice" }

local function problem_of(message, given)
  if type(message) ~= "string" then return "the error is no text" end
  local text = message
  repeat
    local rest = text:match "^[^\n:]+:%d+: (.*)$"
    text = rest or text
  until not rest
  for _, words in ipairs(raw) do
    if text:find(words) then return "an error of Lua itself" end
  end
  for i = 1, given.n do
    local path = given[i]
    if type(path) == "string" and path ~= "" and text:find(path:sub(1, 40), 1, true) then return nil end
    if path == "" and text:sub(1, 2) == ": " then return nil end -- by the name that the caller gave for errors
  end
  if text:find '^cannot [%a ]+ "' then return nil end -- of a file, which it names
  if text:find '^"[^"]*": line %d+' then return nil end -- of contents, by the name that the caller gave them
  if text:find "^a tensor on the meta device" then return nil end -- which no function can write
  local name = text:match '^"?([%a_][%w_%.:]*)' or "" -- contents are named in quotes: "JSON": line 1 ...
  for word in name:gmatch "[%w_]+" do
    if known[word] then return nil end
  end
  return "no function is named"
end

-- ---- the walk ----

local trace = assert(io.open("last_call", "w"))
trace:setvbuf "no"
local findings, total = {}, 0

local slowest = {}

-- Arguments for a call: wrong ones, or right ones of which one is replaced or left out.
local function arguments_for(item)
  local right = objects.calls[item.name]
  if right and random(3) > 0 then
    local given = table.pack(right())
    local at = 1 + random(given.n + 1)
    if random(4) == 0 then given.n = math.min(given.n, at - 1)
    else
      given[at] = value(item, 0)
      given.n = math.max(given.n, at)
    end
    return given
  end
  local given = { n = random(5) }
  for i = 1, given.n do given[i] = value(item, 0) end
  return given
end

local function call(item)
  local given = arguments_for(item)
  local self = item.make and item.make()
  trace:seek "set"
  trace:write(item.name, " call ", total, (" "):rep(40), "\n")
  local start = os.clock()
  debug.sethook(function() error("runs on", 2) end, "", 20000000)
  local result
  if item.make then
    if item.name:find ":init$" then -- without memory: the defaults of some networks are large
      result = table.pack(pcall(ty.nn.with_defaults, { device = "meta" }, item.fn, self,
        table.unpack(given, 1, given.n)))
    else
      result = table.pack(pcall(item.fn, self, table.unpack(given, 1, given.n)))
    end
  elseif is_class(item.fn) then
    result = table.pack(pcall(ty.nn.with_defaults, { device = "meta" }, item.fn, table.unpack(given, 1, given.n)))
  else result = table.pack(pcall(item.fn, table.unpack(given, 1, given.n))) end
  debug.sethook()
  slowest[item.name] = (slowest[item.name] or 0) + os.clock() - start
  if type(result[2]) == "userdata" and not ty.is_tensor(result[2]) then -- a scope, a thread
    local close = (debug.getmetatable(result[2]) or {}).__close
    if close then pcall(close, result[2]) end
  end
  ty.set_grad_enabled(true)
  if result[1] then return end
  local message = result[2]
  local names = type(message) == "string" and message:match "there are: ([%w_, ]+)"
  if names then
    item.options = {}
    for name in names:gmatch "[%w_]+" do table.insert(item.options, name) end
  end
  local problem = problem_of(message, given)
  if not problem then return end
  local key = item.name .. tostring(message):gsub("%d+", "N")
  if findings[key] then return end
  local parts = {}
  for i = 1, given.n do parts[i] = show(given[i], 0) end
  findings[key] = true
  findings[#findings + 1] = ("%s(%s): %s: %s"):format(item.name, table.concat(parts, ", "), problem, tostring(message))
end

ty.set_threads(1)
ty.memory.set_budget("cpu", 256 << 20)
local began = os.clock()
while total < calls do
  total = total + 1
  call(items[(total - 1) % #items + 1])
  if total % 1000 == 0 then collectgarbage() end
end
for _, text in ipairs(findings) do print((text:gsub("[^%g \n]", "?"))) end
if pattern or os.getenv "SLOW" then
  local names = {}
  for name in pairs(slowest) do names[#names + 1] = name end
  table.sort(names, function(a, b) return slowest[a] > slowest[b] end)
  for i = 1, math.min(12, #names) do print(("%8.3f s %s"):format(slowest[names[i]], names[i])) end
end
print(("walked %d functions, %d calls in %.1f s of CPU, %d findings"):format(#items, total, os.clock() - began,
  #findings))
os.exit(#findings == 0 and 0 or 1, false)
