-- Learning from preferences: the losses by their definitions, and models, one that sees among them, that come to prefer
-- what they were told.
local here = arg and arg[0]:match ".*/" or "tests/modules/llm/"
local check = dofile(here .. "../../lua/check.lua")
local small = dofile(here .. "../small_llava.lua")
local ty = require "tycho"
local llm = require "tycho.llm"

local preference = llm.preference

check.test("likelihoods are sums over what is counted", function()
  local model = small.model()
  local tokens = small.tokens
  local targets = ty.full(tokens.shape, -100, { dtype = "i64" })
  targets[0][17]:fill_(4)
  targets[0][18]:fill_(9)
  local got = preference.likelihoods(model, tokens, targets, { pictures = small.pictures })
  local logits = model(tokens, { pictures = small.pictures }):log_softmax(-1)
  check.close(got[0]:item(), logits[0][17][4]:item() + logits[0][18][9]:item(), 1e-5)
  check.equal(got[1]:item(), 0)
end)

check.test("the losses, by their definitions", function()
  local a, b, ra, rb = ty.tensor { -1.0, -4.0, -2.0 }, ty.tensor { -3.0, -2.0, -2.5 }, ty.tensor { -2.0, -3.0, -2.0 },
    ty.tensor { -2.5, -2.0, -2.5 }
  local margins, sum, smoothed, squared = { 1.5, -1, 0 }, 0, 0, 0
  local function softplus(x) return math.log(1 + math.exp(x)) end
  for _, m in ipairs(margins) do
    sum = sum + softplus(-0.5 * m) / 3
    smoothed = smoothed + (0.9 * softplus(-0.5 * m) + 0.1 * softplus(0.5 * m)) / 3
    squared = squared + (m - 1) ^ 2 / 3
  end
  local loss, preferred = preference.loss(a, b, ra, rb, { beta = 0.5 })
  check.close(loss:item(), sum, 1e-6)
  check.close(preferred:item(), 1 / 3, 1e-6)
  check.close(preference.loss(a, b, ra, rb, { beta = 0.5, smoothing = 0.1 }):item(), smoothed, 1e-6)
  check.close(preference.loss(a, b, ra, rb, { beta = 0.5, kind = "ipo" }):item(), squared, 1e-6)
  -- A model that is the reference: log 2, and the gradient pulls the chosen up as much as the rejected down.
  local x, y = a:clone():requires_grad_(), b:clone():requires_grad_()
  loss = preference.loss(x, y, a, b, { beta = 0.2 })
  check.close(loss:item(), math.log(2), 1e-6)
  local g = ty.grad(loss, { x, y })
  check.close(g[1]:tolist(), { -0.1 / 3, -0.1 / 3, -0.1 / 3 }, 1e-6)
  check.close((g[1] + g[2]):abs():max():item(), 0, 1e-7)
end)

check.test("a model that sees comes to prefer what it was told, by its picture", function()
  local model = small.model()
  -- The picture says which of two words is the right one.
  local function side(first, second)
    local tokens = small.rows({ 1, first }, { 1, second })
    local targets = ty.full(tokens.shape, -100, { dtype = "i64" })
    targets[0][16]:fill_(first)
    targets[1][16]:fill_(second)
    return { tokens = tokens, targets = targets, options = { pictures = small.pictures } }
  end
  local pair = { chosen = side(5, 7), rejected = side(7, 5) }
  local shares = {}
  local last = preference.fit(model, { pair }, { steps = 60, lr = 3e-3, beta = 0.5, watch = function(step, _, preferred)
    shares[step] = preferred
  end })
  check.equal(#shares, 60)
  check.ok(last < 0.3, ("loss %.3f"):format(last))
  check.equal(shares[60], 1)
  local logits = model(pair.chosen.tokens, pair.chosen.options):select(1, 16)
  check.ok((logits[0][5] - logits[0][7]):item() > (logits[1][5] - logits[1][7]):item() + 1, "by the picture")
end)

check.test("only the parameters that are given learn; the same seed gives the same", function()
  local function run()
    local model = small.model()
    local tokens = small.rows({ 1, 5 }, { 1, 7 })
    local targets = ty.where(tokens:eq(1), 5, ty.full(tokens.shape, -100, { dtype = "i64" }))
    local other = ty.where(tokens:eq(1), 7, ty.full(tokens.shape, -100, { dtype = "i64" }))
    local options = { pictures = small.pictures }
    local before = model.vision_tower:state_dict()
    for name, t in pairs(before) do before[name] = t:clone() end
    preference.fit(model, { { chosen = { tokens = tokens, targets = targets, options = options },
      rejected = { tokens = tokens, targets = other, options = options } } }, { steps = 3, lr = 1e-3,
      parameters = model.multi_modal_projector:parameters() })
    for name, t in pairs(model.vision_tower:state_dict()) do check.ok(t:eq(before[name]):all():item(), name) end
    return model.multi_modal_projector.linear_1.weight:tolist()
  end
  check.equal(run(), run())
end)

check.test("wrong arguments", function()
  local x = ty.ones(2)
  check.fails(function() preference.loss(x, x, x, ty.ones(3)) end,
    "llm.preference.loss: reference_rejected: expected log-likelihoods [n] of as many pairs, got a tensor [3]")
  check.fails(function() preference.loss(x, x, x, x, { kind = "hinge" }) end, 'kind: expected "sigmoid" or "ipo"')
  check.fails(function() preference.fit(small.model(), {}) end, "pairs: expected at least one, got none")
  check.fails(function() preference.fit(small.model(), { { chosen = 3 } }) end, "got 3 as chosen of number 1")
  check.fails(function()
    preference.likelihoods(small.model(), small.tokens, small.tokens:narrow(1, 0, 3))
  end, "expected tokens and targets i64 [n, t], got")
end)

check.finish()
