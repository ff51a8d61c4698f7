-- Samplers beside a full one: counts, likeness, rows of a recipe's table.
local here = arg and arg[0]:match ".*/" or "tests/modules/diffusion/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local diffusion = require "tycho.diffusion"

ty.manual_seed(1)
local model = diffusion.DiT { size = 12, depth = 2, width = 32 }:eval()
ty.no_grad(function()
  for _, p in ipairs(model:parameters()) do p:add_(ty.randn_like(p) * 0.1) end
end)
local labels = { labels = ty.tensor { 1, 2, 3 } }

local function sampler(options)
  local o = { schedule = diffusion.schedule.flow(), predict = "flow", solver = diffusion.solver.euler(), steps = 8 }
  for key, value in pairs(options) do o[key] = value end
  return diffusion.Sampler(o)
end

-- Answers every second call by the output before it.
local function reuse()
  local part = {}
  function part:call(run, next, request)
    local state = run.state[self]
    state.turn = not state.turn
    if state.turn then state.output = ty.keep(next(request)) end
    return state.output
  end
  return part
end

local comparison = diffusion.compare(model, { 3, 1, 12, 12 }, sampler { guidance = 3 },
  { same = sampler { guidance = 3 }, cached = sampler { guidance = 3, parts = { reuse() } },
    plain = { sampler = sampler { guidance = 1 }, model = model } },
  { condition = labels, features = function(x) return { x } end, rounds = 1,
    judges = { mean = function(x) return x:mean():item() end } })

check.test("evaluations, operations and likeness", function()
  check.equal(comparison:names(), { "full", "cached", "plain", "same", "cached, fewer steps", "plain, fewer steps",
    "same, fewer steps" })
  local full, cached, plain = comparison:row "full", comparison:row "cached", comparison:row "plain"
  check.equal({ full.calls, full.evaluated, full.steps, full.speedup }, { 8, 48, 8, 1.0 })
  check.equal({ cached.calls, cached.evaluated, plain.evaluated }, { 4, 24, 24 })
  check.equal(full.evaluations, { condition = 24, null = 24 })
  -- Half of the network's work; the sampler's own is small.
  check.ok(math.abs(cached.flops / full.flops - 0.5) < 0.02 and math.abs(plain.flops / full.flops - 0.5) < 0.02)
  local same = comparison:row "same"
  check.equal({ same.psnr, same.flops }, { math.huge, full.flops })
  check.close({ same.ssim, same.perceptual }, { 1, 0 }, 1e-9)
  check.ok(cached.psnr < 100 and cached.ssim < 1 and cached.perceptual > 0)
  -- PSNR of the mean square error of all pictures.
  local error_ = (cached.samples:to "f64" - full.samples:to "f64"):square():mean():item()
  check.close(cached.psnr, 10 * math.log(4 / error_, 10), 1e-6)
  check.close(cached.judged.mean, cached.samples:mean():item(), 1e-9)
  local fewer = comparison:row "cached, fewer steps"
  check.equal(fewer.steps, math.max(1, math.min(8, math.floor(8 * cached.seconds / full.seconds + 0.5))))
  check.equal(fewer.evaluated, 6 * fewer.steps)
  for _, word in ipairs { "sampler", "evaluations", "GFLOP", "mean", "cached, fewer steps" } do
    check.ok(tostring(comparison):find(word, 1, true), word)
  end
end)

check.test("rows of a recipe's table", function()
  local rows = comparison:rows("cached", { evaluated = 0.5, ssim = 0.2 }, { "ssim" })
  check.equal(#rows, 3)
  local first = rows[1]
  check.equal({ first.claim, first.measured, first.bar, first.below },
    { "cached: samples through the network, of the full sampler's", 0.5, 0.5, true })
  check.close(first.baseline, comparison:row("cached, fewer steps").evaluated / 48, 1e-12)
  check.close(rows[3].measured, rows[2].measured - rows[2].baseline, 1e-12)
  check.fails(function() comparison:rows("cached", { beauty = 1 }) end,
    "Comparison:rows: bars: expected one of evaluated")
  check.fails(function() comparison:row "x" end, "Comparison:row: name: expected one of full, cached, ")
  check.fails(function() diffusion.compare(model, { 1, 1, 12, 12 }, {}, {}) end,
    "diffusion.compare: full: expected a sampler, got an empty table")
end)

check.finish()
