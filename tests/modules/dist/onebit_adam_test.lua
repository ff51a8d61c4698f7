-- 1-bit Adam: bits and scales against what they stand for, what is sent and what is remembered, and steps without
-- compression, and before it, against plain rules.
local here = arg and arg[0]:match ".*/" or "tests/modules/dist/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local dist = require "tycho.dist"

check.test("signs as bits and back", function()
  local x = ty.tensor { 1, -1, 0, -0.5, 2, -3, -4, 5, -1, -1, -1, -1, -1, -1, -1, 7 }
  check.equal(dist.pack_signs(x):tolist(), { 1 + 4 + 16 + 128, 128 })
  check.equal(dist.unpack_signs(dist.pack_signs(x)):tolist(),
    { 1, -1, 1, -1, 1, -1, -1, 1, -1, -1, -1, -1, -1, -1, -1, 1 })
  local all = ty.arange(256):to "u8"
  check.equal(dist.pack_signs(dist.unpack_signs(all, "f64")):tolist(), all:tolist())
  local many = ty.randn(8000)
  check.equal(dist.unpack_signs(dist.pack_signs(many)):tolist(), ty.where(many:ge(0), 1.0, -1.0):tolist())
  check.equal(dist.pack_signs(many):nbytes(), 1000)
end)

-- The same exchange by one rank that has everything, in f64 with loops.
local function reference(list, errors, server_errors, n, block)
  local size = #list
  local padded = (n + size * block - 1) // (size * block) * size * block
  local part = padded // size
  local function compress(values, first, count)
    local out = {}
    for b = 0, count // block - 1 do
      local sum, real = 0.0, 0
      for i = b * block + 1, (b + 1) * block do
        sum = sum + values[i] ^ 2
        if first + i <= n then real = real + 1 end
      end
      local scale = math.sqrt(sum / math.max(1, real))
      for i = b * block + 1, (b + 1) * block do out[i] = values[i] >= 0 and scale or -scale end
    end
    return out
  end
  local mean = {}
  for i = 1, padded do mean[i] = 0.0 end
  for r = 1, size do
    local whole = {}
    for i = 1, padded do whole[i] = (list[r][i] or 0.0) + errors[r][i] end
    local sent = compress(whole, 0, padded)
    for i = 1, padded do
      errors[r][i] = i <= n and whole[i] - sent[i] or 0.0
      mean[i] = mean[i] + sent[i] / size
    end
  end
  local result = {}
  for r = 1, size do
    local own = {}
    for i = 1, part do own[i] = mean[(r - 1) * part + i] + server_errors[r][i] end
    local sent = compress(own, (r - 1) * part, part)
    for i = 1, part do
      local at = (r - 1) * part + i
      server_errors[r][i] = at <= n and own[i] - sent[i] or 0.0
      if at <= n then result[at] = sent[i] end
    end
  end
  return result
end

check.test("the exchange is that of one rank with everything", function()
  local n, block, size = 83, 8, 3
  local got = dist.run(size, function(group)
    local t, d = require "tycho", require "tycho.dist"
    local mean = d.sign_mean(group, n, { block = block, dtype = "f64" })
    local results = {}
    for step = 1, 4 do
      t.manual_seed(10 * step + group.rank)
      results[step] = mean:mean(t.randn({ n }, { dtype = "f64" })):tolist()
    end
    return { results, mean.error:tolist(), mean.server_error:tolist() }
  end)
  local errors, server_errors = {}, {}
  for r = 1, size do
    errors[r], server_errors[r] = {}, {}
    for i = 1, 96 do errors[r][i], server_errors[r][i] = 0.0, 0.0 end
  end
  for step = 1, 4 do
    local list = {}
    for r = 1, size do
      ty.manual_seed(10 * step + r - 1)
      list[r] = ty.randn({ n }, { dtype = "f64" }):tolist()
    end
    local want = reference(list, errors, server_errors, n, block)
    for r = 1, size do check.close(got[r][1][step], want, 1e-12, "step " .. step) end
  end
  for r = 1, size do
    check.close(got[r][2], errors[r], 1e-12)
    check.close(got[r][3], table.move(server_errors[r], 1, 32, 1, {}), 1e-12)
  end
end)

check.test("what was sent and what is remembered is what was to be sent", function()
  local n = 500
  local got = dist.run(2, function(group)
    local t, d = require "tycho", require "tycho.dist"
    local mean = d.sign_mean(group, n, { block = 64, dtype = "f64" })
    local forgetful = d.sign_mean(group, n, { block = 64, dtype = "f64", feedback = false })
    local said, wanted, forgotten = t.zeros({ n }, { dtype = "f64" }), t.zeros({ n }, { dtype = "f64" }), nil
    for step = 1, 20 do
      t.manual_seed(10 * step + group.rank)
      local x = t.randn({ n }, { dtype = "f64" }) + t.linspace(-0.5, 0.5, n):to "f64"
      wanted:add_(group:all_reduce(x:clone(), "mean"))
      forgotten = forgetful:mean(x:clone())
      said:add_(mean:mean(x))
    end
    -- All that was said, and the means of what is still remembered, on both ways.
    local owed = group:all_reduce(mean.error:clone(), "mean") + group:all_gather(mean.server_error)
    return { (said + owed:narrow(0, 0, n) - wanted):abs():max():item(), owed:abs():max():item(),
      forgetful.error:abs():max():item(), group:all_reduce(forgotten:clone(), "max"):equal(forgotten) }
  end)
  for rank = 1, 2 do
    check.equal(got[rank][1] < 1e-12, true, got[rank][1])
    check.equal(got[rank][2] > 0.1, true)
    check.equal({ got[rank][3], got[rank][4] }, { 0, true })
  end
end)

check.test("bytes on their way", function()
  local got = dist.run(4, function(group)
    local t, d = require "tycho", require "tycho.dist"
    local n = 1 << 16
    local mean = d.sign_mean(group, n)
    mean:mean(t.randn(n))
    local bits = group:traffic().bytes
    group:all_reduce(t.randn(n))
    return (group:traffic().bytes - bits) / bits
  end)
  check.close(got[1], 32 / (1 + 32 / 128), 1e-6)
end)

-- A small network on ranks: parameters after steps of an optimizer that make(t, d, group, net) gives.
local function train(group, steps, make)
  local t, d = require "tycho", require "tycho.dist"
  t.manual_seed(1)
  local net = t.nn.Sequential(t.nn.Linear(5, 8), t.nn.Tanh(), t.nn.Linear(8, 2)):to "f64"
  local optimizer = make(t, d, group, net)
  for step = 1, steps do
    local x = (t.arange(60):reshape(12, 5):to "f64" * (step + 1)):sin()
    local y = (x:narrow(1, 0, 2) * 2):cos()
    local share = 12 // group.size
    x, y = x:narrow(0, share * group.rank, share), y:narrow(0, share * group.rank, share)
    optimizer:step((net(x) - y):square():mean())
  end
  local out = {}
  for _, p in ipairs(net:parameters()) do for _, v in ipairs(p:detach():flatten():tolist()) do out[#out + 1] = v end end
  return { out, optimizer.frozen }
end

check.test("warm-up is AdamW", function()
  local want = dist.run(1, train, nil, 12, function(t, _, _, net)
    return t.optim.AdamW(net:parameters(), { lr = 0.01, weight_decay = 0.1 })
  end)[1]
  local got = dist.run(3, train, nil, 12, function(_, d, group, net)
    return d.onebit_adam(group, net, { lr = 0.01, weight_decay = 0.1, warmup = 12 })
  end)
  for rank = 1, 3 do check.close(got[rank][1], want[1], 1e-12) end
  check.equal(got[1][2], 12)
end)

check.test("without compression it is momentum over a frozen variance", function()
  -- By one rank, in plain ops.
  local want = dist.run(1, train, nil, 15, function(t, _, _, net)
    local list, m, v, step = net:parameters(), {}, {}, 0
    for i, p in ipairs(list) do m[i], v[i] = t.zeros_like(p), t.zeros_like(p) end
    return { step = function(_, loss)
      step = step + 1
      for _, p in ipairs(list) do p:set_grad() end
      loss:backward()
      t.no_grad(function()
        for i, p in ipairs(list) do
          m[i] = 0.9 * m[i] + 0.1 * p.grad
          if step <= 5 then v[i] = 0.999 * v[i] + 0.001 * p.grad:square() end
          local root = (v[i] / (1 - 0.999 ^ math.min(step, 5))):sqrt() + 1e-8
          p:sub_(0.01 / (1 - 0.9 ^ step) * m[i] / root)
        end
      end)
    end }
  end)[1]
  local function onebit(compressed)
    return dist.run(2, train, nil, 15, function(_, d, group, net)
      return d.onebit_adam(group, net, { lr = 0.01, warmup = 5, compressed = compressed, block = 8 })
    end)
  end
  local got = onebit(false)
  for rank = 1, 2 do check.close(got[rank][1], want[1], 1e-12) end
  got = onebit(true)
  check.equal(got[1][1], got[2][1], "all ranks have the same parameters")
  local far = 0
  for i, value in ipairs(got[1][1]) do far = math.max(far, math.abs(value - want[1][i])) end
  check.equal(far > 1e-4, true, far)
end)

check.test("the end of the warm-up", function()
  -- Gradients that shrink: the variance of 10 steps before is larger until they no longer do.
  local got = dist.run(2, function(group)
    local t, d = require "tycho", require "tycho.dist"
    local p = t.zeros(16):requires_grad_()
    local adam = d.onebit_adam(group, { p }, { beta2 = 0.9, block = 8 })
    local step, sums, v = 0, {}, 0
    while not adam.frozen and step < 200 do
      step = step + 1
      local size = math.max(0.1, 1 - step / 40)
      adam:step((p * size):sum())
      v = 0.9 * v + 0.1 * size ^ 2
      sums[step] = v / (1 - 0.9 ^ step)
    end
    local first
    for i = 11, step do if not first and sums[i] >= 0.96 * sums[i - 10] then first = i end end
    return { adam.frozen, first }
  end)
  check.equal(got[1][1], got[1][2])
  check.equal(got[1][1] > 40 and got[1][1] < 100, true, got[1][1])
  check.equal(got[2][1], got[1][1])
end)

check.test("what never had a gradient stays", function()
  local got = dist.run(2, function(group)
    local t, d = require "tycho", require "tycho.dist"
    local p = t.ones(16):requires_grad_()
    local adam = d.onebit_adam(group, { p }, { warmup = 2, block = 8 })
    for _ = 1, 6 do adam:step((p:narrow(0, 0, 4) * (1 + group.rank)):sum()) end
    return p:detach():tolist()
  end)
  for i = 5, 16 do check.equal(got[1][i], 1) end
  check.equal(got[1][1] < 0.997, true)
end)

check.test("arguments", function()
  local function alone(text, fn) check.fails(function() dist.run(1, fn) end, text) end
  check.fails(function() dist.pack_signs(ty.ones(7)) end, "x: expected one dimension of a multiple of 8 elements")
  check.fails(function() dist.unpack_signs(ty.ones(8)) end, "bits: expected u8 [n], got f32")
  check.fails(function() dist.sign_mean(3) end, "dist.sign_mean: group: expected a group, got 3")
  alone("block: expected a multiple of 8, got 12", function(g)
    require("tycho.dist").sign_mean(g, 3, { block = 12 })
  end)
  alone("SignMean:mean: x: expected 3 elements of f32", function(g)
    require("tycho.dist").sign_mean(g, 3):mean(require("tycho").ones(4))
  end)
  check.fails(function() dist.onebit_adam(3) end, "dist.onebit_adam: group: expected a group, got 3")
  alone("warmup: expected an integer >= 1, got 0", function(g)
    require("tycho.dist").onebit_adam(g, { require("tycho").ones(4):requires_grad_() }, { warmup = 0 })
  end)
end)

check.finish()
