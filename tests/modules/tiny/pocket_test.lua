-- tiny.scheme, tiny.pocket, tiny.foresee, tiny.fold, and what they ask of ty.compile.
local check = dofile((arg[0]:match ".*/" or "./") .. "../../lua/check.lua")
local ty = require "tycho"
local models = require "tycho.models"
local tiny = require "tycho.tiny"

local nn, optim, program = ty.nn, ty.optim, ty.core.program

local function same(a, b, what)
  check.equal(ty.all(a:detach():eq(b:detach())):item(), true, what)
end

local function convnet()
  ty.manual_seed(3)
  return nn.Sequential(nn.Conv2d(3, 8, 3, { padding = 1 }), nn.ReLU(), nn.Conv2d(8, 8, 3, { padding = 1 }), nn.ReLU(),
    nn.Conv2d(8, 12, 3, { padding = 1, stride = 2 }), nn.ReLU(), nn.Flatten(), nn.Linear(12 * 16, 5))
end

local function batch(i)
  ty.manual_seed(100 + i)
  return ty.randn(4, 3, 8, 8), ty.randint(0, 5, { 4 })
end

local function loss_of(model, x, y) return ty.cross_entropy(model(x), y) end

local optimizers = {
  AdamW = function(p)
    return optim.AdamW(p, { lr = 0.01, weight_decay = 0.1, schedule = optim.cosine { steps = 9 } })
  end,
  SGD = function(p) return optim.SGD(p, { lr = 0.1, momentum = 0.9, nesterov = true }) end,
  Lion = function(p) return optim.Lion(p, { lr = 0.01 }) end,
  ["8 bits"] = function(p) return optim.AdamW(p, { lr = 0.01, bits = 8 }) end,
  RMSprop = function(p) return optim.RMSprop(p, { lr = 0.01 }) end,
  clipped = function(p) return optim.Adam(p, { lr = 0.01, clip_norm = 0.1 }) end,
}

-- The model after some steps without a recording, of what the list of names says (nil: everything).
local function eager(make, trained, steps)
  local model = convnet()
  local list = {}
  for name, p in model:named_parameters() do
    p:requires_grad_(not trained or trained[name] == true)
    if p.requires_grad then list[#list + 1] = p end
  end
  local optimizer, losses = make(list), {}
  for i = 1, steps do losses[i] = ty.scope(function()
    local loss = loss_of(model, batch(i))
    optimizer:step(loss)
    return loss:item()
  end) end
  return model, losses
end

local function compare(what, a, b)
  local other = {}
  for name, p in b:named_parameters() do other[name] = p end
  for name, p in a:named_parameters() do same(p, other[name], what .. ": " .. name) end
end

check.test("everything trained, updates early: bit for bit the dense steps without a recording", function()
  for name, make in pairs(optimizers) do
    local dense, losses = eager(make, nil, 7)
    local pocket = tiny.pocket(convnet(), { optimizer = make, loss = loss_of })
    for i = 1, 7 do check.equal(pocket:step(batch(i)):item(), losses[i], name .. ": loss " .. i) end
    compare(name, dense, pocket.model)
    check.equal(pocket.optimizer.steps, 7)
    local stats = pocket:report()
    check.equal(#stats, 1, "recordings")
    -- a norm of all gradients has to wait for them
    check.equal(stats[1].hastened > 0, name ~= "clipped", name .. ": updates that moved")
  end
end)

local sparse = { weights = { "4", "7" }, biases = { "2", "4", "7" } }
local names = { ["4.weight"] = true, ["7.weight"] = true, ["2.bias"] = true, ["4.bias"] = true, ["7.bias"] = true }

check.test("a sparse scheme: the values of the dense run with the others frozen", function()
  for name, make in pairs(optimizers) do
    local dense, losses = eager(make, names, 6)
    local pocket = tiny.pocket(convnet(), { scheme = sparse, optimizer = make, loss = loss_of })
    for i = 1, 6 do check.equal(pocket:step(batch(i)):item(), losses[i], name .. ": loss " .. i) end
    compare(name, dense, pocket.model)
    pocket:remove()
    for _, p in ipairs(pocket.model:parameters()) do check.equal(p.requires_grad, true) end
  end
end)

-- A recording of all updates from which those of the frozen are left out, on the model as it was after `steps` steps.
check.test("leaving updates out of a recording: the same launches and numbers as frozen tensors give", function()
  local make = optimizers.SGD
  local function recorded(model, optimizer)
    return ty.compile(function(x, y)
      local loss = loss_of(model, x, y)
      optimizer:step(loss)
      return loss
    end, { early = true })
  end
  local pruned = convnet()
  local run = recorded(pruned, make(pruned:parameters()))
  run(batch(1))
  run(batch(2))
  local frozen = {}
  for name, p in pruned:named_parameters() do if not names[name] then frozen[#frozen + 1] = p end end
  local whole, foreseen = program.stats(run)[1], program.foresee(run, frozen)
  check.equal(program.stats(run)[1], whole, "foresee leaves it as it is")
  program.restrict(run, frozen)
  check.equal(program.stats(run)[1], foreseen, "restrict does what foresee says")

  local other = convnet()
  local trained = {}
  for name, p in other:named_parameters() do
    p:requires_grad_(names[name] == true)
    if names[name] then trained[#trained + 1] = p end
  end
  local kept = make(trained)
  local again = recorded(other, kept)
  again(batch(1))
  again(batch(2))
  local stats = program.stats(again)[1]
  check.equal({ foreseen.runs, foreseen.arena, foreseen.temporaries },
    { stats.runs, stats.arena, stats.temporaries }, "launches, arena and bytes")
  -- By hand. Gone with the update of weight 0: its gradient, that of what the relu before 2 gave, and the relu's; with
  -- those of bias 0 and weight 2: a sum and a gradient. And three updates.
  check.equal(whole.runs - foreseen.runs, 8)

  -- both go on from the same weights and momenta
  local start = {}
  for name, p in pruned:named_parameters() do start[name] = p end
  ty.no_grad(function() for name, p in other:named_parameters() do p:copy_(start[name]) end end)
  local before = start["0.weight"]:detach():clone()
  local a, b = run(batch(3)):item(), again(batch(3)):item()
  check.equal(a, b, "loss")
  same(start["0.weight"], before, "what is left out stays")
  check.fails(function() program.restrict(run, { ty.ones(2) }) end, "tensor 1 to leave out, %[2%] f32")
  check.equal(#program.stats(run), 0, "after which it is recorded anew")
end)

check.test("what schemes will take, from one recording", function()
  local model, x, y = convnet(), batch(1)
  local before = model.state_dict and model:state_dict()
  for name, t in pairs(before) do before[name] = t:clone() end
  local rng = ty.rng_state()
  local options = { optimizer = optimizers.AdamW, loss = loss_of }
  local last = { weights = { "7" }, biases = { "7" } }
  local list, whole = tiny.foresee(model, options, { { weights = { "" }, biases = { "" } }, sparse, last }, x, y)
  check.equal(ty.rng_state(), rng)
  for name, t in pairs(model:state_dict()) do same(t, before[name], name) end
  check.equal({ list[1].runs, list[1].arena, list[1].removed }, { whole.runs, whole.arena, 0 })
  for i, spec in ipairs { { weights = { "" }, biases = { "" } }, sparse, last } do
    local pocket = tiny.pocket(convnet(), { scheme = spec, optimizer = optimizers.AdamW, loss = loss_of })
    for k = 1, 3 do pocket:step(batch(k)) end
    local stats = pocket:report()[1]
    check.equal({ list[i].runs, list[i].arena }, { stats.runs, stats.arena }, "scheme " .. i)
    check.equal(list[i].trained, pocket.scheme.elements)
  end
  check.equal(list[3].runs < list[2].runs and list[2].runs < list[1].runs, true)
end)

check.test("updates early keep one gradient at a time", function()
  local function arena(early)
    ty.manual_seed(1)
    local model = nn.Sequential()
    for _ = 1, 6 do model:append(nn.Linear(64, 64, { bias = false })) end
    local pocket = tiny.pocket(model, { early = early, optimizer = optimizers.SGD,
      loss = function(m, x) return m(x):square():mean() end })
    for _ = 1, 3 do pocket:step(ty.ones(2, 64)) end
    return pocket:report()[1].arena
  end
  local late, early = arena(false), arena(true)
  check.ok(late >= 6 * 64 * 64 * 4 and early < 2 * 64 * 64 * 4, ("%d and %d bytes"):format(late, early))
end)

check.test("an arena that is too small is an error", function()
  local function pocket(arena)
    return tiny.pocket(convnet(), { optimizer = optimizers.SGD, loss = loss_of, arena = arena })
  end
  local free = pocket(0)
  for i = 1, 3 do free:step(batch(i)) end
  local need = free:report()[1].arena
  local enough, short = pocket(need), pocket(need - 1)
  for i = 1, 3 do enough:step(batch(i)) end
  short:step(batch(1))
  check.fails(function() short:step(batch(2)) end, ("arena of %d bytes, 1 more than the %d"):format(need, need - 1))
end)

check.test("some input channels: the gradient of these, and less is kept", function()
  for _, make in ipairs {
    function() return nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 5)), ty.randn(4, 16) end,
    function()
      return nn.Sequential(nn.Conv2d(16, 8, 3, { padding = 1, stride = 2 }), nn.ReLU(), nn.Flatten(),
        nn.Linear(8 * 4, 5)), ty.randn(4, 16, 4, 4)
    end,
  } do
    ty.manual_seed(5)
    local model, x = make()
    local y = ty.randint(0, 5, { 4 })
    local whole = model:clone()
    loss_of(whole, x, y):backward()
    local scheme = tiny.scheme(model, { biases = { "" }, channels = { ["0"] = 0.25 } })
    local x2 = x:clone():requires_grad_()
    loss_of(model, x2, y):backward()
    local part = scheme.parameters[#scheme.parameters]
    check.equal(part.shape[2], 4)
    local want = whole[1].weight.grad:narrow(1, 0, 4)
    check.ok((part.grad - want):abs():amax():item() <= 1e-6, "gradient of the part")
    check.ok((model[1].bias.grad - whole[1].bias.grad):abs():amax():item() <= 1e-6, "of the bias")
    check.equal(x2.grad ~= nil, true)
    local optimizer = optim.SGD(scheme.parameters, { lr = 0.1 })
    local before = model[1].weight:detach():clone()
    optimizer:step()
    same(model[1].weight:narrow(1, 4, 12), before:narrow(1, 4, 12), "the others stay")
    check.equal(ty.all(model[1].weight:narrow(1, 0, 4):eq(before:narrow(1, 0, 4))):item(), false)
    scheme:remove()
    check.equal(getmetatable(model[1]) == nn.Linear or getmetatable(model[1]) == nn.Conv2d, true)
  end
end)

check.test("batch norms go into convolutions", function()
  ty.manual_seed(6)
  local model = models.ResNet { in_channels = 3, classes = 4, small = true, channels = { 8, 16 }, blocks = { 1, 1 } }
  for _ = 1, 3 do model(ty.randn(8, 3, 8, 8) * 2 + 1) end -- statistics
  model:eval()
  local x = ty.randn(2, 3, 8, 8)
  local want = ty.no_grad(model.forward, model, x)
  check.equal(tiny.fold(model, x), 6)
  local got = ty.no_grad(model.forward, model, x)
  check.ok((got - want):abs():amax():item() < 1e-5)
  for name in model:named_parameters() do check.equal(name:find "bn" == nil, true, name) end
  check.equal(tiny.fold(model, x), 0)
  -- a norm after a sum has no convolution of its own
  local Sum = nn.module "Sum"
  function Sum:init()
    self.conv, self.norm = nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)
  end
  function Sum:forward(h) return self.norm(self.conv(h) + h) end
  check.equal(tiny.fold(Sum(), ty.randn(1, 2, 3, 3)), 0)
end)

check.test("errors", function()
  local model = convnet()
  check.fails(function() tiny.scheme(model, { weights = { "9" } }) end, 'tiny.scheme: weights%[1%]: the model has no')
  check.fails(function() tiny.scheme(model, {}) end, "expected some tensor to train")
  check.fails(function() tiny.scheme(model, { channels = { ["1"] = 0.5 } }) end, 'channels%["1"%]')
  check.fails(function() tiny.scheme(model, { channels = { ["0"] = 0 } }) end, "in %(0, 1%]")
  check.fails(function() tiny.pocket(model, { loss = loss_of }) end, "tiny.pocket: optimizer: expected a function")
  local pocket = tiny.pocket(model, { optimizer = optimizers.SGD, loss = function() return 1 end })
  check.fails(function() pocket:step(batch(1)) end, "tiny.pocket: loss: expected it to return a tensor, got 1")
end)

check.finish()
