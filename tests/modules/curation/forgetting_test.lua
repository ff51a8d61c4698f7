-- Trials of forgetting: cases, ways, how their settings are chosen.
local here = arg and arg[0]:match ".*/" or "tests/modules/curation/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local curation = require "tycho.curation"
local fisher, forgetting, unlearning = curation.fisher, curation.forgetting, curation.unlearning

ty.manual_seed(2)
local function draw(n)
  local label = ty.arange(n) % 3
  return { image = ty.one_hot(label, 3):to "f32" * 2 + ty.randn(n, 3) * 0.5, label = label }
end
local learnt, others = draw(60), draw(30)
local model = ty.nn.Sequential(ty.nn.Linear(3, 16), ty.nn.ReLU(), ty.nn.Linear(16, 3))
unlearning.finetune(model, learnt, { steps = 150, lr = 1e-2, batch_size = 30 })
local whole = fisher.diagonal(model, learnt)
local case = forgetting.case(model, learnt, whole, others, { class = 1 })

check.test("a case of a class has its samples and the others; one of samples has no unseen ones", function()
  check.equal(case.forget.label.shape, { 20 })
  check.equal(case.retained.label.shape, { 40 })
  check.equal(case.unseen.label:tolist(), { 1, 1, 1, 1, 1, 1, 1, 1, 1, 1 })
  check.equal(case.kept.label.shape, { 20 })
  local some = forgetting.case(model, learnt, whole, others, { positions = { 3, 4 } })
  check.equal(some.forget.label:tolist(), { 0, 1 })
  check.equal(some.unseen, nil)
  check.equal(some.kept.label.shape, { 30 })
  check.fails(function() forgetting.case(model, learnt, whole, others, {}) end, "what: expected a class or positions")
  check.fails(function() forgetting.case(model, learnt, whole, others, { class = 7 }) end, "positions: expected some")
end)

check.test("ways have as many settings each; they work on a copy", function()
  local before = model:state_dict()
  for name, t in pairs(before) do before[name] = t:clone() end
  local ways = forgetting.ways(4)
  check.equal(#ways, 4)
  for _, way in ipairs(ways) do
    check.equal(#way.tries, 12, way.name)
    local copy = forgetting.apply(way, case, way.tries[12])
    local moved = false
    for name, t in pairs(copy:state_dict()) do
      moved = moved or not ty.equal(t, before[name])
      check.ok(ty.equal(model:state_dict()[name], before[name]))
    end
    check.ok(moved or way.name == "dampening", way.name)
  end
end)

check.test("the strongest setting forgets a class and keeps the others; the nearest comes next to a goal", function()
  local way = { name = "pushed", apply = function(copy, _, setting)
    ty.no_grad(function() copy[3].bias:copy_(ty.tensor { 0.0, -setting.down, 0.0 }) end)
  end }
  local tries = { { down = 0 }, { down = 1000 }, { down = -1000 } }
  check.equal(forgetting.strongest(way, { case }, tries, 1 / 3).down, 1000)
  local goal = forgetting.measure(case, forgetting.apply(way, case, tries[3]))
  check.equal(goal.forgotten, 1.0)
  check.equal(goal.kept, 0.0)
  check.equal(forgetting.nearest(way, { case }, tries, { goal }).down, -1000)
  local at_first = forgetting.measure(case, model)
  check.ok(at_first.kept > 0.8 and at_first.forgotten > 0.8)
  check.close(forgetting.gap(at_first, at_first), 0, 1e-12)
  check.close(forgetting.gap({ forgotten = 1, kept = 0.5, members = 0 }, { forgotten = 0, kept = 1, members = 0 }), 0.5,
    1e-12)
end)

check.finish()
