-- Long convolutions as networks: against loops, what a position sees, squashing and its gradient, learning, mistakes.
local check = dofile((arg[0]:match ".*/" or "./") .. "../../lua/check.lua")
local ty = require "tycho"
local models = require "tycho.models"

local LongConv = models.LongConv

check.test("squashing takes so much off the size of each tap, and small ones learn nothing", function()
  local k = ty.tensor({ -0.5, -0.1, 0, 0.05, 0.1, 0.3 }, { dtype = "f64" }):requires_grad_()
  local y = LongConv.squash(k, 0.1)
  check.close(y:tolist(), { -0.4, 0, 0, 0, 0, 0.2 }, 1e-12)
  check.equal(ty.grad(y:sum(), { k })[1]:lt(0.5):tolist(), { false, true, true, true, true, false })
end)

check.test("averages are those of neighbours, with zeros beyond the ends", function()
  local k = ty.randn({ 2, 9 }, { dtype = "f64" })
  local y, rows = LongConv.smooth(k, 3):tolist(), k:tolist()
  for c = 1, 2 do
    for i = 1, 9 do
      check.close(y[c][i], ((rows[c][i - 1] or 0) + rows[c][i] + (rows[c][i + 1] or 0)) / 3, 1e-12)
    end
  end
end)

-- What a layer gives, tap by tap.
local function by_loop(conv, x)
  local kernel, skip, rows = conv:regular():tolist(), conv.skip:tolist(), x:tolist()
  local y = {}
  for n, channels in ipairs(rows) do
    y[n] = {}
    for c, line in ipairs(channels) do
      y[n][c] = {}
      for t = 1, #line do
        local sum = skip[c] * line[t]
        for j, tap in ipairs(kernel[c]) do sum = sum + tap * (line[t + conv.ahead - j + 1] or 0) end
        y[n][c][t] = sum
      end
    end
  end
  return y
end

check.test("a layer is the sum over its taps and the skip, for sequences of any length", function()
  for _, both in ipairs { false, true } do
    local model = LongConv { width = 3, taps = 6, both = both, squash = 0.001, layers = 1 }:to "f64"
    local conv = model.blocks[1].conv
    for _, t in ipairs { 1, 4, 6, 11 } do
      local x = ty.randn({ 2, 3, t }, { dtype = "f64" })
      check.close(conv(x):tolist(), by_loop(conv, x), 1e-12)
    end
    check.equal(conv(ty.zeros({ 2, 3, 0 }, { dtype = "f64" })).shape, { 2, 3, 0 })
  end
end)

check.test("a position sees what came before, and what comes later only where it may", function()
  local function seen(both)
    ty.manual_seed(0)
    local model = LongConv { inputs = 2, outputs = 3, width = 8, layers = 2, taps = 40, both = both, pool = false }
    local x = ty.randn(1, 40, 2)
    local other = x:clone()
    other:narrow(1, 20, 1):fill_(3)
    local apart = (model(x) - model(other)):abs():amax({ 0, 2 })
    return apart:narrow(0, 0, 20):max():item() > 1e-4, apart:narrow(0, 39, 1):item() > 1e-4
  end
  check.equal({ seen(false) }, { false, true })
  check.equal({ seen(true) }, { true, true })
end)

check.test("kernels begin as noise, alike or decaying faster from channel to channel", function()
  ty.manual_seed(1)
  local function sizes(o)
    local k = LongConv { width = 32, taps = 400, layers = 1, squash = 0, decay = o }.blocks[1].conv:regular():square()
    local function rms(x) return math.sqrt(x:mean():item()) end
    return rms(k:narrow(1, 0, 40)), rms(k:narrow(1, 360, 40)), rms(k:narrow(0, 31, 1):narrow(1, 360, 40))
  end
  local first, last = sizes(false)
  check.close({ first, last }, { 0.002, 0.002 }, 2e-4)
  local near, far, quick = sizes(true)
  check.ok(near > 0.012 and far < near / 2 and quick < 1e-5, ("%g %g %g"):format(near, far, quick))
end)

check.test("the share of taps that are zero is that of the layers' kernels", function()
  local model = LongConv { width = 4, taps = 50, squash = 0.002, decay = false, layers = 2 }
  local zeros = 0
  for _, block in ipairs(model.blocks) do
    zeros = zeros + block.conv.kernel:abs():le(0.002):to("f32"):mean():item() / 2
  end
  check.close(model:zeros(), zeros, 1e-6)
end)

check.test("it learns to reach back over a gap, from tokens", function()
  local copying = require("tycho.datasets").copying
  ty.manual_seed(0)
  local model = LongConv { vocabulary = copying.vocabulary, outputs = copying.symbols, width = 16, layers = 2,
    taps = 120, pool = false, decay = false, squash = 0.001 }
  local optimizer = ty.optim.AdamW(model:parameters(), { lr = 1e-2, weight_decay = 0 })
  ty.train.minimize(optimizer, 120, function(step)
    local tokens, wanted = copying.draw(16, 100, { seed = step })
    return ty.cross_entropy(copying.answers(model(tokens)):flatten(0, 1), wanted:flatten())
  end)
  local share = copying.share(model, copying.draw(50, 100, { seed = 1000 }))
  check.ok(share > 0.95, share)
end)

check.test("mistakes", function()
  check.fails(function() LongConv { smooth = 2 } end, "LongConv: smooth: expected an odd number, got 2")
  check.fails(function() LongConv { taps = 0 } end, "LongConv: taps: expected an integer >= 1")
  check.fails(function() LongConv { tap = 5 } end, "LongConv: .*tap")
  check.fails(function() LongConv { inputs = 2 }(ty.ones(1, 5, 3)) end, "LongConv: x: expected %[n, t, 2%]")
  check.fails(function() LongConv { vocabulary = 5 }(ty.ones(1, 5, 3)) end, "LongConv: x: expected tokens %[n, t%]")
end)

check.finish()
