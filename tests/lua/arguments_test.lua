-- What users see of wrong arguments: the texts of the errors, where they point, and a walk over every public function.
--
--   tycho arguments_test.lua [--calls N] [--seed S] [--only PATTERN]      100,000 calls take about ten seconds
local here = arg and arg[0]:match ".*/" or "tests/lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local arguments = require "tycho.arguments"

local options = { calls = 6000, seed = 1, only = "" }
for i = 1, #arg, 2 do options[arg[i]:match "^%-%-(.+)$" or ""] = arg[i + 1] end

check.test("kinds: what is said is what is tested", function()
  local cases = {
    { "a number", { 1, 1.5, 0 / 0, math.huge }, { "1", true, {} } },
    { "a finite number", { 1, -1.5 }, { 0 / 0, math.huge, -math.huge } },
    { "a number >= 0", { 0, 1, math.huge }, { -1, 0 / 0, "1" } },
    { "a number in [0, 1)", { 0, 0.5 }, { 1, -0.1, 0 / 0 } },
    { "a number in (0, 1]", { 1, 0.5 }, { 0, 1.1 } },
    { "an integer", { 1, 2.0, -3 }, { 1.5, 0 / 0, "1" } },
    { "an integer >= 1", { 1, 5 }, { 0, -1, 1.5 } },
    { "an integer or nil", { 3 }, { "x", 1.5 } },
    { "a tensor", { ty.ones(1) }, { {}, 1, io.stdout } },
    { "a module", { ty.nn.ReLU() }, { ty.nn.ReLU, {}, ty.nn } },
    { "a function", { print, ty.nn.ReLU() }, { {}, "print" } },
    { "a string", { "", "x" }, { 1, {} } },
    { "a boolean", { true, false }, { 1, "true" } },
    { "a list of integers >= 0", { {}, { 0, 1 } }, { { -1 }, { 1.5 }, 1, ty.nn.ReLU() } },
    { "a pair of numbers", { { 1, 2 } }, { { 1 }, { 1, 2, 3 }, { 1, "2" } } },
    { '"mean" or "sum"', { "mean", "sum" }, { "none", 1, true } },
    { "8 or 32", { 8, 32 }, { 16, "8" } },
  }
  for _, case in ipairs(cases) do
    local kind, right, wrong = case[1], case[2], case[3]
    for _, value in ipairs(right) do
      local back = arguments.expect("f", "x", value, kind)
      check.equal(rawequal(back, value) or back ~= back and value ~= value, true, kind)
    end
    for _, value in ipairs(wrong) do
      check.fails(function() arguments.expect("f", "x", value, kind) end, "f: x: expected " .. kind .. ", got ", kind)
    end
  end
  check.equal(arguments.expect("f", "x", nil, "a string or nil"), nil)
  check.fails(function() arguments.expect("f", "x", { 1, "two" }, "a list of integers") end, 'got "two" as element 2')
  check.fails(function() arguments.expect("f", "x", 1, "a colour") end, "no such kind: a colour")
end)

check.test("what came is described", function()
  local released = ty.ones(1)
  released:free()
  local cases = { { nil, "nil" }, { 0 / 0, "nan" }, { -1, "-1" }, { "a\n", '"a\\x0a"' }, { {}, "an empty table" },
    { { 1 }, "a table" }, { ty.ones(2, 3), "a tensor [2, 3]" }, { released, "a released tensor" },
    { ty.nn.ReLU(), "a module ReLU" }, { ty.nn.ReLU, "the class ReLU, which is called to make a module" },
    { print, "a function" }, { ("x"):rep(50), '"' .. ("x"):rep(40) .. '..."' } }
  for i = 1, #cases do check.equal(arguments.describe(cases[i][1]), cases[i][2]) end
end)

check.test("options: names, kinds of defaults, kinds that are given", function()
  local function read(given) return arguments.read("f", given, { a = 1, b = "x", c = false, d = arguments.none },
    { a = "an integer >= 1" }) end
  check.equal(read(), { a = 1, b = "x", c = false })
  check.equal(read { d = 2 }, { a = 1, b = "x", c = false, d = 2 })
  check.fails(function() read(5) end, "f: options: expected a table, got 5")
  check.fails(function() read(ty.nn.ReLU()) end, "f: options: expected a table, got a module ReLU")
  check.fails(function() read { e = 1 } end, "f: no option 'e'; there are: a, b, c, d")
  check.fails(function() read { a = 0 } end, "f: a: expected an integer >= 1, got 0")
  check.fails(function() read { b = 1 } end, "f: b: expected a string, got 1")
  check.fails(function() read { c = 1 } end, "f: c: expected a boolean, got 1")
end)

-- The line that the function is called at, and what its errors must begin with.
local function blamed(fn)
  local line = debug.getinfo(fn, "S").linedefined
  local file = debug.getinfo(1, "S").short_src
  local ok, message = pcall(fn)
  check.equal(ok, false)
  check.equal(message:match "^(.-:%d+): ", ("%s:%d"):format(file, line), message)
end

check.test("errors point at the caller's line, however deep the function that found them", function()
  blamed(function() ty.nn.LayerNorm() end)
  blamed(function() ty.nn.Conv2d(3, 4, 3, { padding = "same", stride = 2 }) end)
  blamed(function() ty.nn.TransformerEncoderLayer(5, 2) end) -- MultiheadAttention's mistake, made by the layer
  blamed(function() ty.optim.AdamW({ ty.ones(1) }, { lr = -1 }) end)
  blamed(function() ty.optim.cosine { steps = 0 } end)
  blamed(function() ty.nn.init.normal() end)
  blamed(function() ty.nn.Sequential(3) end)
  blamed(function() ty.nn.Linear(2, 2):load_state_dict {} end)
  blamed(function() ty.compile(3) end)
  blamed(function() ty.split(ty.ones(3), 0) end)
  blamed(function() require("tycho.vision").predict(3) end) -- in modules/
  blamed(function() ty.nn.GELU "tnah" end)
  local callback = coroutine.wrap(function() blamed(function() ty.nn.Linear(0, 1) end) end)
  callback()
end)

check.test("a traceback shows the way from the caller to the check", function()
  local function mistake() ty.nn.Linear(0, 1) end
  local trace = select(2, xpcall(mistake, debug.traceback))
  check.ok(trace:find("Linear: inputs: expected an integer >= 1, got 0", 1, true), trace)
  check.ok(trace:find("stack traceback:.*layers%.lua.*arguments_test%.lua"), trace)
end)

check.test("what said \"attempt to index\" before", function()
  local nn = ty.nn
  check.fails(function() nn.LayerNorm() end, "LayerNorm: shape: expected an integer >= 1 or a list of integers >= 1")
  check.fails(function() nn.normalize() end, "normalize: x: expected a tensor, got nil")
  check.fails(function() nn.accuracy() end, "accuracy: logits: expected a tensor, got nil")
  check.fails(function() nn.accuracy(ty.ones(2, 3), ty.ones(2, 3)) end, "accuracy: labels: expected one dimension less")
  for _, name in ipairs { "zeros", "ones", "constant", "uniform", "normal", "trunc_normal", "kaiming_uniform",
    "kaiming_normal", "xavier_uniform", "xavier_normal", "eye", "fans" } do
    check.fails(function() nn.init[name]() end, "init." .. name .. ": t: expected a tensor, got nil")
  end
  check.fails(function() nn.init.gain "rleu" end, 'init.gain: name: expected "linear" or "conv"')
  check.fails(function() nn.MultiheadAttention(4, 2)() end, "MultiheadAttention: q: expected a tensor of 3 dimensions")
  check.fails(function() nn.BatchNorm2d(4)() end, "BatchNorm2d: x: expected a tensor [n, c, h, w], got nil")
  check.fails(function() nn.LSTM(4, 4)() end, "LSTM: x: expected a tensor [batch, time, 4], got nil")
  check.fails(function() ty.optim.AdamW(nn.Linear) end, "got the class Linear, which is called to make a module")
end)

check.test("names that parts and modules do not have", function()
  check.fails(function() return ty.nn.Linnear(2, 2) end, "ty.nn has no 'Linnear'; did you mean Linear?")
  check.fails(function() return ty.optim.Adm end, "ty.optim has no 'Adm'; did you mean Adam?")
  check.fails(function() return ty.data.Dataloader end, "ty.data has no 'Dataloader'; did you mean DataLoader?")
  for name in ("curation datasets diffusion dist distill distributions estimate hub llm models offload peft prune "
    .. "quant serve tiny vision vlm zoo"):gmatch "%S+" do
    local module = require("tycho." .. name)
    check.fails(function() return module.nothing_of_this end, ("tycho.%s has no 'nothing_of_this'"):format(name))
    check.equal(module._private, nil)
  end
end)

check.test("what long walks found", function()
  local diffusion, peft = require "tycho.diffusion", require "tycho.peft"
  local flow = diffusion.FlowMap(require("tycho.models").TimeMLP { width = 4, depth = 1, waves = 4 },
    { width = 4, waves = 4 })
  for _, x in ipairs { ty.tensor(1.5), ty.empty(0), ty.empty(0, 2) } do
    check.fails(function() flow:loss(x) end, "FlowMap:loss: x0: expected a tensor [n, ...] with elements, got a tensor")
  end
  local set = { captions = { "a fox" }, picture = function() return ty.ones(3, 4, 4) end }
  check.fails(function() diffusion.finetune.latents({ prompts = {} }, set) end,
    "finetune.latents: painter: expected a TextToImage, got a table")
  check.fails(function() peft.audit.mcnemar(1 << 40, 0) end, "peft.audit.mcnemar: lost: expected an integer in [0, ")
  check.fails(function() peft.account(function() return 1 end, {}) end,
    "peft.account: class: expected a function that makes a module, got one that makes 1")
  check.fails(function() require("tycho.llm").spans.tags({}, 1 << 40) end, "llm.spans.tags: count: expected an integer")
  local hadamard = require("tycho.quant").hadamard
  check.fails(function() hadamard.rotate(ty.ones(2), ty.tensor(1.5)) end,
    "quant.hadamard.rotate: matrix: expected one of matrix() or random(), got a tensor []")
  check.fails(function() hadamard.rotate(ty.tensor(1.5), hadamard.matrix(2)) end, "quant.hadamard.rotate: x: expected")
  check.fails(function() require("tycho.datasets").arm.chunks { horizon = 1 << 40 } end,
    "horizon: expected an integer in")
  local sgd = ty.optim.SGD { ty.ones(2):requires_grad_() }
  check.fails(function() ty.optim.Scheduler(sgd, setmetatable({}, { __name = "own" })) end,
    "Scheduler: schedule: expected one for each of 1 groups, got 0")
  blamed(function() ty.nn.Linear(2, 2):save(scratch.file "x.safetensors", { key = "\xff" }) end)
  check.fails(function() ty.nn.Linear(2, 2):save(scratch.file "x.safetensors", { key = "\xff" }) end,
    "Module:save: safetensors: the text of the metadata")
  check.fails(function() ty.nn.ModuleDict { ["\xff"] = ty.nn.Linear(2, 2) }:save(scratch.file "x.safetensors") end,
    "Module:save: safetensors: the name")
  check.fails(function() ty.io.json_encode { ["\xff"] = 1 } end, "json_encode: the value at")
  check.fails(function() require("tycho.curation").pairs.noise(ty.ones(2, 2)) end,
    "curation.pairs.noise: wrong: expected [n], got a tensor [2, 2]")
end)

check.test("the walk: no error of Lua itself, and every one names a function", function()
  local where = io.popen("pwd", "r")
  local folder = where:read "l"
  where:close()
  local function absolute(path) return path:sub(1, 1) == "/" and path or folder .. "/" .. path end
  local i = 0
  while arg[i - 1] do i = i - 1 end
  local program = arg[i]:find "/" and absolute(arg[i]) or arg[i]
  local function quoted(text) return "'" .. tostring(text):gsub("'", "'\\''") .. "'" end
  local function paths(text) return (text:gsub("[^;]+", function(path) return absolute(path) end)) end
  local output = scratch.file "output"
  -- In a folder of its own: some of the functions write files of the names that they are given.
  local command = ("cd %s && LUA_PATH=%s LUA_CPATH=%s %s %s %d %d %s >%s 2>&1"):format(quoted(scratch.folder),
    quoted(paths(package.path)), quoted(paths(package.cpath)), quoted(program),
    quoted(absolute(here) .. "arguments_walk.lua"), options.calls, options.seed, quoted(options.only), quoted(output))
  local passed = os.execute(command)
  local text = scratch.slurp(output)
  local summary = text:match "walked %d+ functions[^\n]*"
  if summary then print(summary) end
  local last = io.open(scratch.file "last_call")
  check.equal(summary ~= nil, true, "the walk ended at " .. (last and last:read "l" or "its start") .. ": " .. text)
  check.equal(passed, true, text)
  if last then last:close() end
  local functions, calls = (summary or ""):match "walked (%d+) functions, (%d+) calls"
  check.equal(tonumber(calls), tonumber(options.calls))
  check.ok(options.only ~= "" or (tonumber(functions) or 0) > 1000, "functions walked: " .. tostring(functions))
end)

scratch.clean()
check.finish()
