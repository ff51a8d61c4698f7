-- The law of logarithms on numbers that follow it; wrong labels; networks carried over to another task.
local here = arg and arg[0]:match ".*/" or "tests/modules/curation/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local models = require "tycho.models"
local scaling = require("tycho.curation").scaling

check.test("numbers that follow the law are found again, and what they leave", function()
  local sizes, values, bent = { 100, 300, 1000, 5000, 20000 }, {}, {}
  for i, n in ipairs(sizes) do
    values[i] = 0.2 + 0.07 * math.log(n, 10)
    bent[i] = values[i] + (i % 2 == 0 and 0.05 or -0.05)
  end
  local law = scaling.log_law(sizes, values)
  check.close({ law.per_tenfold, law.at_one, law.r2, law.at(1e6) }, { 0.07, 0.2, 1, 0.62 }, 1e-12)
  local other = scaling.log_law(sizes, bent)
  check.ok(other.r2 > 0.3 and other.r2 < 0.95)
  -- R2 is the square of the correlation.
  local x = {}
  for i, n in ipairs(sizes) do x[i] = math.log(n) end
  check.close(other.r2, ty.stats.correlation(x, bent) ^ 2, 1e-12)
  -- A power law bends away.
  local power = {}
  for i, n in ipairs(sizes) do power[i] = n ^ 0.5 end
  check.ok(scaling.log_law(sizes, power).r2 < 0.9)
  check.equal(scaling.log_law({ 1, 10, 100 }, { 3, 3, 3 }).r2, 1.0)
end)

check.test("what is no law is said", function()
  check.fails(function() scaling.log_law({ 1, 2 }, { 1, 2 }) end, "as many values as sizes, three at least")
  check.fails(function() scaling.log_law({ 5, 5, 5 }, { 1, 2, 3 }) end, "sizes: expected some that differ")
  check.fails(function() scaling.log_law({ 0, 5, 6 }, { 1, 2, 3 }) end, "sizes")
end)

check.test("as many labels as asked for are wrong, and wrong ones are of all other classes", function()
  ty.manual_seed(4)
  local n = 20000
  local set = { image = ty.zeros(n, 1), label = ty.arange(n) % 5 }
  local noisy = scaling.mislabelled(set, 0.3, 5)
  local moved = ((noisy.label - set.label + 5) % 5):tolist()
  local counts = { [0] = 0, 0, 0, 0, 0 }
  for _, d in ipairs(moved) do counts[d] = counts[d] + 1 end
  check.close(counts[0] / n, 0.7, 0.02)
  for d = 1, 4 do check.close(counts[d] / n, 0.075, 0.01) end
  check.ok(ty.equal(scaling.mislabelled(set, 0, 5).label, set.label))
  check.equal(scaling.first(set, 3).label:tolist(), { 0, 1, 2 })
  check.fails(function() scaling.first(set, n + 1) end, "count: expected an integer in [1, 20000]")
end)

check.test("a network is carried over: its body helps and stays as it was; a head alone changes no more", function()
  ty.manual_seed(6)
  local pattern = ty.randn(6, 1, 8, 8)
  local function draw(n, first)
    local label = ty.randint(0, 3, { n })
    return { image = pattern:index_select(0, label + first) + ty.randn(n, 1, 8, 8) * 0.6, label = label }
  end
  local model = models.ResNet { in_channels = 1, classes = 3, small = true, channels = { 4, 8 }, blocks = { 1, 1 } }
  scaling.pretrain(model, draw(256, 0), { steps = 40, lr = 1e-2, prepare = function(x) return x * 1 end })
  local before = model:state_dict()
  for name, t in pairs(before) do before[name] = t:clone() end
  local few, test = draw(24, 3), draw(200, 3)
  local tuned, copy = scaling.transfer(model, few, test, { steps = 40, lr = 1e-2 })
  check.ok(tuned > 0.6, tuned)
  check.equal(copy.fc.weight.shape, { 3, 8 })
  local head, other = scaling.transfer(model, few, test, { steps = 100, lr = 3e-2, tune = false, classes = 4 })
  check.ok(head > 0.5, head)
  check.equal(other.fc.weight.shape, { 4, 8 })
  local state, moved = other:state_dict(), copy:state_dict()
  local changed = false
  for name, t in pairs(before) do
    check.ok(ty.equal(model:state_dict()[name], t), name)
    if not name:find "^fc" then
      check.ok(ty.equal(state[name], t), name)
      changed = changed or not ty.equal(moved[name], t)
    end
  end
  check.ok(changed)
  check.fails(function() scaling.transfer(model, few, test, { head = "bn" }) end, "head: expected the name of a linear")
end)

check.finish()
