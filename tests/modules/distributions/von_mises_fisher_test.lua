-- Directions around a mean: the density integrates to one, gradients are those of differences, samples and fits agree.
local here = (arg and arg[0]:match ".*/" or "tests/modules/distributions/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local VonMisesFisher = require("tycho.distributions").VonMisesFisher

local function tanh(x) return (math.exp(2 * x) - 1) / (math.exp(2 * x) + 1) end
local function f64(list) return ty.tensor(list, { dtype = "f64" }) end

check.test("the density integrates to one on circles and spheres", function()
  for _, kappa in ipairs { 0.01, 1.5, 40 } do
    local circle = VonMisesFisher { mean = f64 { 3, 4 }, concentration = kappa }
    local n = 4000
    local angles = ty.arange(n, { dtype = "f64" }) * (2 * math.pi / n)
    local density = circle:log_prob(ty.stack({ angles:cos(), angles:sin() }, 1)):exp()
    check.close((density:sum() * (2 * math.pi / n)):item(), 1, 1e-12)
    -- On the sphere the constant has a closed form.
    local sphere = VonMisesFisher { mean = f64 { 0, 0, 2 }, concentration = kappa }
    local closed = math.log(kappa / (2 * math.pi * (math.exp(kappa) - math.exp(-kappa))))
    check.close(sphere:log_constant():item(), closed, 1e-12 * math.max(1, math.abs(closed)))
    check.close(sphere:mean_length():item(), 1 / tanh(kappa) - 1 / kappa, 1e-12)
  end
end)
check.test("the gradient for the concentration is the cosine less the mean length", function()
  local kappa = f64 { 7.5 }:requires_grad_()
  local vmf = VonMisesFisher { mean = f64 { 1, -2, 0, 2, 4 }, concentration = kappa }
  local x = ty.nn.normalize(ty.randn({ 3, 5 }, { dtype = "f64" }))
  local g = ty.grad(vmf:log_prob(x):sum(), { kappa })[1]
  local want = (x:matmul(vmf.mean) - vmf:mean_length()):sum()
  check.close(g:item(), want:item(), 1e-12)
end)

check.test("fits recover what samples were drawn from, also in thousands of dimensions", function()
  ty.manual_seed(3)
  for _, case in ipairs { { 2, 5, 4000 }, { 3, 0.5, 20000 }, { 10, 200, 2000 }, { 4096, 900, 200 },
    { 4096, 40000, 50 } } do
    local p, kappa, n = table.unpack(case)
    local vmf = VonMisesFisher { mean = ty.randn({ p }, { dtype = "f64" }), concentration = kappa }
    local x = vmf:sample(n)
    check.equal(x.shape, { n, p })
    check.close(x:norm(2, { 1 }):tolist(), ty.ones({ n }, { dtype = "f64" }):tolist(), 1e-12)
    local fitted = VonMisesFisher.fit(x)
    -- Of the cosines, whose variance is the slope of the mean length: kappa is off by its inverse over n.
    local a = vmf:mean_length():item()
    local slope = 1 - a * a - (p - 1) / kappa * a
    local deviation = 1 / math.sqrt(n * slope)
    local bias = (p - 1) / (2 * n * a) -- the mean of few samples is longer than expected
    check.close(fitted.concentration:item(), kappa, 5 * deviation + 3 * bias,
      ("p %d kappa %g: %g"):format(p, kappa, fitted.concentration:item()))
    -- It solves its equation, and nothing near it is likelier.
    local r = x:mean(0):norm():item()
    check.close(fitted:mean_length():item(), r, 1e-8)
    local best = fitted:log_prob(x):mean():item()
    for _, factor in ipairs { 0.99, 1.01 } do
      local other = VonMisesFisher { mean = fitted.mean, concentration = fitted.concentration:item() * factor }
      check.ok(other:log_prob(x):mean():item() < best)
    end
  end
end)

check.test("weights count as repetitions do", function()
  ty.manual_seed(4)
  local x = ty.nn.normalize(ty.randn({ 5, 4 }, { dtype = "f64" }) + 1)
  local plain = VonMisesFisher.fit(ty.concat({ x, x:narrow(0, 1, 1), x:narrow(0, 1, 1) }, 0))
  local weighted = VonMisesFisher.fit(x, { weights = f64 { 1, 3, 1, 1, 1 } })
  check.close(weighted.concentration:item(), plain.concentration:item(), 1e-9)
  check.close(weighted.mean:tolist(), plain.mean:tolist(), 1e-12)
end)

check.test("f32 stays f32, logarithms are f64", function()
  local vmf = VonMisesFisher { mean = ty.tensor { 0.0, 1.0, 0.0 }, concentration = 3 }
  local x = vmf:sample(4)
  check.equal({ x.dtype, vmf:log_prob(x).dtype, VonMisesFisher.fit(x).mean.dtype }, { "f32", "f64", "f32" })
end)

check.test("errors", function()
  local x = ty.nn.normalize(ty.randn(4, 3))
  check.fails(function() VonMisesFisher { mean = ty.zeros(3), concentration = 1 } end,
    "VonMisesFisher: mean: expected a direction, got one of length 0")
  check.fails(function() VonMisesFisher { mean = ty.ones(3), concentration = -1 } end,
    "VonMisesFisher: concentration: expected a number above 0, got -1")
  check.fails(function() VonMisesFisher { mean = ty.ones(3) } end, "VonMisesFisher: concentration: expected a number")
  check.fails(function() VonMisesFisher { mean = ty.ones(3), concentration = 1 }:log_prob(ty.ones(2, 2)) end,
    "VonMisesFisher:log_prob: x: expected floats [n, 3], got")
  check.fails(function() VonMisesFisher { mean = ty.ones(3), concentration = 1 }:sample(0) end,
    "VonMisesFisher:sample: n: expected an integer > 0, got")
  check.fails(function() VonMisesFisher.fit(ty.ones(3, 3)) end, "VonMisesFisher.fit: x: expected unit vectors")
  check.fails(function() VonMisesFisher.fit(x:narrow(0, 0, 1)) end, "that are not all the same")
  check.fails(function() VonMisesFisher.fit(ty.tensor { { 1.0, 0.0 }, { -1.0, 0.0 } }) end, "a mean other than 0")
  check.fails(function() VonMisesFisher.fit(x, { weights = ty.zeros(4) }) end, "VonMisesFisher.fit: weights: expected")
end)

check.finish()
