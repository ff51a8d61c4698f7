-- Recipes: arguments, help, the closing table; and every recipe of the project with --quick.
local here = arg and arg[0]:match ".*/" or "tests/lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local recipe = ty.recipe

local root = os.tmpname()
os.remove(root)
ty.io.mkdir(root)

local function remove_all(path)
  local info = ty.io.stat(path)
  if not info then return end
  if info.kind == "directory" then
    for _, name in ipairs(ty.io.listdir(path)) do remove_all(path .. "/" .. name) end
  end
  ty.io.remove(path)
end

-- A recipe's file, whose head says what it is.
ty.io.mkdir(root .. "/recipes/family")
local file = root .. "/recipes/family/example.lua"
ty.io.write_atomic(file, [[
-- A test
-- claim: it works, in a sentence
--   of two lines
-- system: none
-- paper: nobody 2024
-- time: no time
--
-- What was learnt.
--   claim: set in, so no field.
return 1
]])

local spec = {
  file = file,
  args = {
    { "steps", 100, "how many", quick = 3 }, { "rate", 0.5, "how fast" },
    { "name", "x", "called", choices = { "x", "y" } },
    { "flag", false, "a switch" }, { "warm", true, "another" }, { "long_name", 1, "dashes" },
    { "rates", { 1e-3, 0.5 }, "tried", quick = { 0.5 }, least = 0 }, { "depths", { 2, 4 }, "layers" },
    { "range", { 0.2, 10 }, "from, to", length = 2 },
    { "tasks", { "open", "push" }, "learnt", choices = { "open", "push", "reach" } },
    { "more", {}, "texts", quick = {} },
  },
}

local function declare(...) return recipe.declare(spec, { "--out", root, ... }) end

check.test("arguments", function()
  local r = declare()
  check.equal({ r.args.steps, r.args.rate, r.args.name, r.args.flag, r.args.warm }, { 100, 0.5, "x", false, true })
  check.equal({ r.seed, r.device, r.quick, r.out }, { 0, "cpu", false, root })
  r = declare("--steps", "7", "--rate=2", "--name", "y", "--flag", "--no-warm", "--long-name", "4", "--seed", "9",
    "--quick")
  check.equal({ r.args.steps, r.args.rate, r.args.name, r.args.flag, r.args.warm, r.args.long_name },
    { 7, 2.0, "y", true, false, 4 })
  check.equal(math.type(r.args.rate), "float")
  check.equal({ r.seed, r.quick }, { 9, true })
  check.equal(declare("--quick").args.steps, 3)
end)

check.test("arguments that are lists", function()
  local r = declare()
  check.equal({ r.args.rates, r.args.depths, r.args.tasks, r.args.more },
    { { 1e-3, 0.5 }, { 2, 4 }, { "open", "push" }, {} })
  r.args.rates[1] = 7
  check.equal(declare().args.rates, { 1e-3, 0.5 }, "each run has its own")
  r = declare("--rates", "1,2e-2", "--depths=3", "--tasks", "reach", "--more", "a b,c")
  check.equal({ r.args.rates, r.args.depths, r.args.tasks, r.args.more }, { { 1.0, 0.02 }, { 3 }, { "reach" },
    { "a b", "c" } })
  check.equal({ math.type(r.args.rates[1]), math.type(r.args.depths[1]) }, { "float", "integer" })
  check.equal(declare("--quick").args.rates, { 0.5 })
  local arguments = require "tycho.recipe.arguments"
  check.equal(arguments.changed(spec.args, arguments.values(spec.args, { rates = { 1e-3, 0.5 } })), {})
  check.equal(arguments.changed(spec.args, arguments.values(spec.args, { rates = { 2e-3 }, tasks = { "open" } })),
    { rates = "0.002", tasks = "open" })
  check.equal({ r:tries { 1, 2 }, declare("--quick"):tries { 1, 2 } }, { { 1, 2 }, { 1 } })
end)

check.test("the choice among tries is made once, and kept in the metrics", function()
  local r, asked = declare(), {}
  local function try(entry, known)
    asked[#asked + 1] = { entry, known }
    return "made with " .. entry, (entry - 2) ^ 2
  end
  check.equal({ r:choose("way", { 4, 2, 1 }, try) }, { "made with 2", 0.0 })
  check.equal({ r:choose("way", { 4, 2, 1 }, try) }, { "made with 2", 0.0 }, "by another seed")
  check.equal(asked, { { 4, false }, { 2, false }, { 1, false }, { 2, true } })
  check.equal({ r:choose("most", { 4, 2, 1 }, try, function(scores) return scores[1] > scores[2] and 1 or 2 end) },
    { "made with 4", 4.0 })
  check.equal(r.metrics.chosen, { way = 2, most = 4 })
  local quick = declare("--quick")
  check.equal({ quick:choose("way", { 4, 2, 1 }, try) }, { "made with 4", 4.0 }, "the first alone")
  check.fails(function() r:choose("none", {}, try) end, "Recipe:choose: tries: expected at least one, got none")
  check.fails(function() r:choose("none", { 1 }, 3) end, "Recipe:choose: try: expected a function, got 3")
end)

check.test("what runs, while it runs", function()
  local r = declare("--steps", "7")
  local about = ty.io.load_json(r:path "recipe.json")
  check.equal({ about.recipe, about.args.steps }, { r.name, 7 })
  check.ok(#about.title > 0)
end)

check.test("results that are infinite or undefined are text in metrics.json", function()
  local r = declare()
  r.metrics.smallest = 0 / 0
  r:finish { { claim = "a", measured = math.huge, bar = 1 }, { claim = "b", measured = 2, bar = 1 } }
  local saved = ty.io.load_json(r:path "metrics.json")
  check.equal(saved.table[1].measured, "inf")
  check.equal(saved.table[2].measured, 2)
  check.equal(type(saved.metrics.smallest), "string")
end)

check.test("the plan of a training step: two steps are taken, then the run stops", function()
  local script = root .. "/recipes/family/trains.lua"
  ty.io.write_atomic(script, [[
-- Trains a layer
-- claim: it learns
-- system: none
-- paper: nobody 2024
-- time: no time
local ty = require "tycho"
local r = ty.recipe.declare { args = { { "way", "loss", "of stepping" } } }
local layer = ty.nn.Linear(256, 64)
local opt = r.args.way == "mezo" and ty.optim.MeZO(layer, { lr = 1e-3 }) or ty.optim.AdamW(layer, { lr = 1e-3 })
local x = ty.randn(32, 256)
local function loss() return layer(x):square():mean() end
local step = function() opt:step(loss()) end
if r.args.way == "mezo" then step = function() opt:step(loss) end end
if r.args.way == "compiled" then step = ty.compile(function() return opt:step(loss()) end) end
if r.args.way == "gradients" then step = function()
  loss():backward()
  opt:step()
  opt:zero_grad()
end end
if r.args.way == "profiled" then
  ty.profile(step) -- a step of its own, before and between
  opt:step(loss())
  ty.profile(step)
end
for i = 1, r.args.way == "nothing" and 0 or 10 do
  ty.scope(step)
  print("step " .. i)
end
os.exit(r:finish { { claim = "a", measured = 1, bar = 1 } })
]])
  local function run(words)
    local pipe <close> = assert(io.popen(("%s %s --out %s %s 2>&1; echo status $?"):format(arg[-1] or "tycho", script,
      root, words)))
    return pipe:read "a"
  end
  for _, way in ipairs { "loss", "gradients", "mezo" } do
    local text = run("--plan --way " .. way)
    check.ok(text:find "step 1\n" and not text:find "step 2\n", way .. " stops after two: " .. text)
    check.ok(text:find "status 0", text)
    check.ok(text:find "parameters +65%.79 kB", text) -- 4 * (256 * 64 + 64)
    check.ok(text:find(way == "mezo" and "moments +0%.00 kB" or "moments +131%.58 kB"), text)
    check.ok(text:find "GFLOP in %d+ kernels", text)
  end
  local flops = tonumber(run("--plan"):match "work +(%S+) +GFLOP")
  check.ok(flops >= 2 * 2 * 32 * 256 * 64 / 1e9 and flops < 0.004, "of the products both ways: " .. flops)
  check.ok(run("--plan --way compiled"):find "plan of a training step", "of a compiled step")
  local text = run "--plan --way profiled"
  check.ok(text:find "plan of a training step" and text:find "step 1\n" and not text:find "step 3\n", text)
  check.ok(run("--plan --way nothing"):find "nothing is trained by an optimizer", "of a run without steps")
  check.ok(run("--plan --record"):find "%-%-plan: a run that stops after two steps is no record", "no record")
end)

check.test("the footprint of a run", function()
  local r = declare("--footprint", "--electricity", "france", "--quick")
  check.equal(r.meter ~= nil, true)
  r:finish {}
  local kept = ty.io.load_json(r:path "metrics.json").footprint
  check.ok(kept.joules > 0 and kept.gwp > 0 and kept.lu > 0)
  r = declare "--quick"
  r:finish {}
  check.equal(ty.io.load_json(r:path "metrics.json").footprint, nil)
end)

check.test("mistakes", function()
  local function problem(...)
    local _, text = recipe.parse(spec.args, { ... })
    return text
  end
  check.equal(problem("--steps", "2.5"), "--steps: expected an integer, got '2.5'")
  check.equal(problem("--rate", "fast"), "--rate: expected a number, got 'fast'")
  check.equal(problem("--name", "z"), "--name: expected one of x, y, got 'z'")
  check.equal(problem("--steps", "-1"), "--steps: expected at least 0, got -1")
  check.equal(problem("--rates", "1e-3,fast"), "--rates: expected a number, got 'fast'")
  check.equal(problem("--rates", "1,-1"), "--rates: expected at least 0, got -1")
  check.equal(problem("--range", "5"), "--range: expected 2 values with commas between, got '5'")
  check.equal(problem("--range", "1,2,3"), "--range: expected 2 values with commas between, got '1,2,3'")
  check.equal(declare("--range", "1,2").args.range, { 1.0, 2.0 })
  check.equal(declare("--range", "1,inf").args.range, { 1.0, math.huge })
  check.equal(problem("--steps", "inf"), "--steps: expected an integer, got 'inf'")
  check.equal(problem("--depths", "2.5"), "--depths: expected an integer, got '2.5'")
  check.equal(problem("--tasks", "open,jump"), "--tasks: expected one of open, push, reach, got 'jump'")
  check.equal(problem("--steps"), "--steps needs a value")
  check.equal(problem("--stepz", "1"), "unknown argument '--stepz'; --help lists them")
  check.equal(problem("--flag=1"), "--flag takes no value")
  check.equal(problem("--no-steps"), "unknown argument '--no-steps'; --help lists them")
  check.equal(problem("--help"), "help")
end)

check.test("help", function()
  local text = recipe.help_text(declare().head, spec.args)
  for _, part in ipairs { "A test", "claim:  it works, in a sentence of two lines\n", "--steps N",
    "(default 100, 3 with --quick)", "--rate X", "--no-warm", "--long-name N", "--rates X,X,..",
    "(default 0.001,0.5, 0.5 with --quick)", "--depths N,N,..", "--tasks TEXT,TEXT,.." } do
    check.equal(text:find(part, 1, true) ~= nil, true, part)
  end
end)

check.test("the closing table", function()
  local rows = {
    { claim = "good", measured = 0.97, bar = 0.95 }, { claim = "small", measured = 3, bar = 2, below = true },
    { claim = "told", measured = "yes", bar = "yes", pass = true },
    { claim = "elsewhere", measured = "not here", bar = 3, judged = false },
  }
  local r = declare()
  r.metrics.extra = { 1, 2 }
  check.equal(r:finish(rows), 0, "a failed bar is no failed program")
  local saved = ty.io.load_json(root .. "/metrics.json")
  check.equal({ saved.table[1].pass, saved.table[2].pass, saved.table[3].pass }, { true, false, true })
  check.equal({ saved.table[4].measured, saved.table[4].pass }, { "not here", nil })
  check.equal(saved.metrics.extra, { 1, 2 })
  check.equal(saved.args.steps, 100)
  check.equal(declare("--strict"):finish(rows), 1, "unless asked for")
  check.equal(declare("--strict", "--quick"):finish(rows), 0)
  check.fails(function() declare():finish { { claim = "?" } } end, "expected pass, or numbers")
end)

check.test("seeds", function()
  local function seeds(...) return recipe.declare({ file = file, seeds = 2 }, { "--out", root, ... }).seeds end
  check.equal(seeds(), { 0, 1 })
  check.equal(seeds("--seed", "5", "--seeds", "3"), { 5, 6, 7 })
  check.equal(seeds "--quick", { 0 })
  local r = recipe.declare({ file = file, base = true, seeds = 1 }, { "--out", root })
  check.equal({ r:base(), r:base "corpus", r:base(4) },
    { root .. "/base", root .. "/base/corpus", root .. "/base/seed4" })
  r = recipe.declare({ file = file, base = true }, { "--out", root, "--base", "shared" })
  check.equal(r:base(4), "shared/seed4")
end)

check.test("rows of several seeds", function()
  local r = declare()
  r:finish {
    { claim = "clear", values = { 1, 2, 3 }, bar = 1 }, { claim = "close", values = { 1, 2, 3 }, bar = 1.9 },
    { claim = "worst", measured = 1, values = { 1, 2, 3 }, baseline = { 2, 2, 2 }, bar = 1.5 },
    { claim = "one", values = { 4 }, bar = 4.1, below = true },
  }
  local saved = ty.io.load_json(root .. "/metrics.json").table
  check.equal({ saved[1].measured, saved[1].spread, saved[1].pass, saved[1].noise }, { 2.0, 1.0, true, nil })
  check.equal({ saved[2].pass, saved[2].noise }, { true, true }, "the bar is within the standard error, 0.58")
  check.equal({ saved[3].measured, saved[3].pass, saved[3].noise }, { 1, false, true })
  check.equal(saved[3].baseline, { 2, 2, 2 })
  check.equal({ saved[4].measured, saved[4].spread, saved[4].pass, saved[4].noise }, { 4.0, nil, true, nil })
end)

check.test("timing in turn", function()
  local r, calls = declare(), { a = 0, b = 0 }
  local order = {}
  local medians, times = r:time({
    a = function() calls.a, order[#order + 1] = calls.a + 1, "a" end,
    b = function() calls.b, order[#order + 1] = calls.b + 1, "b" end,
  }, { rounds = 4, warmup = 2, calls = { b = 2 } })
  check.equal(calls, { a = 6, b = 12 })
  check.equal(table.concat(order, "", 1, 6), "abbabb")
  check.equal({ #times.a, #times.b }, { 4, 4 })
  check.equal(medians.a, ty.stats.median(times.a))
end)

check.test("memory and distances", function()
  local r, measures = declare(), ty.recipe
  local kept = r:memory(function()
    local a = ty.zeros(1 << 20)
    return a + 1
  end)
  check.ok(kept >= 8 << 20 and kept < 9 << 20, kept)
  check.equal(r:clock(function() end, 3) >= 0, true)
  -- 4 MiB that stay and 8 in the steps that count; the step before them, with 32, does not.
  local calls = 0
  local peak, step = r:peak(function()
    local stays = ty.zeros(1 << 20)
    return function()
      calls = calls + 1
      local _ = ty.zeros((calls == 1 and 8 or 2) << 20)
      return stays
    end
  end, { warmup = 1, steps = 3 })
  check.equal({ peak, calls }, { 12 << 20, 4 })
  step()
  check.equal(calls, 5)
  check.fails(function() r:peak(3) end, "Recipe:peak: make: expected a function, got 3")
  check.fails(function() r:peak(function() end) end, "Recipe:peak: what make gives: expected a function, got nil")
  check.fails(function() r:peak(type, { steps = 0 }) end, "Recipe:peak: steps: expected an integer >= 1, got 0")
  ty.zeros(1 << 20):free()
  check.ok(ty.memory.stats().cached >= 4 << 20)
  r:clean()
  check.equal(ty.memory.stats().cached, 0)
  check.fails(function() r:clean(1) end, "Recipe:clean: device: expected a string or nil, got 1")
  check.equal(measures.distance(ty.tensor { 1, 4.5 }, ty.tensor { 2, -4, }), 8.5 / 4)
  local x, w = ty.tensor { 1.0, 2 }, ty.tensor { 3.0, 4 }
  local function off(by)
    return function(a, b) return a * b + a * by end
  end
  local result, gradients = measures.from_reference(off(1), off(0), { x, w }, ty.tensor { 1.0, 1 })
  check.equal({ result, gradients }, { 2 / 8, 1 / 4 }) -- of { 3, 8 } the second; of the gradient w for x, { 3, 4 }
  check.fails(function() measures.distance(x, 1) end, "recipe.distance: b: expected a tensor, got 1")
end)

check.test("how far apart numbers, tensors, modules and lists of them are", function()
  local apart = recipe.apart
  local one = ty.nn.Linear(3, 2)
  local other = one:clone()
  check.equal(apart(one, other), 0.0)
  ty.no_grad(function() other.bias:add_(ty.tensor { 0, 0.5 }) end)
  check.close(apart(one, other), 0.5, 1e-7)
  check.equal({ apart(3, 5), apart({ 1, 2, 4 }, { 1, 2.5, 4 }), apart(ty.tensor { 1.0, 2 }, ty.tensor { 1.0, 5 }) },
    { 2, 0.5, 3.0 })
  check.equal(apart({ a = { ty.ones(2) }, b = 1 }, { a = { ty.zeros(2) }, b = 1 }), 1.0)
  local none = apart({ 0 / 0, 1 }, { 1, 1 })
  check.ok(none ~= none, "no number")
  check.fails(function() apart({ 1 }, { 1, 2 }) end, "recipe.apart: a: expected what b has, got nothing under 2")
  check.fails(function() apart({ 1, 2 }, { 1 }) end, "recipe.apart: b: expected what a has, got nothing under 2")
  check.fails(function() apart(ty.ones(2), ty.ones(3)) end, "recipe.apart: b: expected a tensor [2], as a is")
  check.fails(function() apart(1, "x") end, "recipe.apart: expected two numbers, tensors, modules or lists")
end)

check.test("a watch of memory: beyond what there was, in parts", function()
  local r = declare()
  local begin, most = r:watch()
  local held = ty.zeros(1 << 20)
  ty.scope(function() ty.zeros(4 << 20):sum():item() end)
  check.ok(most() >= 20 << 20, tostring(most()))
  begin()
  ty.scope(function() ty.zeros(1 << 20):sum():item() end)
  check.ok(most() >= 8 << 20 and most() < 20 << 20, tostring(most()))
  check.equal(held:numel(), 1 << 20)
end)

check.test("statistics", function()
  local stats = ty.stats
  check.equal({ stats.median { 3, 1, 2 }, stats.median { 4, 1, 3, 2 }, stats.median { 7 } }, { 2, 2.5, 7 })
  check.equal({ stats.mean { 1, 2, 6 }, stats.spread { 2, 4 }, stats.spread { 5 } }, { 3.0, math.sqrt(2), 0.0 })
  check.equal(stats.spread { 0.998, 0.998, 0.998 }, 0.0, "equal numbers have none at all")
  check.close(stats.slope { { 0, 1 }, { 1, 3 }, { 2, 5 } }, 2, 1e-12)
  check.close(stats.correlation({ 1, 2, 3 }, { 2, 4, 6 }), 1, 1e-12)
  check.close(stats.correlation({ 1, 2, 3, 4 }, { 4, 2, 3, 1 }), -0.8, 1e-12)
  check.fails(function() stats.correlation({ 1, 2 }, { 1, 2, 3 }) end, "lists of one length, got 2 and 3")
  check.close(stats.slope({ { 1, 5 }, { 2, 20 }, { 4, 80 } }, true), 2, 1e-12)
  check.equal({ stats.differences({ 3, 1 }, { 1, 2 }), stats.ratios({ 3, 1 }, { 2, 4 }) }, { { 2, -1 }, { 1.5, 0.25 } })
  check.fails(function() stats.ratios({ 1 }, { 1, 2 }) end, "stats.ratios: expected lists of one length, got 1 and 2")
  check.equal(stats.ranks { 30, 10, 20, 10 }, { 4.0, 1.5, 3.0, 1.5 })
  check.close(stats.rank_correlation({ 1, 5, 2, 9 }, { 1, 100, 3, 1000 }), 1, 1e-12)
  check.equal(stats.column({ { f1 = 2 }, { f1 = 3 } }, "f1"), { 2, 3 })
  check.fails(function() stats.column({ { f1 = 2 }, {} }, "f1") end, 'all tables have, got "f1", which number 2 lacks')
  check.equal({ stats.least { 3, 1, 2, 1 }, stats.least { 0 / 0, 5, 4 }, stats.least { 0 / 0 } }, { 2, 3, 1 })
  check.equal({ stats.largest_keeping({ 5, 3, 4 }, { 0.9, 0.95, 0.99 }, 0.95),
    stats.largest_keeping({ 5, 3, 4 }, { 0.9, 0.95, 0.99 }, 0.5),
    stats.largest_keeping({ 5, 3, 4 }, { 0.2, 0.4, 0.3 }, 0.95), stats.largest_keeping({ 7, 7 }, { 1, 1 }, 1),
    stats.largest_keeping({ 5, 3 }, { 0 / 0, 0.1 }, 0.95) }, { 3, 1, 2, 1, 2 })
  check.fails(function() stats.largest_keeping({ 1 }, { 1, 2 }, 0) end,
    "stats.largest_keeping: kept: expected as many as values, 1, got 2")
  check.close({ stats.rms { 3, 4 }, stats.rms({ 3, 5 }, { 0, 1 }), stats.rms({ 3, 5 }, 4) },
    { math.sqrt(12.5), math.sqrt(12.5), 1 }, 1e-12)
  check.fails(function() stats.rms({ 1 }, { 1, 2 }) end, "stats.rms: expected lists of one length, got 1 and 2")
  check.equal({ stats.rises({ 3, 2, 1, 1.4 }, 1, 0.5), stats.rises({ 3, 2, 1, 1.6 }, 1, 0.5),
    stats.rises({ 3, 2, 1, 1.6 }, 2, 0.5), stats.rises({ 1, 0 / 0 }, 1, 9), stats.rises({ 1 }, 4, 0) },
    { false, true, false, true, false })
  check.equal({ stats.best({ 1, 3, 2, 3 }, function(x) return "made of " .. x, -math.abs(x - 3) end) },
    { "made of 3", 0, 3 })
  check.equal({ stats.best({ 0 / 0, 4, 2 }, function(x) return {}, x end) }, { {}, 4, 4 })
  check.fails(function() stats.best({}, print) end, "stats.best: list: expected at least one entry, got none")
  check.fails(function() stats.best({ 1 }, function() end) end, "stats.best: the score: expected a number, got nil")
  check.equal({ stats.share { true, false, true, true }, stats.share { false } }, { 0.75, 0.0 })
  check.fails(function() stats.share {} end, "stats.share: list: expected at least one value, got none")
  local lists = {}
  stats.put(lists, "plain", 1, 3)
  stats.put(lists, "plain", 2, 4)
  stats.put(lists, "several", 1, { a = 1, deep = { b = 2 } })
  stats.put(lists, "several", 2, { a = 5, deep = { b = 6 } })
  check.equal(lists, { plain = { 3, 4 }, several = { a = { 1, 5 }, deep = { b = { 2, 6 } } } })
  check.fails(function() stats.put(lists, "plain", 0, 1) end, "stats.put: i: expected an integer >= 1, got 0")
  check.fails(function() stats.put(lists, "plain", 1, "x") end, 'stats.put: value: expected a number or a table')
  local list = { 3, 1, 2 }
  stats.median(list)
  check.equal(list, { 3, 1, 2 }, "is left as it was")
  check.fails(function() stats.median {} end, "stats.median: list: expected at least 1 numbers, got 0")
  check.fails(function() stats.mean { 1, "x" } end, "stats.mean: list: expected numbers, got string at 2")
  check.fails(function() stats.spread() end, "stats.spread: list: expected a table, got nil")
end)

check.test("names of recipes", function()
  local name = require("tycho.recipe.head").name
  check.equal({ name "recipes/core/gla.lua" }, { "core/gla", "." })
  check.equal({ name "/a/b/recipes/llm/gla.lua" }, { "llm/gla", "/a/b" })
  check.equal({ name "gla.lua" }, { "gla" })
end)

-- ---- records ----

local records = require "tycho.recipe.records"

check.test("a record is small, sorted and stable", function()
  local run = { arguments = {}, device = "cpu", threads = 2, seed = 0, seconds = 1.23456789, version = "0",
    commit = "c", metrics = { list = { 1 / 3, 2, 0 / 0 }, text = "a [b]\n{c}" },
    table = { { claim = "x", measured = 1 / 3, pass = true } } }
  local path = records.add(root, "family/example", run)
  local first = ty.io.read(path)
  check.equal(first:find('"list": [0.333333, 2, ', 1, true) ~= nil, true, first)
  local saved = records.read(root, "family/example")
  check.equal({ saved.recipe, #saved.runs, saved.runs[1].metrics.text }, { "family/example", 1, "a [b]\n{c}" })
  records.add(root, "family/example", run)
  check.equal(ty.io.read(path), first, "recorded again")
  run.arguments = { steps = 7 }
  records.add(root, "family/example", run)
  saved = records.read(root, "family/example")
  check.equal(#saved.runs, 2, "other arguments stand beside")
  check.equal(records.plain_run(saved).arguments, {})
  check.equal({ records.state(saved) }, { "met", 0, 1 })
  run.arguments, run.table = {}, { { claim = "x", pass = false }, { claim = "y", pass = true }, { claim = "z" } }
  records.add(root, "family/example", run)
  check.equal({ records.state(records.read(root, "family/example")) }, { "missed 1 of 2", 1, 2 })
  check.equal({ records.state(nil) }, { "not recorded", 0, 0 })
  -- A run of fewer seeds counts where there is no other, one of other steps never does.
  local some = { runs = { { arguments = { seeds = 1 }, date = "2026-02-02", table = { { pass = true } } } } }
  check.equal({ records.state(some) }, { "met", 0, 1 })
  table.insert(some.runs, { arguments = {}, date = "2026-01-01", table = { { pass = false } } })
  check.equal({ records.state(some) }, { "missed 1 of 1", 1, 1 })
  local other = { runs = { { arguments = { seeds = 1, steps = 7 }, date = "2026-02-02", table = {} } } }
  check.equal({ records.state(other) }, { "not recorded", 0, 0 })
end)

check.test("only a clean tree is recorded", function()
  local tree = root .. "/tree"
  local function sh(text) return os.execute(("cd '%s' && (%s) >/dev/null 2>&1"):format(tree, text)) end
  ty.io.mkdir(tree .. "/recipes/family")
  check.fails(function() records.commit(tree) end, "is no git checkout")
  ty.io.write_atomic(tree .. "/recipes/family/example.lua", ty.io.read(file))
  local committed = sh "git init -q && git add -A && git -c user.name=x -c user.email=x@x commit -m x"
  check.equal(committed, true, "git, which CI has")
  check.equal(#records.commit(tree), 40)
  ty.io.mkdir(tree .. "/records")
  ty.io.write_atomic(tree .. "/records/a.json", "{}")
  check.equal(#records.commit(tree), 40, "other records do not count")
  -- A picture that is too large for a record is kept smaller, and the run is not lost.
  local r = recipe.declare({ file = tree .. "/recipes/family/example.lua", args = {} }, { "--record", "--out",
    root .. "/large" })
  ty.manual_seed(1)
  local picture = ty.randint(0, 256, { 3, 400, 300 }):to "u8" -- noise: a file as large as the picture
  ty.io.save_image(r:picture "example.png", picture)
  check.ok(#ty.io.read(root .. "/large/example.png") > 200000)
  r:finish { { claim = "works", measured = 1, bar = 1 } }
  local run = records.plain_run(records.read(tree, "family/example"))
  check.equal(run.picture, "example.png")
  check.ok(#ty.io.read(tree .. "/records/family/example.png") <= 200000)
  local kept = ty.io.load_image(tree .. "/records/family/example.png")
  check.equal(kept.shape, { 3, 200, 150 })
  local mean = picture:to("f32"):unsqueeze(0):avg_pool2d(2):squeeze(0)
  check.ok((kept:to "f32" - mean):abs():mean():item() < 30, "what is next to each other is averaged")
  ty.io.write_atomic(tree .. "/new.lua", "")
  check.fails(function() records.commit(tree) end, "changes that are not committed")
end)

remove_all(root)
check.finish()
