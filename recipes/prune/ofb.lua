-- A vision transformer cut to 15 % of its multiplications, which widths and which units found in one search
-- claim: searching for importance and for widths at once beats doing one after the other, at equal multiplications
-- system: a ViT on pages of handwritten digits; gates on embedding, heads and feed-forward networks, hidden patches
-- paper: Ye et al. 2024, "Once for Both: Single Stage of Importance and Sparsity Search for Vision Transformer
--   Compression"
-- time: 4 minutes on one CPU core
--
-- Digits lie anywhere on their pages; pages measured on are of digits neither trained on nor chosen by. All ways take
-- the same number of training steps: a search, at whose end the model is cut, and training of what is left; cutting by
-- the size of weights with equal shares has no search and trains all the time. Each way has its rate by the validation
-- part with the first seed. The two stages learn scores alone, with all units open, and then candidates with scores and
-- weights fixed. Multiplications are counted from the widths, which a test checks against the layers that are called.
-- What is measured is the cut model, with no gate left in it.
local ty = require "tycho"
local prune, vision = require "tycho.prune", require "tycho.vision"

local r = ty.recipe.declare {
  seeds = 3,
  base = true,
  args = {
    { "base_steps", 1500, "training steps of the dense model", quick = 10 },
    { "search", 450, "steps of the search", quick = 12 },
    { "steps", 250, "of training after it", quick = 2 },
    { "target", 0.15, "share of the multiplications that stays" },
    { "rates", { 1e-3, 2e-3 }, "learning rates, for each way the better one", quick = { 1e-3 } },
    { "width", 64, "hidden size", quick = 32 },
  },
}
local args = r.args
local training = vision.pages.training()
local validation, held_out = vision.pages.set "validation", vision.pages.set "held_out"

local ways = {
  { name = "joint", options = {} },
  { name = "two-stage", options = { way = "two-stage" } },
  { name = "seen", options = { hidden = false } },
  { name = "uniform" },
}

-- A model that was cut in one of the ways and trained; what the search says.
local function made(base, way, seed, rate)
  local model = base:clone():requires_grad_()
  ty.manual_seed(seed)
  local steps, report = args.steps, nil
  if way.options then
    local options = { target = args.target, steps = args.search, seed = seed, lr = rate, quiet = true,
      transform = vision.pages.transform, interval = r.quick and 1 or nil }
    for key, value in pairs(way.options) do options[key] = value end
    report = prune.ofb.search(model, training, options)
  else
    prune.ofb.uniform(model, args.target)
    steps = steps + args.search
  end
  vision.distil(model, training, { steps = steps, lr = rate, seed = seed + 1, batch_size = 32, quiet = true,
    transform = vision.pages.transform })
  return model, report
end

local found, losses, shares, rates, shown = { base = {} }, {}, {}, {}, {}
for i, seed in ipairs(r.seeds) do
  local base = vision.pages.base(r:base "pages", { seed = seed, steps = args.base_steps, width = args.width })
  local whole = prune.vit_gates.multiplications(base, prune.vit_gates.widths(base))
  found.base[i] = 100 * vision.pages.measure(base, held_out).accuracy
  for _, way in ipairs(ways) do
    local name = way.name
    local model, report
    if i == 1 then
      local best
      for _, rate in ipairs(args.rates) do
        local candidate, about = made(base, way, seed, rate)
        local loss = vision.pages.measure(candidate, validation).loss
        if not best or loss < best then best, rates[name], model, report = loss, rate, candidate, about end
      end
      shown[name] = report
      found[name], losses[name], shares[name] = {}, {}, {}
    else
      model, report = made(base, way, seed, rates[name])
    end
    local sizes = prune.vit_gates.widths(model)
    local result = vision.pages.measure(model, held_out)
    found[name][i], losses[name][i] = 100 * result.accuracy, result.loss
    shares[name][i] = prune.vit_gates.multiplications(model, sizes) / whole
    local text = {}
    for k, layer in ipairs(sizes.layers) do text[k] = ("%d/%d"):format(layer.head, layer.inner) end
    r:say("seed %d: %-9s %.2f %% right, loss %.4f, rate %g, %.4f of the multiplications; embedding %d, layers %s", seed,
      name, found[name][i], losses[name][i], rates[name], shares[name][i], sizes.embedding, table.concat(text, " "))
    r.metrics[("accuracy/%s/%d"):format(name, seed)] = found[name][i]
    r.metrics[("loss/%s/%d"):format(name, seed)] = losses[name][i]
    if report then r.metrics[("chosen/%s/%d"):format(name, seed)] = report.chosen / whole end
  end
end

-- ---- the shares of all widths as the search goes on ----

local names, series = { "embedding" }, {}
for i = 1, 4 do names[2 * i], names[2 * i + 1] = "heads " .. i, "inner " .. i end
for k, name in ipairs(names) do
  local x, y = {}, {}
  for i, point in ipairs(shown.joint.history) do x[i], y[i] = point.step, point.shares[k] end
  series[k] = { label = name, x = x, y = y }
end
ty.plot.line { title = "Shares of the widths that candidates leave on average", series = series, x_label = "step",
  y_label = "share" }:save(r:picture "ofb.png")

local most = 0
for _, list in pairs(shares) do most = math.max(most, table.unpack(list)) end
local function more_than(name)
  local list = {}
  for i, value in ipairs(found.joint) do list[i] = value - found[name][i] end
  return list
end
local function loss_of(name)
  local list = {}
  for i, value in ipairs(losses.joint) do list[i] = value / losses[name][i] end
  return list
end
os.exit(r:finish {
  { claim = "share of the multiplications, the most of all ways and seeds", measured = most, bar = args.target,
    below = true },
  { claim = "accuracy above that of two stages, in per cent of the pages", values = more_than "two-stage",
    baseline = found["two-stage"], bar = 0 },
  { claim = "held-out loss, of that of two stages", values = loss_of "two-stage", baseline = losses["two-stage"],
    bar = 1, below = true },
  { claim = "accuracy above that without hidden patches", values = more_than "seen", baseline = found.seen,
    judged = false },
  { claim = "accuracy above equal shares by the size of weights", values = more_than "uniform",
    baseline = found.uniform, judged = false },
  { claim = "accuracy above that of the dense model", values = more_than "base", baseline = found.base,
    judged = false },
}, true)
