-- Momentum auxiliary networks: the average by a recurrence written here, losses, and one block as training from end to
-- end.
local here = arg and arg[0]:match ".*/" or "tests/modules/local/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local learning = require "tycho.local"
local nn = ty.nn

local f64 = { dtype = "f64" }
local function units()
  return nn.with_defaults(f64, function()
    return { nn.Sequential(nn.Conv2d(1, 4, 3, { padding = 1 }), nn.BatchNorm2d(4), nn.ReLU()),
      nn.Sequential(nn.Conv2d(4, 4, 3, { padding = 1 }), nn.ReLU()),
      nn.Sequential(nn.Conv2d(4, 6, 3, { stride = 2, padding = 1 }), nn.BatchNorm2d(6), nn.ReLU()),
      nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)) }
  end)
end
local x, label = ty.randn({ 5, 1, 6, 6 }, f64), ty.randint(0, 3, { 5 })

local function new(options)
  local list = units()
  options.classes, options.example, options.rate = 3, x, options.rate or 0.05
  return nn.with_defaults(f64, learning.momentum_auxiliary, list, options), list
end

check.test("the average is a <- m a + (1 - m) w of the next block's first unit", function()
  ty.manual_seed(1)
  local m = 0.9
  local learner, list = new { cuts = { 1, 2 }, momentum = m }
  check.equal(#learner.averages, 2)
  local expected = {}
  for j, average in ipairs(learner.averages) do
    expected[j] = {}
    for k, p in ipairs(average:parameters()) do
      expected[j][k] = p:flatten():tolist()
      check.equal(p.requires_grad, false)
      check.equal(p:tolist(), list[j + 1]:parameters()[k]:tolist())
    end
  end
  for _ = 1, 4 do
    -- Block j moves its average before block j + 1 takes its own step: towards the weights that are there now.
    for j in ipairs(learner.averages) do
      for k, p in ipairs(list[j + 1]:parameters()) do
        for e, w in ipairs(p:flatten():tolist()) do expected[j][k][e] = m * expected[j][k][e] + (1 - m) * w end
      end
    end
    learner:step(x, label)
    for j, average in ipairs(learner.averages) do
      for k, p in ipairs(average:parameters()) do check.close(p:flatten():tolist(), expected[j][k], 1e-14) end
    end
  end
end)

check.test("a block's loss is the cross entropy of head(average(y) + bias(y)), by finite differences", function()
  ty.manual_seed(2)
  local learner, list = new { cuts = { 1, 2 } }
  local parts = learner.model.auxiliaries[1]
  local y = list[1](x)
  local want = nn.cross_entropy(parts.head(parts.average(y) + parts.bias(y)), label):item()
  check.close(learner.stages[1].loss(learner.stages[1].forward(x), label):item(), want, 1e-12)

  local own, following = list[1]:parameters(), list[2]:parameters()
  local all = table.move(following, 1, #following, #own + 1, table.move(own, 1, #own, 1, {}))
  for _, p in ipairs(parts.bias:parameters()) do all[#all + 1] = p end
  local found = learning.blocks.gradients(learner.stages, x, label, { all, {}, {} })[1]
  for k, p in ipairs(all) do
    local is_next = k > #own and k <= #own + #following
    check.equal(found[k] == false, is_next, "gradient of parameter " .. k)
    if not is_next and k ~= 2 then -- 2: a convolution's bias before a norm, which has no effect
      p:set_grad(found[k])
      check.gradient(function() return learner.stages[1].loss(learner.stages[1].forward(x), label) end, p,
        { 1, p:numel() }, 1e-5)
    end
  end
end)

check.test("one block is training from end to end, step by step", function()
  ty.manual_seed(3)
  local learner, list = new { cuts = {} }
  ty.manual_seed(3)
  local whole = units()
  local other = learning.blocks.end_to_end(whole, { rate = 0.05 })
  for _ = 1, 3 do check.equal(learner:step(x, label), other:step(x, label)) end
  for i, unit in ipairs(list) do
    for k, p in ipairs(unit:parameters()) do check.equal(p:tolist(), whole[i]:parameters()[k]:tolist()) end
  end
  check.equal(learner:scores(x):tolist(), other:scores(x):tolist())
end)

check.test("what an auxiliary network is made of", function()
  for auxiliary, names in pairs { momentum = "average bias head", average = "average head", bias = "bias head",
    none = "head" } do
    local learner = new { cuts = { 2 }, auxiliary = auxiliary }
    local found = {}
    for name in learner.model.auxiliaries[1]:named_children() do found[#found + 1] = name end
    table.sort(found)
    check.equal(table.concat(found, " "), names)
    learner:step(x, label)
  end
end)

check.test("wrong arguments are one clear error", function()
  check.fails(function() new { cuts = { 3 } } end, "cuts[1]: expected an integer in [1, 2], got 3")
  check.fails(function() new { cuts = { 2, 1 } } end, "cuts[2]: expected an integer in [3, 2], got 1")
  check.fails(function() new { cuts = { 1 }, auxiliary = "more" } end, 'auxiliary: expected "momentum" or "average"')
end)

check.finish()
