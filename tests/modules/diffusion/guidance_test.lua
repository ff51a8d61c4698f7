-- Conditions and guidance: tables as batches, null conditions, dropping, scales.
local here = arg and arg[0]:match ".*/" or "tests/modules/diffusion/"
local check = dofile(here .. "../../lua/check.lua")
local known = dofile(here .. "closed_form.lua")
local ty = require "tycho"
local diffusion = require "tycho.diffusion"

local condition, guidance = diffusion.condition, diffusion.guidance
local flow = diffusion.schedule.flow()

-- Says the label (10 for none) plus a tenth of the text's mean.
local seen
local model = known.model(function(x, _, c)
  seen = x.shape[1]
  local y = c.labels:to("f32"):reshape(-1, 1) + x * 0
  return c.text and y + c.text.embeddings:mean({ 1, 2 }):reshape(-1, 1) * 0.1 or y
end, 10)

-- The guided output at time t for labels 2 and 4.
local function guided(how, c, options, t)
  local sampler = diffusion.Sampler { schedule = flow, predict = "flow", guidance = how, steps = 1,
    solver = diffusion.solver.euler() }
  local o = { condition = c or { labels = ty.tensor { 2, 4 } }, x = ty.zeros(2, 1),
    points = { flow:point(t or 1), flow:clean() } }
  for key, value in pairs(options or {}) do o[key] = value end
  local x, run = sampler:sample(model, { 2, 1 }, o)
  return (x * (-1 / (t or 1))):reshape(2):tolist(), run
end

check.test("scales", function()
  check.close(guided(nil), { 2, 4 })
  check.equal(seen, 2, "without guidance one call on the batch itself")
  check.close(guided(1), { 2, 4 })
  check.equal(seen, 2, "scale 1 is the conditional prediction")
  check.close(guided(0), { 10, 10 })
  check.equal(seen, 2, "scale 0 is the unconditional one")
  local y, run = guided(3)
  check.close(y, { 10 + 3 * (2 - 10), 10 + 3 * (4 - 10) })
  check.equal({ seen, run.calls, run.evaluations.condition, run.evaluations.null }, { 4, 1, 2, 2 }, "one call on both")
  local early = guidance.classifier_free { scale = function(p) return p.sigma > 0.5 and 2 or 1 end }
  check.close(guided(early, nil, nil, 0.4), { 2, 4 }, 1e-6, "a scale that follows the point")
  check.fails(function() guided "strong" end, "Sampler: guidance: expected a number or a value of diffusion.guidance")
end)

check.test("intervals and rescaling", function()
  local how = guidance.classifier_free { scale = 2, interval = { 0.5, 4 } }
  check.close(guided(how, nil, nil, 0.5), { 10 + 2 * (2 - 10), 10 + 2 * (4 - 10) }, 1e-6, "sigma / alpha 1")
  check.close(guided(how, nil, nil, 0.2), { 2, 4 }, 1e-6, "0.25")
  check.close(guided(how, nil, nil, 0.9), { 2, 4 }, 1e-6, "9")
  check.fails(function() guidance.classifier_free { interval = { 3, 1 } } end,
    "interval: expected { low, high } of sigma / alpha, got { 3, 1 }")
  check.fails(function() guidance.classifier_free { interval = { 0 / 0, 1 } } end, "got { nan, 1 }")
  local plain, strong = ty.randn(3, 4, 4), ty.randn(3, 4, 4) * 5
  local back = guidance.rescale(strong, plain, 1)
  check.close(back:flatten(1):std(1):tolist(), plain:flatten(1):std(1):tolist(), 1e-5, "the plain one's deviation")
  check.close(guidance.rescale(strong, plain, 0):flatten():tolist(), strong:flatten():tolist(), 1e-6)
  local half = guidance.rescale(strong, plain, 0.5)
  check.close(half:flatten():tolist(), ((back + strong) / 2):flatten():tolist(), 1e-5, "Lin et al. 2024, equation 16")
end)

check.test("any number of branches", function()
  local c = { labels = ty.tensor { 2, 4 } }
  local other = { labels = ty.tensor { 3, 3 } }
  local how = guidance.sum { terms = { { branch = "other", scale = 1.5 },
    { branch = "condition", from = "other", scale = 7 } } }
  local y, run = guided(how, c, { branches = { other = other } })
  check.close(y, { 10 + 1.5 * (3 - 10) + 7 * (2 - 3), 10 + 1.5 * (3 - 10) + 7 * (4 - 3) })
  check.equal({ run.calls, seen }, { 1, 6 })
  local one = guidance.sum { terms = { { branch = "condition", scale = 3 } } }
  check.equal(guided(one, c), (guided(3, c)), "one term is classifier-free guidance")
  check.fails(function() guided(how, c) end, "Sampler: branch 'other': expected one of condition, null")
  check.fails(function() guidance.sum { terms = { { scale = 1 } } } end, "guidance.sum: terms[1]: expected")
end)

check.test("null conditions: labels, negative prompts, entries that stay", function()
  local c = { labels = ty.tensor { 2, 4 }, text = { embeddings = ty.ones(2, 3, 5), mask = ty.ones(2, 3):to "bool" },
    size = 64 }
  check.fails(function() condition.null(model, c, nil, { size = true }) end,
    "condition.null: text: expected a null condition")
  local empty = { embeddings = ty.zeros(1, 3, 5), mask = ty.zeros(1, 3):to "bool" }
  local null = condition.null(model, c, { text = empty }, { size = true })
  check.equal(null.labels:tolist(), { 10, 10 })
  check.equal({ null.text.embeddings.shape, null.text.mask.shape, null.size }, { { 2, 3, 5 }, { 2, 3 }, 64 })
  check.close(guided(3, c, { null = { text = empty }, keep = { size = true } }),
    { 10 + 3 * (2.1 - 10), 10 + 3 * (4.1 - 10) }, 1e-5, "a negative prompt takes the null's place")
  check.fails(function() condition.null(model, c, { text = { embeddings = ty.zeros(3, 3, 5) } }, { size = true }) end,
    "condition: text.embeddings: expected 1 or 2 samples, got 3")
  local own = { null_condition = function(_, given) return { text = { embeddings = given.text.embeddings * 0,
    mask = given.text.mask } } end, null_label = 7 }
  check.equal(condition.null(own, c, nil, { size = true }).labels:tolist(), { 7, 7 }, "a network's own null")
end)

check.test("dropping for training", function()
  ty.manual_seed(2)
  local n = 20000
  local c = { labels = ty.zeros({ n }, { dtype = "i64" }), text = { embeddings = ty.ones(n, 2, 3) } }
  local null = condition.null(model, c, { text = { embeddings = ty.zeros(1, 2, 3) } })
  local function shares(p)
    local d = condition.drop(c, null, p)
    check.equal(d.labels.dtype, "i64")
    local labels, text = d.labels:eq(10), d.text.embeddings:sum({ 1, 2 }):eq(0)
    return labels:to("f64"):mean():item(), text:to("f64"):mean():item(),
      labels:logical_and(text):to("f64"):mean():item()
  end
  local labels, text, both = shares(0.1)
  check.close(labels, 0.1, 0.01, "the share")
  check.equal({ text, both }, { labels, labels }, "the same samples in all entries")
  labels, text, both = shares { labels = 0.5, text = 0.2 }
  check.close({ labels, text, both }, { 0.5, 0.2, 0.1 }, 0.015, "each for itself")
  check.ok(rawequal(condition.drop(c, null, 0), c), "nothing to drop")
  check.equal({ shares(1) }, { 1.0, 1.0, 1.0 }, "all")
  check.fails(function() condition.drop(c, null, 2) end, "condition.drop: p: expected a share within [0, 1], got 2")
  local objective = diffusion.Objective { schedule = flow, predict = "flow", drop = 0.25 }
  local dropped = objective:dropped(model, { labels = c.labels }).labels:eq(10):to("f64"):mean():item()
  check.close(dropped, 0.25, 0.01, "in an objective")
end)

check.test("tables as batches", function()
  local a = { labels = ty.tensor { 1, 2 }, text = { embeddings = ty.ones(2, 3, 4) }, mode = "x" }
  local b = { labels = ty.tensor { 3 }, text = { embeddings = ty.zeros(1, 3, 4) }, mode = "x" }
  local both = condition.concat { a, b }
  check.equal(both.labels:tolist(), { 1, 2, 3 })
  check.equal({ both.text.embeddings.shape, both.mode }, { { 3, 3, 4 }, "x" })
  check.equal(condition.narrow(both, 2, 1).text.embeddings:sum():item(), 0.0)
  check.equal(condition.select(both, ty.tensor { 2, 0 }).labels:tolist(), { 3, 1 })
  check.fails(function() condition.concat { a, { labels = ty.tensor { 1 }, mode = "x" } } end,
    "condition.concat: text: condition 2 has none")
  check.fails(function() condition.concat { b, { labels = ty.tensor { 1 }, mode = "x", text = { embeddings =
    ty.zeros(1, 5, 4) } } } end, "text.embeddings: expected [n, 3, 4] as in the first one, got [n, 5, 4]")
  check.fails(function() condition.concat { { mode = 1 }, { mode = 2 } } end, "mode: expected the same in all")
  check.fails(function() guided(1, { labels = ty.tensor { 1, 2, 3 } }) end,
    "Sampler.sample: condition.labels: expected [2, ...], one for each sample, got [3]")
end)

check.finish()
