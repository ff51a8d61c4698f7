-- ZeRO-Infinity: a tiled linear layer is the whole one, and its model trains as in memory; the parts come one by one,
-- so that a layer which the device cannot hold can be trained.
local here = (arg and arg[0]:match ".*/" or "tests/modules/offload/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local llm = require "tycho.llm"
local offload = require "tycho.offload"
local nn, optim = ty.nn, ty.optim

check.test("a tiled linear layer is the whole one", function()
  for _, size in ipairs { { 24, 40 }, { 7, 33 }, { 64, 64 } } do
    for _, bias in ipairs { true, false } do
      for _, bytes in ipairs { 100, 800, 4 * size[1] * 16 } do
        ty.manual_seed(size[1])
        local whole = nn.Sequential(nn.Linear(size[1], size[2], { bias = bias }))
        local tiled = whole:clone()
        check.equal(offload.tile(tiled, { bytes = bytes }), { "0" })
        local tiles = tiled[1].tiles
        local rows = math.max(1, bytes // (4 * size[1]))
        check.ok(#tiles >= (size[2] + rows - 1) // rows, "tiles enough")
        for _, tile in ipairs(tiles) do
          check.ok(tile.weight:nbytes() <= math.max(bytes, 4 * size[1]), "a tile is no larger than it may be")
        end
        local x, residual = ty.randn(5, size[1]):to "f64", ty.randn(5, size[2]):to "f64"
        whole:to "f64"
        tiled:to "f64"
        for _, activation in ipairs { "none", "gelu", "silu" } do
          local a, b = x:clone():requires_grad_(), x:clone():requires_grad_()
          local y, z = whole[1](a, residual, activation), tiled[1](b, residual, activation)
          check.close(z:tolist(), y:tolist(), 1e-12)
          y:square():sum():backward()
          z:square():sum():backward()
          check.close(b.grad:tolist(), a.grad:tolist(), 1e-10, "the gradient of its input")
        end
        local at = 0
        for _, tile in ipairs(tiled[1].tiles) do
          local n = tile.weight.shape[1]
          check.close(tile.weight.grad:tolist(), whole[1].weight.grad:narrow(0, at, n):tolist(), 1e-10)
          if bias then check.close(tile.bias.grad:tolist(), whole[1].bias.grad:narrow(0, at, n):tolist(), 1e-10) end
          at = at + n
        end
        check.equal(at, size[2])
        check.equal(offload.untile(tiled), { "0" })
        check.ok(tiled[1].weight:equal(whole[1].weight), "whole again")
        check.equal(getmetatable(tiled[1]), nn.Linear)
      end
    end
  end
end)

local function llama(tiles)
  ty.manual_seed(4)
  local model = llm.Llama { vocab_size = 64, hidden_size = 64, intermediate_size = 256, num_hidden_layers = 2,
    num_attention_heads = 2, num_key_value_heads = 2, max_position_embeddings = 32, tie_word_embeddings = true }
  if tiles then offload.tile(model, { bytes = 16384 }) end
  return model
end

local function loss_of(model, i)
  ty.manual_seed(i)
  local ids = ty.randint(0, 64, { 2, 17 })
  return nn.cross_entropy(model(ids:narrow(1, 0, 16)):reshape(32, -1), ids:narrow(1, 1, 16):reshape(-1))
end

local function train(model, plan)
  local optimizer = optim.AdamW(model, { lr = 1e-2 })
  local engine = plan and offload.engine(model, optimizer, plan)
  local losses = {}
  for i = 1, 3 do
    if engine then losses[i] = engine:step(loss_of, model, i)
    else
      ty.scope(function()
        local l = loss_of(model, i)
        optimizer:step(l)
        losses[i] = l:item()
      end)
    end
  end
  if engine then engine:close() end
  return losses, model:parameters()
end

check.test("training in tiles, over three places", function()
  local plain = train(llama(false))
  local losses, parameters = train(llama(true))
  for i, loss in ipairs(losses) do check.close(loss, plain[i], 1e-4, "as with whole layers") end
  for number = 0, 7 do
    local ahead, steps_within = number % 4, number > 3
    local theirs, others = train(llama(true), { parameters = "host", gradients = "file", moments = "file",
      smallest = 512, policy = offload.zero_infinity { window = 4, ahead = ahead, within = steps_within } })
    check.equal(theirs, losses)
    local differ = 0
    for i, p in ipairs(parameters) do differ = differ + (p:equal(others[i]) and 0 or 1) end
    check.equal(differ, 0, "parameters that differ from those in memory")
  end
end)

check.test("tiles come and go one by one", function()
  local model = llama(true)
  local engine = offload.engine(model, optim.SGD(model, { lr = 0.1 }), { parameters = "host", smallest = 512,
    policy = offload.zero_infinity { window = 2, ahead = 1 } })
  local seen = 0
  for _, unit in ipairs(engine.units) do
    local bytes = 0
    for _, p in ipairs(unit.params) do bytes = bytes + p:nbytes() end
    check.ok(bytes <= 16384, unit.name .. " is no larger than a tile")
    if unit.name:find "tiles" then seen = seen + 1 end
  end
  check.equal(seen, 2 * 3 * 4, "four tiles of each of three layers in each of two blocks")
  engine:step(loss_of, model, 1)
  engine:close()
end)

check.test("a weight that is shared stays whole; wrong arguments", function()
  local model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
  model[2].weight = model[1].weight
  check.equal(offload.tile(model, { bytes = 1024 }), {})
  check.fails(function() offload.tile(model, {}) end, "offload.tile: bytes: expected an integer >= 1, got nil")
  check.fails(function() offload.tile(model, { bytes = 0 }) end, "bytes: expected an integer >= 1, got 0")
  check.fails(function() offload.tile(3, { bytes = 1 }) end, "offload.tile: model: expected a module, got 3")
  check.fails(function() offload.untile(3) end, "offload.untile: model")
  check.fails(function() offload.zero_infinity { window = 2, ahead = 2 } end, "ahead")
end)

check.finish()
