-- Conversions between what networks predict: round trips and identities in f64.
local here = arg and arg[0]:match ".*/" or "tests/modules/diffusion/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local diffusion = require "tycho.diffusion"

local prediction = diffusion.prediction
local kinds = { "epsilon", "sample", "v", "flow", "edm" }
local f64 = { dtype = "f64" }

local function distance(a, b) return (a - b):abs():max():item() end

-- Pairs of alpha and sigma as preserving, straight and exploding paths have them.
local places = {
  { 0.6, 0.8 }, { 0.99, math.sqrt(1 - 0.99 ^ 2) }, { 0.3, 0.7 }, { 0.95, 0.05 }, { 1, 3.5 }, { 1, 0.02 },
}

check.test("each kind from each other", function()
  ty.manual_seed(1)
  local x0, e = ty.randn({ 5, 3 }, f64), ty.randn({ 5, 3 }, f64)
  for _, place in ipairs(places) do
    local alpha, sigma = place[1], place[2]
    local x = alpha * x0 + sigma * e
    for _, from in ipairs(kinds) do
      local y = prediction.target(from, x0, e, alpha, sigma, 0.7)
      for _, to in ipairs(kinds) do
        local what = ("%s to %s at %g, %g"):format(from, to, alpha, sigma)
        local converted = prediction.convert(from, to, x, y, alpha, sigma, 0.7)
        check.ok(distance(converted, prediction.target(to, x0, e, alpha, sigma, 0.7)) < 1e-12, what)
        local back = prediction.convert(to, from, x, converted, alpha, sigma, 0.7)
        check.ok(distance(back, y) < 1e-11, what .. " and back")
      end
    end
  end
end)

check.test("coefficients by sample", function()
  local x0, e = ty.randn({ 6, 2, 3 }, f64), ty.randn({ 6, 2, 3 }, f64)
  local sigma = ty.tensor({ 0.1, 0.3, 0.5, 0.7, 0.9, 0.99 }, f64):reshape(6, 1, 1)
  local alpha = 1 - sigma
  for _, from in ipairs(kinds) do
    for _, to in ipairs(kinds) do
      local y = prediction.target(from, x0, e, alpha, sigma)
      local converted = prediction.convert(from, to, alpha * x0 + sigma * e, y, alpha, sigma)
      check.ok(distance(converted, prediction.target(to, x0, e, alpha, sigma)) < 1e-11, from .. " to " .. to)
    end
  end
end)

check.test("published formulas", function()
  local x0, e = ty.randn({ 4 }, f64), ty.randn({ 4 }, f64)
  local alpha, sigma = 0.6, 0.8
  check.ok(distance(prediction.target("v", x0, e, alpha, sigma), alpha * e - sigma * x0) == 0,
    "v, Salimans and Ho 2022")
  check.ok(distance(prediction.target("flow", x0, e, 0.3, 0.7), e - x0) == 0, "flow")
  -- Karras et al. 2022, table 1: D = c_skip x + c_out F with x = x0 + sigma e.
  local data, noise = 0.5, 2.0
  local x = x0 + noise * e
  local skip = data ^ 2 / (noise ^ 2 + data ^ 2)
  local out = noise * data / math.sqrt(noise ^ 2 + data ^ 2)
  local F = ty.randn({ 4 }, f64)
  check.ok(distance(prediction.convert("edm", "sample", x, F, 1, noise, data), x * skip + F * out) < 1e-15, "edm")
  check.close(prediction.input_scale("edm", 1, noise, data), 1 / math.sqrt(noise ^ 2 + data ^ 2), 1e-15)
  check.equal(prediction.input_scale("v", 1, noise), nil)
end)

check.test("gain is the squared derivative of the clean sample", function()
  local x = ty.tensor({ 0.7 }, f64)
  for _, place in ipairs(places) do
    for _, kind in ipairs(kinds) do
      local y = ty.tensor({ 0.3 }, f64):requires_grad_()
      prediction.convert(kind, "sample", x, y, place[1], place[2]):sum():backward()
      check.close(y.grad:item() ^ 2, prediction.gain(kind, place[1], place[2]), 1e-12, kind)
    end
  end
end)

check.test("at the noisy end without a signal all but epsilon know the clean sample", function()
  local x0, e = ty.randn({ 4 }, f64), ty.randn({ 4 }, f64)
  for _, kind in ipairs { "sample", "v", "flow", "edm" } do
    local y = prediction.target(kind, x0, e, 0, 1)
    check.ok(distance(prediction.convert(kind, "sample", e, y, 0, 1), x0) < 1e-14, kind)
    check.ok(distance(prediction.convert(kind, "epsilon", e, y, 0, 1), e) < 1e-14, kind .. ", its noise")
  end
end)

check.test("a prediction is converted once, and can be cut", function()
  local point = { alpha = 0.6, sigma = 0.8 }
  local x, e = ty.randn({ 3 }, f64), ty.randn({ 3 }, f64)
  local p = prediction.new("epsilon", x, e, point)
  check.ok(rawequal(p:as "sample", p:as "sample") and rawequal(p:as "epsilon", e), "the same tensors")
  local cut = p:with_sample(p:as("sample"):clamp(-0.1, 0.1))
  check.ok(distance(cut:as "epsilon", (x - cut:as "sample" * 0.6) / 0.8) < 1e-15, "the noise follows")
  check.fails(function() prediction.convert("noise", "v", x, e, 1, 1) end,
    "prediction.convert: from: expected one of edm, epsilon, flow, sample, v, got 'noise'")
  check.fails(function() prediction.target(nil, x, e, 1, 1) end, "prediction.target: kind: expected one of")
end)

check.finish()
