-- Losses and modules against PyTorch in f64 (tests/fixtures/make_nn.py): results, gradients, names of parameters; and
-- what has no counterpart there, against formulas.
local here = arg and arg[0]:match ".*/" or "tests/lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local nn = ty.nn

local fixture = ty.io.load(check.root .. "tests/fixtures/nn_torch.json")

local function tensor(packed) return ty.tensor(packed.data, { dtype = packed.dtype }):reshape(packed.shape) end

local function flat(t) return t:detach():reshape(-1):tolist() end

-- PyTorch has 1 / 6 in f32.
local tolerances = { Hardsigmoid = 1e-7, Hardswish = 1e-7 }

local function same(t, packed, what, tolerance)
  check.equal(table.concat(t.shape, ","), table.concat(packed.shape, ","), what .. ": shape")
  check.close(flat(t), packed.data, tolerance or 1e-9, what)
end

local function goal(outputs)
  local total
  for _, y in ipairs(outputs) do
    local term = (y * (y + 0.3)):sum()
    total = total and total + term or term
  end
  return total
end

for k, case in ipairs(fixture.losses) do
  check.test(("%s %d, %s"):format(case.name, k, case.reduction), function()
    local options, own = { reduction = case.reduction }, { reduction = case.reduction }
    for key, value in pairs(case.options) do options[key], own[key] = value, value end
    for key, packed in pairs(case.tensors) do options[key], own[key] = tensor(packed), tensor(packed) end
    local inputs = {}
    for i, packed in ipairs(case.inputs) do inputs[i] = tensor(packed) end
    for i in ipairs(case.grads) do inputs[i]:requires_grad_() end
    local given = table.move(inputs, 1, #inputs, 1, {})
    if case.name == "ctc_loss" then given[1] = given[1]:log_softmax(2) end
    local arguments = table.move(given, 1, #given, 1, {})
    given[#given + 1] = options
    local y = nn[case.name](table.unpack(given))
    same(y, case.value, "value")
    local grads = ty.grad(goal { y }, table.move(inputs, 1, #case.grads, 1, {}))
    for i, packed in ipairs(case.grads) do same(grads[i], packed, "gradient " .. i) end
    local module = nn[case.module](own)
    same(module(table.unpack(arguments)), case.value, "the module")
    for key in pairs(case.tensors) do
      check.equal(module:to("f32"):state_dict()[key].dtype, "f32", "weights move with the module")
    end
    check.fails(function() nn[case.module] { reduction = "most" } end, "reduction: expected")
  end)
end

for k, case in ipairs(fixture.modules) do
  check.test(("%s %d%s"):format(case.class, k, case.wrap and ", " .. case.wrap or ""), function()
    local given = table.move(case.args, 1, #case.args, 1, {})
    if case.options then given[#given + 1] = case.options end
    local module = nn.with_defaults({ dtype = "f64" }, function() return nn[case.class](table.unpack(given)) end)
    if case.wrap then check.equal(nn[case.wrap](module), module) end
    module:train(case.train)
    local state, inputs, leaves = {}, {}, {}
    for name, packed in pairs(case.state) do state[name] = tensor(packed) end
    module:load_state_dict(state) -- strict: the names are PyTorch's
    for i, packed in ipairs(case.inputs) do
      inputs[i] = tensor(packed)
      if packed.dtype == "f64" then leaves[#leaves + 1] = inputs[i]:requires_grad_() end
    end
    if case.call then inputs[#inputs + 1] = case.call end
    local outputs = { module(table.unpack(inputs)) }
    for i, packed in ipairs(case.outputs) do same(outputs[i], packed, "output " .. i) end
    local names, params = {}, {}
    for name, p in module:named_parameters() do
      if case.grads[name] then names[#names + 1], params[#params + 1] = name, p end
    end
    local grads = #leaves + #params > 0 and ty.grad(goal(outputs), table.move(params, 1, #params, #leaves + 1,
      table.move(leaves, 1, #leaves, 1, {}))) or {}
    for i, packed in ipairs(case.input_grads) do
      same(grads[i], packed, "gradient of input " .. i, tolerances[case.class])
    end
    for i, name in ipairs(names) do same(grads[#leaves + i], case.grads[name], "gradient of " .. name) end
    local after = module:state_dict()
    for name, packed in pairs(case.after or {}) do same(after[name], packed, name .. " after the step") end
    check.ok(tostring(module):find(case.class, 1, true), "printed")
    local copy = module:clone():eval()
    module:eval()
    local first, second = module(table.unpack(inputs)), copy(table.unpack(inputs))
    check.equal(flat(first), flat(second), "a copy does the same")
  end)
end

check.test("focal and dice losses: the formulas", function()
  local x, t = { -1.5, 0.3, 2.0, -0.2 }, { 0, 1, 1, 0 }
  local logits, target = ty.tensor(x, { dtype = "f64" }), ty.tensor(t, { dtype = "f64" })
  for _, alpha in ipairs { 0.25, -1 } do
    local expected = {}
    for i = 1, 4 do
      local p = 1 / (1 + math.exp(-x[i]))
      local right = t[i] == 1 and p or 1 - p
      expected[i] = -(1 - right) ^ 1.5 * math.log(right) * (alpha < 0 and 1 or t[i] == 1 and alpha or 1 - alpha)
    end
    check.close(nn.focal_loss(logits, target, { alpha = alpha, gamma = 1.5, reduction = "none" }):tolist(), expected,
      1e-12)
  end
  check.close(nn.FocalLoss { gamma = 0, alpha = -1 }(logits, target):item(),
    ty.bce_with_logits(logits, target):item(), 1e-12)
  local p = ty.tensor({ { 0.2, 0.9, 0.5 }, { 0.1, 0.0, 0.3 } }, { dtype = "f64" })
  local truth = ty.tensor({ { 0.0, 1.0, 1.0 }, { 0.0, 0.0, 0.0 } }, { dtype = "f64" })
  check.close(nn.dice_loss(p, truth, { reduction = "none" }):tolist(),
    { 1 - (2 * 1.4 + 1) / (1.6 + 2 + 1), 1 - 1 / 1.4 }, 1e-12)
  check.close(nn.DiceLoss { squared = true, smooth = 0.5, reduction = "sum" }(p, truth):item(),
    1 - (2 * 1.4 + 0.5) / (0.04 + 0.81 + 0.25 + 2 + 0.5) + 1 - 0.5 / (0.01 + 0.09 + 0.5), 1e-12)
  check.close(nn.binary_cross_entropy(ty.tensor { 0.0, 1.0 }, ty.tensor { 1.0, 1.0 }, { reduction = "none" }):tolist(),
    { 100, 0 }, 1e-6)
end)

check.test("a distance of one's own, shapes that do not fit", function()
  local a, p, n = ty.randn(3, 4), ty.randn(3, 4), ty.randn(3, 4)
  local function distance(x, y) return 1 - nn.cosine_similarity(x, y) end
  check.close(nn.TripletMarginLoss { distance = distance, margin = 0.2 }(a, p, n):item(),
    (distance(a, p) - distance(a, n) + 0.2):relu():mean():item(), 1e-6)
  check.fails(function() nn.soft_margin_loss(a, ty.ones(4)) end,
    "soft_margin_loss: target: expected the shape of x [3, 4], got [4]")
  check.fails(function() nn.multi_margin_loss(ty.ones(3), ty.zeros(3)) end, "x: expected a tensor [n, classes]")
  check.fails(function() nn.focal_loss(a, p, { gama = 2 }) end, "focal_loss: no option 'gama'")
end)

check.test("dropout of channels and AlphaDropout", function()
  ty.manual_seed(5)
  for name, shape in pairs { Dropout1d = { 8, 50, 6 }, Dropout2d = { 8, 50, 3, 2 }, Dropout3d = { 8, 50, 2, 1, 3 },
    FeatureAlphaDropout = { 8, 50, 6 } } do
    local layer, x = nn[name](0.25), ty.ones(shape)
    local y = layer(x):flatten(2)
    check.equal(y:max({ 2 }):tolist(), y:min({ 2 }):tolist(), name .. ": whole channels")
    local dropped = y:select(2, 0):ne(y:max():item()):to("f32"):mean():item()
    check.ok(math.abs(dropped - 0.25) < 0.1, name .. ": the share of channels")
    check.equal(layer:eval()(x), x)
  end
  local x = ty.randn(200000)
  local y = nn.AlphaDropout(0.3)(x)
  check.ok(math.abs(y:mean():item()) < 0.02 and math.abs(y:std():item() - 1) < 0.02, "mean and variance stay")
  check.equal(nn.AlphaDropout(1)(ty.ones(3)):tolist(), { 0, 0, 0 })
  check.close(nn.Dropout2d(0.5)(ty.ones(2, 100, 2, 2)):max():item(), 2, 1e-6)
  check.fails(function() nn.Dropout2d()(ty.ones(2, 3)) end, "Dropout2d: x: expected a tensor [n, channels, h, w]")
  local slopes = nn.RReLU(0.1, 0.3)(ty.full({ 1000 }, -1.0))
  check.ok(slopes:max():item() <= -0.1 and slopes:min():item() >= -0.3 and slopes:std():item() > 0.03)
end)

check.test("weight_norm and spectral_norm: trained, moved, removed", function()
  for _, name in ipairs { "weight_norm", "spectral_norm" } do
    local layer = nn[name](nn.Linear(4, 6))
    local copy = layer:clone()
    local opt = ty.optim.SGD(layer, { lr = 0.1 })
    local x = ty.randn(3, 4)
    local before = layer(x):square():sum():item()
    for _ = 1, 20 do opt:step(layer(x):square():sum()) end
    check.ok(layer(x):square():sum():item() < before, name)
    local names = {}
    for key in layer:named_parameters() do names[#names + 1] = key end
    check.equal(names[1], "bias")
    check.equal(#names, name == "weight_norm" and 3 or 2)
    check.close(copy(x):square():sum():item() > 0, true)
    if name == "spectral_norm" then
      layer:train()
      for _ = 1, 50 do layer(x) end
      local _, s = ty.svd(layer.weight:detach())
      check.close(s:select(0, 0):item(), 1, 1e-3)
    end
    layer:eval()
    local y = layer(x)
    check.equal(nn.remove_parametrization(layer), layer)
    check.close(layer(x):tolist(), y:tolist(), 1e-6)
    check.equal(layer:count_parameters(), 30)
    check.fails(function() nn.remove_parametrization(layer) end, "no parametrization of \"weight\"")
    check.equal(copy.parametrizations ~= nil, true)
    nn.remove_parametrization(copy)
    copy(x)
  end
  check.fails(function() nn.weight_norm(nn.ReLU()) end, "weight_norm: name: expected a parameter of ReLU")
end)

-- How far a matrix's columns are from orthogonal ones of length 1.
local function off(w)
  local q = w:size(-2) < w:size(-1) and w:transpose(-2, -1) or w
  return (q:transpose(-2, -1):matmul(q) - ty.eye(q:size(-1), { dtype = w.dtype })):abs():max():item()
end

check.test("parametrizations by functions and modules, one after the other", function()
  local layer = nn.Linear(3, 3)
  local own = layer.weight:detach():clone()
  check.equal(nn.is_parametrized(layer), false)
  check.equal(nn.register_parametrization(layer, "weight", function(x) return (x + x:t()) * 0.5 end), layer)
  check.equal({ nn.is_parametrized(layer), nn.is_parametrized(layer, "weight"), nn.is_parametrized(layer, "bias") },
    { true, true, false })
  check.close(layer.weight:tolist(), ((own + own:t()) * 0.5):tolist(), 1e-7)
  local names = {}
  for name in layer:named_parameters() do names[#names + 1] = name end
  check.equal(names, { "bias", "parametrizations.weight.original" }, "as PyTorch's")

  local Scale = nn.module "Scale"
  function Scale:init() self.factor = ty.full({}, 2.0):requires_grad_() end
  function Scale:forward(x) return x * self.factor end
  nn.register_parametrization(layer, "weight", Scale())
  check.close(layer.weight:tolist(), (own + own:t()):tolist(), 1e-6, "on top of the first")
  check.ok(layer:state_dict()["parametrizations.weight.1.factor"], "with its parameters")
  local opt, x = ty.optim.SGD(layer, { lr = 0.05 }), ty.randn(4, 3)
  local before = layer(x):square():sum():item()
  for _ = 1, 10 do ty.scope(function() opt:step(layer(x):square():sum()) end) end
  check.ok(layer(x):square():sum():item() < before)
  check.close(layer.weight:tolist(), layer.weight:t():tolist(), 1e-6, "symmetric still")
  local copy = layer:clone()
  check.close(copy(x):tolist(), layer(x):tolist(), 1e-6)
  local y = layer(x)
  nn.remove_parametrization(layer)
  check.close(layer(x):tolist(), y:tolist(), 1e-6)
  check.equal({ layer:count_parameters(), nn.is_parametrized(layer) }, { 12, false })
end)

check.test("parametrizations with a right inverse: the parameter stays what it was", function()
  local Positive = nn.module "Positive"
  function Positive:forward(x) return x:exp() end -- luacheck: no unused args
  function Positive:right_inverse(w) return w:log() end -- luacheck: no unused args
  local layer = nn.Linear(3, 2)
  ty.no_grad(function() layer.weight:abs_() end)
  local own = layer.weight:detach():clone()
  nn.register_parametrization(layer, "weight", Positive())
  check.close(layer.weight:tolist(), own:tolist(), 1e-6)
  local Product = nn.module "Product"
  function Product:forward(a, b) return a * b end -- luacheck: no unused args
  function Product:right_inverse(w) return w * 2, ty.full_like(w, 0.5) end -- luacheck: no unused args
  local second = nn.Linear(3, 2)
  own = second.weight:detach():clone()
  nn.register_parametrization(second, "weight", Product())
  check.close(second.weight:tolist(), own:tolist(), 1e-6)
  check.ok(second:state_dict()["parametrizations.weight.original1"], "several originals")
  local who = "register_parametrization: "
  check.fails(function() nn.register_parametrization(second, "weights", Product()) end,
    who .. "name: expected a parameter of Linear, got \"weights\"")
  check.fails(function() nn.register_parametrization(second, "bias", Product) end,
    who .. "parametrization: expected a module or a function, got the class Product")
  check.fails(function() nn.register_parametrization(second, "bias", function(x) return x:sum() end) end,
    who .. "parametrization: expected it to give f32 [2], as the parameter is, got f32 []")
  check.fails(function() nn.register_parametrization(second, "bias", function() end) end, "expected a tensor, got nil")
  check.fails(function() nn.weight_norm(second) end, "\"weight\" is computed by ParametrizationList already")
  check.fails(function() nn.weight_norm(nn.weight_norm(nn.Linear(2, 2))) end, "is computed by WeightNorm already")
end)

check.test("orthogonal weights stay orthogonal while they learn", function()
  ty.manual_seed(3)
  for _, map in ipairs { "matrix_exp", "cayley" } do
    for _, shape in ipairs { { 4, 4 }, { 6, 3 }, { 3, 5 } } do
      local layer = nn.Linear(shape[2], shape[1])
      check.equal(nn.orthogonal(layer, { map = map }), layer)
      check.ok(off(layer.weight) < 1e-5, map)
      local opt, x, t = ty.optim.SGD(layer, { lr = 0.2 }), ty.randn(16, shape[2]), ty.randn(16, shape[1])
      local first, loss = nil, nil
      for _ = 1, 30 do
        loss = (layer(x) - t):square():mean()
        first = first or loss:item()
        opt:step(loss)
      end
      check.ok(loss:item() < first, "it learns")
      layer(x)
      check.ok(off(layer.weight) < 1e-5, ("%s %d x %d: off by %g"):format(map, shape[1], shape[2], off(layer.weight)))
      check.equal(layer:state_dict()["parametrizations.weight.0.base"].shape,
        { math.max(table.unpack(shape)), math.max(table.unpack(shape)) })
    end
  end
  -- A turn of the plane by the angle that is trained: exp of { { 0, -a }, { a, 0 } }.
  local layer = nn.with_defaults({ dtype = "f64" }, nn.Linear, 2, 2, { bias = false })
  ty.no_grad(function() layer.weight:copy_(ty.eye(2)) end)
  nn.orthogonal(layer)
  ty.no_grad(function() layer.parametrizations.weight.original["1, 0"] = 0.3 end)
  layer(ty.zeros({ 1, 2 }, { dtype = "f64" }))
  check.close(layer.weight:tolist(), { { math.cos(0.3), -math.sin(0.3) }, { math.sin(0.3), math.cos(0.3) } }, 1e-12)
  check.fails(function() nn.orthogonal(nn.LayerNorm(3)) end, "orthogonal: name: expected matrices")
  check.fails(function() nn.orthogonal(nn.ReLU()) end, "orthogonal: name: expected a parameter of ReLU")
  check.fails(function() nn.orthogonal(nn.Linear(2, 2), { map = "householder" }) end, "map: expected")
end)

check.test("recurrent layers: lengths", function()
  local layer, x = nn.LSTM(2, 3), ty.randn(2, 4, 2)
  check.fails(function() layer(x, { lengths = { 4 } }) end, "LSTM: lengths: expected 2 integers")
  check.fails(function() layer(x, { lengths = { 4, 5 } }) end, "lengths: expected numbers in [0, 4], the steps of x")
  check.fails(function() layer(x, { length = { 4, 4 } }) end, "no option 'length'")
  local h, c = ty.randn(1, 2, 3), ty.randn(1, 2, 3)
  local y, hn, cn = layer(x, h, c, { lengths = { 0, 4 } })
  check.equal(y:select(0, 0):tolist(), ty.zeros(4, 3):tolist(), "no step")
  check.close(hn:select(1, 0):tolist(), h:select(1, 0):tolist(), 1e-6, "the state stays")
  check.close(cn:select(1, 0):tolist(), c:select(1, 0):tolist(), 1e-6)
end)

check.finish()
