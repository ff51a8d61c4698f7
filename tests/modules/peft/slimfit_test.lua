-- peft.slimfit, and what it is made of: peft.saved and peft.packed.
local check = dofile((arg[0]:match ".*/" or "./") .. "../../lua/check.lua")
local ty = require "tycho"
local models = require "tycho.models"
local peft = require "tycho.peft"

local saved, packed, slimfit = peft.saved, peft.packed, peft.slimfit

local function vit()
  ty.manual_seed(1)
  local model = models.ViTForImageClassification { image_size = 16, patch_size = 4, hidden_size = 32,
    intermediate_size = 128, num_hidden_layers = 3, num_attention_heads = 2, num_labels = 4 }
  ty.no_grad(function()
    for _, p in ipairs(model:parameters()) do if p.ndim == 2 then p:mul_(3) end end
  end)
  return model
end

ty.manual_seed(2)
local pictures, labels = ty.randn(6, 3, 16, 16), ty.randint(0, 4, { 6 })

local function loss_of(model) return function() return model:loss(pictures, labels) end end

local function gradients(model)
  local list = {}
  for name, p in model:named_parameters() do list[name] = p.grad and p.grad:clone() end
  return list
end

local function relative(a, b) return (a - b):norm():item() / b:norm():item() end

check.test("the meter: one storage once, parameters never, by layer and kind", function()
  local linear = ty.nn.Linear(8, 16)
  local x = ty.randn(4, 8):requires_grad_()
  local report, y = saved.measure(linear, function() return linear(x):exp():sum() end)
  check.equal({ report.bytes, report.dynamic, report.static }, { (32 + 64) * 4, 32 * 4, 64 * 4 })
  check.equal(report.by_kind, { ["linear.x"] = 128, ["exp.output"] = 256 })
  check.equal(report.layers[1], { name = "", bytes = 384, dynamic = 128, static = 256 })
  y:backward()
  check.ok(linear.weight.grad ~= nil, "gradients go through")
  local twice = saved.measure(linear, function() return linear(x) + linear(x) end)
  check.equal(twice.bytes, 128)
end)

check.test("dynamic is what freezing takes away, layer by layer", function()
  local model = vit()
  local all = saved.measure(model, loss_of(model))
  local by_name = {}
  for _, layer in ipairs(all.layers) do by_name[layer.name] = layer end
  local query = by_name["vit.encoder.layer.1.attention.attention.query"]
  local tokens = 6 * 17
  check.equal(query.dynamic, tokens * 32 * 4)
  local mlp = by_name["vit.encoder.layer.1.output.dense"]
  check.equal(mlp.dynamic, tokens * 128 * 4)
  check.equal(all.by_kind["gelu.x"], 3 * tokens * 128 * 4)
  -- Frozen, all of it but what the first layer, whose patches are a convolution, keeps.
  for name, p in model:named_parameters() do
    if name:find "encoder" and p.ndim == 2 then p:requires_grad_(false) end
  end
  local frozen = saved.measure(model, loss_of(model))
  check.equal(all.bytes - frozen.bytes, 3 * tokens * (32 * 3 + 128) * 4)
  check.equal(frozen.by_kind["gelu.x"], all.by_kind["gelu.x"])
end)

check.test("codecs keep to their bounds", function()
  ty.manual_seed(3)
  local x = ty.randn(64, 96) * 3
  local blocks = x:reshape(-1, 32)
  local most = blocks:abs():amax({ 1 }, true)
  for name, bound in pairs { q8_0 = 1 / 254 + 1 / 2048, q4_0 = 1 / 8 + 1 / 512 } do
    local y, bytes = packed.through(x, name)
    check.ok(((y:reshape(-1, 32) - blocks):abs() / most):amax():item() <= bound, name)
    check.equal(bytes, x:numel() // 32 * (name == "q8_0" and 34 or 18))
  end
  local y, bytes = packed.through(x, "fixed4")
  check.equal(bytes, x:numel() // 2)
  check.equal((y - (x * 2):round():clamp(-8, 7) / 2):abs():amax():item(), 0)
  y, bytes = packed.through(x, "prune")
  check.equal(bytes, 64 * (9 * 4 + 4))
  local far = (x - x:mean(1, true))
  local left = (y - x:mean(1, true))
  check.equal(left:ne(0):sum():item(), 64 * 9)
  check.ok((left - far):abs():masked_select(left:ne(0)):amax():item() < 1e-2, "what is kept is kept")
  check.ok(far:abs():masked_select(left:eq(0)):reshape(64, 87):amax():item()
    <= far:abs():masked_select(left:ne(0)):amax():item())
  local odd = ty.randn(3, 5)
  check.equal((packed.through(odd, "q8_0") - odd):abs():amax():item(), 0, "what does not fit stays")
end)

check.test("a view is packed with its storage, and comes back as the view", function()
  local x = ty.randn(4, 64):requires_grad_()
  local w = ty.ones(8, 4):requires_grad_()
  local y = packed.run({ kinds = { ["mul.x"] = "q8_0" }, smallest = 0 }, function()
    return ty.mul((x * 1):transpose(0, 1):narrow(0, 3, 8), w)
  end)
  y:sum():backward()
  local got = x:detach():transpose(0, 1):narrow(0, 3, 8)
  check.ok((w.grad - got):abs():amax():item() < 0.02 and (w.grad - got):abs():amax():item() > 0)
  check.fails(function() y:sum():backward() end, "")
end)

check.test("the packed backward pass is the exact one of the packed values", function()
  ty.manual_seed(4)
  local x, g = (ty.randn(8, 64) * 2):requires_grad_(), ty.randn(8, 64)
  local function gradient(fn)
    return ty.grad(fn(function() return (x * 1):gelu() end), { x }, { grad_outputs = { g } })[1]
  end
  local function through(fn) return packed.run({ kinds = { ["gelu.x"] = "fixed4" }, smallest = 0 }, fn) end
  local coded = packed.through(x, "fixed4"):requires_grad_()
  coded:gelu():backward(g)
  check.ok((gradient(through) - coded.grad):abs():amax():item() < 1e-6)
  -- The slope of GELU changes by at most 2 phi(0) a unit, and it is 0 or 1 to 1e-3 beyond -4 and 3.5.
  local off = (gradient(through) - gradient(function(fn) return fn() end)):abs() / g:abs()
  check.ok(off:amax():item() <= 0.25 * 0.7979 + 1e-3, off:amax():item())
end)

check.test("nothing frozen, nothing packed: plain training, bit for bit", function()
  local function train(slim)
    local model = vit()
    local optimizer = ty.optim.AdamW(model, { lr = 1e-2 })
    local s = slim and slimfit.attach(model, { freeze = 0, pack = false })
    local losses = {}
    for i = 1, 4 do
      if s then
        losses[i] = s:step(optimizer, loss_of(model))
      else
        local loss = model:loss(pictures, labels)
        optimizer:step(loss)
        losses[i] = loss:item()
      end
    end
    if s then s:detach() end
    return model:state_dict(), losses
  end
  local a, first = train(true)
  local b, second = train(false)
  check.equal(first, second)
  for name, t in pairs(b) do check.ok(ty.equal(a[name], t), name) end
end)

check.test("active layers between frozen ones get their whole gradients", function()
  local model = vit()
  model:loss(pictures, labels):backward()
  local all = gradients(model)
  model:zero_grad()
  local slim = slimfit.attach(model, { freeze = 0.8, pack = false })
  local active = slim:begin()
  check.equal(#active, slim.active)
  slim:run(loss_of(model)):backward()
  local some, count = gradients(model), 0
  for i, name in ipairs(slim.names) do
    local is_active = false
    for _, k in ipairs(active) do is_active = is_active or k == i end
    check.equal(some[name] ~= nil, is_active, name)
    if is_active then
      count = count + 1
      check.ok((some[name] - all[name]):abs():amax():item() <= 1e-6 * (1 + all[name]:abs():amax():item()), name)
    end
  end
  check.equal(count, slim.active)
  check.ok(some["classifier.weight"] and some["vit.layernorm.bias"], "heads and biases are trained")
  slim:detach()
  for _, p in ipairs(model:parameters()) do check.ok(p.requires_grad) end
end)

check.test("packed gradients are near the exact ones, and the forward pass is the same", function()
  local model = vit()
  local exact = model:loss(pictures, labels)
  exact:backward()
  local all = gradients(model)
  model:zero_grad()
  local fine = {}
  for kind in pairs(slimfit.kinds) do fine[kind] = "q8_0" end
  local kept = {}
  for _, case in ipairs { { fine, 0.05, "wide" }, { fine, 0.05, "all" }, { slimfit.kinds, 0.3, "wide" } } do
    local slim = slimfit.attach(model, { freeze = 0, kinds = case[1], inputs = case[3] })
    slim:begin()
    collectgarbage()
    collectgarbage()
    local before = ty.memory.stats().live
    local loss = slim:run(loss_of(model))
    kept[#kept + 1] = ty.memory.stats().live - before
    check.equal(loss:item(), exact:item())
    loss:backward()
    for name, g in pairs(gradients(model)) do
      if all[name]:norm():item() > 1e-4 then
        check.ok(relative(g, all[name]) < case[2], name .. relative(g, all[name]))
      end
    end
    slim:detach()
    model:zero_grad()
  end
  -- Of inputs that are 32 wide each block has three that are not packed otherwise: before queries, keys and values,
  -- before the output of attention, before the network.
  check.ok(kept[2] < kept[1] - 3 * 2 * 6 * 17 * (32 * 4 - 34), "inputs of all layers are packed")
end)

check.test("the smallest distances are frozen, the frozen keep theirs, everyone gets a turn", function()
  local model = vit()
  local slim = slimfit.attach(model, { freeze = 0.75 })
  local optimizer = ty.optim.SGD(model, { lr = 1e-2 })
  local n, trained = #slim.names, {}
  for _ = 1, math.ceil(n / slim.active) do
    local before = table.move(slim.distances, 1, n, 1, {})
    local weights = {}
    for i, p in ipairs(slim.weights) do weights[i] = p:detach():clone() end
    slim:step(optimizer, loss_of(model))
    local active, chosen, least = slim.history[#slim.history], {}, math.huge
    for _, i in ipairs(active) do
      check.ok(#slim.history > n // slim.active or not trained[i], "nobody twice before all had their turn")
      chosen[i], trained[i], least = true, true, math.min(least, before[i])
      local want = (slim.weights[i]:detach() - weights[i]):abs():sum():item() / weights[i]:abs():sum():item()
      check.close(slim.distances[i], want, 1e-4 * want + 1e-9)
    end
    for i = 1, n do
      if not chosen[i] then
        check.ok(before[i] <= least and slim.distances[i] == before[i])
        check.ok(ty.equal(slim.weights[i]:detach(), weights[i]), "frozen weights stay")
      end
    end
  end
  for i = 1, n do check.ok(trained[i], slim.names[i]) end
  local map = slim:map()
  check.equal(map.shape, { n, #slim.history })
  check.equal(map:to("i64"):sum():item(), slim.active * #slim.history)
  slim:detach()
end)

check.test("what to compare with: random turns, the upper layers alone", function()
  local model = vit()
  local optimizer = ty.optim.SGD(model, { lr = 1e-3 })
  local lower = slimfit.attach(model, { freeze = 0.5, by = "lower" })
  for _ = 1, 3 do lower:step(optimizer, loss_of(model)) end
  check.equal(lower.history[1], lower.history[3])
  check.equal(lower.history[1][lower.active], #lower.names)
  lower:detach()
  local drawn = slimfit.attach(model, { freeze = 0.5, by = "random", seed = 5 })
  for _ = 1, 3 do drawn:step(optimizer, loss_of(model)) end
  local again = slimfit.attach(vit(), { freeze = 0.5, by = "random", seed = 5 })
  check.equal(again:begin(), drawn.history[1])
end)

check.test("a step takes less memory than plain training", function()
  local big = ty.randn(24, 3, 32, 32)
  local function peak(freeze)
    ty.manual_seed(1)
    local model = models.ViTForImageClassification { image_size = 32, patch_size = 4, hidden_size = 64,
      intermediate_size = 256, num_hidden_layers = 10, num_attention_heads = 2, num_labels = 4 }
    local optimizer = ty.optim.SGD(model, { lr = 1e-3 })
    local target = ty.zeros({ 24 }, { dtype = "i64" })
    local function fn() return model:loss(big, target) end
    local slim = freeze and slimfit.attach(model, { freeze = freeze })
    local function step()
      if slim then return slim:step(optimizer, fn) end
      ty.scope(function() optimizer:step(fn()) optimizer:zero_grad() end)
    end
    step()
    collectgarbage()
    collectgarbage()
    local before = ty.memory.stats().live
    ty.memory.reset_peak()
    step()
    return ty.memory.stats().peak - before
  end
  local plain, slim = peak(nil), peak(0.9)
  check.ok(plain > 2.5 * slim, ("%d and %d bytes"):format(plain, slim))
end)

check.test("mistakes", function()
  check.fails(function() slimfit.attach(vit(), { freeze = 1 }) end, "freeze: expected a number in [0, 1), got 1")
  check.fails(function() slimfit.attach(ty.nn.Linear(2, 2), {}) end, "expected at least two weights to train, got 1")
  check.fails(function() packed.run({ kinds = { ["gelu.x"] = "q3" } }, print) end, "expected one of none, q8_0")
  check.fails(function() packed.through(ty.ones(2), "q3") end, "peft.packed.through: name: expected one of none")
  check.fails(function() slimfit.attach(vit()):update(ty.optim.SGD({ ty.ones(2):requires_grad_() })) end,
    "expected begin() before it")
  check.fails(function() slimfit.attach(vit()):step(ty.optim.SGD(vit(), { lr = 1 }), function() end) end,
    "expected it to return the loss, got nil")
end)

check.finish()
