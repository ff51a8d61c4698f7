-- One recipe with --quick: tests/recipes/quick.lua FAMILY/NAME [DEVICE]. It must end well, leave its metrics, refuse a
-- mistake, and hold its claims to the bars of its record.
local here = arg and arg[0]:match ".*/" or "tests/recipes/"
local check = dofile(here .. "../lua/check.lua")
local ty = require "tycho"
local head = require "tycho.recipe.head"
local records = require "tycho.recipe.records"

local name = arg[1] or error("usage: tests/recipes/quick.lua FAMILY/NAME [DEVICE]", 0)
local path = ("%srecipes/%s.lua"):format(check.root, name)
local root = os.tmpname()
os.remove(root)
ty.io.mkdir(root)

local interpreter
do
  local first = 0
  while arg[first - 1] do first = first - 1 end
  interpreter = arg[first]
end
local log = root .. "/log"
local function run(arguments)
  return (os.execute(("'%s' '%s' %s >'%s' 2>&1"):format(interpreter, path, arguments, log)))
end

check.test("the head", function()
  local read = head.read(path)
  for _, field in ipairs { "title", "claim", "system", "paper", "time" } do
    check.equal((read[field] or "") ~= "", true, field)
  end
end)

check.test("--help, and a mistake", function()
  check.equal(run "--help", true)
  check.equal(ty.io.read(log):find("--quick", 1, true) ~= nil, true)
  check.equal(run "--no-such-thing", nil, "a mistake ends with a status")
end)

check.test("a quick run", function()
  check.equal(run(("--quick --threads 1 --device %s --out '%s'"):format(arg[2] or "cpu", root)), true, ty.io.exists(log) and ty.io.read(log))
  local result = ty.io.load_json(root .. "/metrics.json")
  check.equal(result.recipe, name)
  check.equal(#result.table > 0, true, "a closing table")
  local record = records.plain_run(records.read(check.root, name))
  if not record then return end
  local recorded = {}
  for _, row in ipairs(record.table) do recorded[row.claim] = row end
  local shared = 0
  for _, row in ipairs(result.table) do
    local other = recorded[row.claim]
    if other then
      shared = shared + 1
      check.equal({ row.bar, row.below }, { other.bar, other.below }, "the bar of: " .. row.claim)
    end
  end
  check.equal(shared > 0, true, "claims that the record has too")
end)

os.execute(("rm -rf '%s'"):format(root))
check.finish()
