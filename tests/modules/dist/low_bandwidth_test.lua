-- Three levels of links: without rounding it trains as one rank does, with it what goes where is counted.
local here = arg and arg[0]:match ".*/" or "tests/modules/dist/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local dist = require "tycho.dist"
local blocks = require "tycho.dist.blocks"

check.test("blocks of few bits", function()
  local x = ty.randn(512)
  x:narrow(0, 64, 32):zero_()
  for _, bits in ipairs { 8, 4 } do
    local codes, scales = blocks.quantize(x, bits, 32)
    check.equal({ codes:nbytes(), scales:numel() }, { 512 * bits // 8, 16 })
    local back = blocks.dequantize(codes, scales, bits, 32)
    local levels = bits == 8 and 127 or 7
    for b = 0, 15 do
      local part = x:narrow(0, 32 * b, 32)
      local off = (back:narrow(0, 32 * b, 32) - part):abs():max():item()
      check.equal(off <= part:abs():max():item() / levels / 2 * 1.0001, true, off)
    end
    check.equal(back:narrow(0, 64, 32):abs():max():item(), 0)
    local again = { blocks.quantize(back, bits, 32) }
    check.equal(again[1]:tolist(), codes:tolist(), "what is rounded stays")
  end
  local codes = blocks.quantize(ty.tensor { -7, 7, 0, 1, 2, 3, -4, -5 }, 4, 8)
  check.equal(codes:tolist(), { 1 + 16 * 15, 8 + 16 * 9, 10 + 16 * 11, 4 + 16 * 3 })
end)

-- Losses and parameters after steps; options nil: by one rank.
local function train(group, steps, dtype, options)
  local t, d = require "tycho", require "tycho.dist"
  t.manual_seed(2)
  local net = t.nn.Sequential(t.nn.Embedding(13, 12), t.nn.Linear(12, 20), t.nn.Tanh(), t.nn.Linear(20, 20),
    t.nn.GELU(), t.nn.LayerNorm(20), t.nn.Linear(20, 13)):to(dtype)
  local function make(list) return t.optim.AdamW(list, { lr = 0.01 }) end
  local engine
  if options then
    options.optimizer = make
    engine = d.low_bandwidth(group, net, options)
  end
  local optimizer = not engine and make(net:parameters())
  local share, losses = 24 // group.size, {}
  for step = 1, steps do
    local places = t.arange(share) + share * group.rank + 5 * step
    local function loss() return t.cross_entropy(net((places * 7 % 13):to "i64"), (places * places % 13):to "i64") end
    if engine then
      losses[step] = engine:step(loss)
      losses[step] = group:all_reduce(t.tensor(losses[step], { dtype = "f64" }), "mean"):item()
    else
      local value = loss()
      optimizer:step(value)
      losses[step] = value:item()
    end
  end
  if engine then engine:close() end
  local values = {}
  for i, p in ipairs(net:parameters()) do values[i] = p:detach():to("f64"):flatten():tolist() end
  return { losses = losses, values = values }
end

check.test("without rounding it trains as one rank does", function()
  local want = dist.run(1, train, nil, 5, "f64")[1]
  for _, case in ipairs { { 4, 4, 2 }, { 8, 4, 2 }, { 8, 4, 4 }, { 6, 2, 1 }, { 8, 2, 2 } } do
    local got = dist.run(case[1], train, nil, 5, "f64", { per_node = case[2], pair = case[3], weights = 0,
      gradients = 0 })
    for rank, out in ipairs(got) do
      local where = ("%d ranks, %d a machine, %d a pair: rank %d"):format(case[1], case[2], case[3], rank - 1)
      check.close(out.losses, want.losses, 1e-12, where)
      for i, values in ipairs(want.values) do check.close(out.values[i], values, 1e-12, where) end
    end
  end
end)

check.test("with rounding it trains nearly so, the same on all ranks", function()
  local want = dist.run(1, train, nil, 12, "f32")[1]
  local got = dist.run(4, train, nil, 12, "f32", { per_node = 2, pair = 2 })
  for rank = 2, 4 do check.equal(got[rank].values, got[1].values) end
  check.close(got[1].losses, want.losses, 0.1)
  check.equal(math.abs(got[1].losses[12] - want.losses[12]) > 1e-6, true)
end)

check.test("what leaves a machine", function()
  local got = dist.run(8, function(group)
    local t, d = require "tycho", require "tycho.dist"
    t.manual_seed(1)
    local layers = {}
    for i = 1, 4 do layers[i] = t.nn.Linear(64, 64, { bias = false }) end
    local function crossed(make)
      local net = t.nn.Sequential(table.unpack(layers))
      local engine, before = make(net), nil
      for _ = 1, 2 do
        before = engine:traffic().crossed
        engine:step(function() return net(t.ones(2, 64)):square():mean() end)
      end
      local after = engine:traffic().crossed
      engine:close()
      return after - before
    end
    local plain = crossed(function(net) return d.zero(group, net, { stage = 3 }) end)
    local low = crossed(function(net) return d.low_bandwidth(group, net, { per_node = 4 }) end)
    return { plain, low }
  end, { per_node = 4 })
  local n = 4 * 64 * 64
  local plain, low = 0, 0
  for rank = 1, 8 do plain, low = plain + got[rank][1] / n, low + got[rank][2] / n end
  -- Of two machines each: 3 passes of 4 bytes by the ring, without one gather of the last layer.
  check.close(plain, 2 * 7 / 8 * 4 * (3 - 1 / 4), 0.01)
  -- 4 bits of gradients and 8 of weights, each to one other machine, and their scales of 32 bits for 256 elements.
  check.close(low, 2 * (1 / 2) * (1 / 2 + 1 + 2 * 4 / 256), 0.01)
end)

check.test("arguments", function()
  local function alone(text, options)
    check.fails(function()
      dist.run(2, function(g, o) require("tycho.dist").low_bandwidth(g, require("tycho").nn.Linear(2, 2), o) end, nil,
        options)
    end, text)
  end
  check.fails(function() dist.low_bandwidth(3) end, "dist.low_bandwidth: group: expected a group, got 3")
  alone("per_node: expected a divisor of the 2 ranks, got 3", { per_node = 3 })
  alone("pair: expected a divisor of the 2 ranks of a machine, got 3", { pair = 3 })
  alone("gradients: expected 4 or 8 or 0, got 3", { gradients = 3 })
end)

check.finish()
