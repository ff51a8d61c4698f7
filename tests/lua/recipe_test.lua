-- Recipes: arguments, help, the closing table; and every recipe of the project with --quick.
local here = arg and arg[0]:match ".*/" or "tests/lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local recipe = ty.recipe

local root = os.tmpname()
os.remove(root)

local function remove_all(path)
  local info = ty.io.stat(path)
  if not info then return end
  if info.kind == "directory" then
    for _, name in ipairs(ty.io.listdir(path)) do remove_all(path .. "/" .. name) end
  end
  ty.io.remove(path)
end

local spec = {
  title = "A test", claim = "it works", system = "none", paper = "nobody 2024", time = "no time",
  args = {
    { "steps", 100, "how many", quick = 3 }, { "rate", 0.5, "how fast" },
    { "name", "x", "called", choices = { "x", "y" } },
    { "flag", false, "a switch" }, { "warm", true, "another" }, { "long_name", 1, "dashes" },
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

check.test("results that are infinite or undefined are text in metrics.json", function()
  local r = declare()
  r.metrics.smallest = 0 / 0
  r:finish { { claim = "a", measured = math.huge, bar = 1 }, { claim = "b", measured = 2, bar = 1 } }
  local file <close> = io.open(r:path "metrics.json")
  local saved = ty.io.json_decode(file:read "a")
  check.equal(saved.results[1].measured, "inf")
  check.equal(saved.results[2].measured, 2)
  check.equal(type(saved.metrics.smallest), "string")
end)

check.test("mistakes", function()
  local function problem(...)
    local _, text = recipe.parse(spec.args, { ... })
    return text
  end
  check.equal(problem("--steps", "2.5"), "--steps takes an integer, got '2.5'")
  check.equal(problem("--rate", "fast"), "--rate takes a number, got 'fast'")
  check.equal(problem("--name", "z"), "--name must be one of x, y, got 'z'")
  check.equal(problem("--steps"), "--steps needs a value")
  check.equal(problem("--stepz", "1"), "unknown argument '--stepz'; --help lists them")
  check.equal(problem("--flag=1"), "--flag takes no value")
  check.equal(problem("--no-steps"), "unknown argument '--no-steps'; --help lists them")
  check.equal(problem("--help"), "help")
end)

check.test("help", function()
  local text = recipe.help_text(spec, spec.args)
  for _, part in ipairs { "A test", "claim:  it works", "--steps N", "(default 100, 3 with --quick)", "--rate X",
    "--no-warm", "--long-name N" } do
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
  check.equal({ saved.results[1].pass, saved.results[2].pass, saved.results[3].pass }, { true, false, true })
  check.equal({ saved.results[4].measured, saved.results[4].pass }, { "not here", nil })
  check.equal(saved.metrics.extra, { 1, 2 })
  check.equal(saved.args.steps, 100)
  check.equal(declare("--strict"):finish(rows), 1, "unless asked for")
  check.equal(declare("--strict", "--quick"):finish(rows), 0)
  check.fails(function() declare():finish { { claim = "?" } } end, "needs pass")
end)

-- Every recipe of the project must run with --quick and leave its metrics.
local interpreter
do
  local first = 0
  while arg[first - 1] do first = first - 1 end
  interpreter = arg[first]
end

local function recipes(folder, list)
  for _, name in ipairs(ty.io.listdir(folder)) do
    local path = folder .. "/" .. name
    if ty.io.stat(path).kind == "directory" then recipes(path, list)
    elseif name:match "%.lua$" then list[#list + 1] = path end
  end
  return list
end

for _, path in ipairs(recipes(check.root .. "recipes", {})) do
  check.test("quick: " .. path:match "recipes/.*$", function()
    local out = root .. "/" .. path:match "([^/]+)%.lua$"
    local log = root .. "/log"
    local function run(arguments)
      return (os.execute(("'%s' '%s' %s >'%s' 2>&1"):format(interpreter, path, arguments, log)))
    end
    check.equal(run(("--quick --out '%s'"):format(out)), true, ty.io.exists(log) and ty.io.read(log))
    check.equal(ty.io.exists(out .. "/metrics.json"), true, "metrics.json")
    check.equal(run "--help", true)
    check.equal(ty.io.read(log):find("--quick", 1, true) ~= nil, true)
    check.equal(run "--no-such-thing", nil, "a mistake ends with a status")
    local first = ty.io.read(path):match "^%-%- ([^\n]+)\n%-%- claim: [^\n]+\n"
    check.equal(first ~= nil, true, "the header names title and claim")
  end)
end

remove_all(root)
check.finish()
