--- Once for Both: which units of a vision transformer matter and how many of them stay, found in one search. Ye et al.
-- 2024, "Once for Both: Single Stage of Importance and Sparsity Search for Vision Transformer Compression".
--
--     local report = prune.ofb.search(model, training, { target = 0.5, steps = 600 })
--     print(report.multiplications / report.before)          -- the model has been cut
--     vision.distil(model, training, { teacher = whole, features = 0, steps = 600 })
--
-- Every width has gates (prune.vit_gates): scores of units, and weights of candidate shares. At first gates are the
-- scores, at the end what the candidates leave. Weights of candidates learn in turns with the model, by the loss, by
-- their indecision and by the multiplications; unlikely ones are dropped. While widths shrink, more and more patches
-- are hidden and drawn again by a light decoder.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local gating = require "tycho.prune.vit_gates"

local nn = ty.nn
local expect, fail, none = arguments.expect, arguments.fail, arguments.none
local M = {}

local ratios = { 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1 }

-- ---- sizes ----

--- Widths that take at most `budget` multiplications: all of them by one factor, up to what the model has, and then
-- those of feed-forward networks by single units, the narrowest first.
---@param model Module    the whole one
---@param sizes table     of prune.vit_gates.widths
---@param budget number
---@return table sizes
function M.fit(model, sizes, budget)
  local who = "prune.ofb.fit"
  local full = gating.widths(model)
  expect(who, "sizes", sizes, "a table")
  expect(who, "budget", budget, "a number > 0")
  local function scaled(factor)
    local function part(n, most) return math.max(1, math.min(most, math.floor(factor * n + 0.5))) end
    local made = { embedding = part(sizes.embedding, full.embedding), layers = {} }
    for i, layer in ipairs(sizes.layers) do
      made.layers[i] = { head = part(layer.head, full.layers[i].head), inner = part(layer.inner, full.layers[i].inner) }
    end
    return made
  end
  local function fits(made) return gating.multiplications(model, made) <= budget end
  if not fits(scaled(0)) then fail("%s: budget: expected room for one unit of each width, got %g", who, budget) end
  local low, high = 0, 1
  while high < 1024 and fits(scaled(high)) do low, high = high, 2 * high end
  for _ = 1, 30 do
    local middle = (low + high) / 2
    if fits(scaled(middle)) then low = middle else high = middle end
  end
  local made, going = scaled(low), true
  while going do
    going = false
    local order = {}
    for i, layer in ipairs(made.layers) do
      if layer.inner < full.layers[i].inner then order[#order + 1] = layer end
    end
    table.sort(order, function(x, y) return x.inner < y.inner end)
    if order[1] then
      order[1].inner = order[1].inner + 1
      going = fits(made)
      if not going then order[1].inner = order[1].inner - 1 end
    end
  end
  return made
end

-- The units of each row with the largest scores, as cut() wants them, in their old order.
local function best_units(scores, count)
  local _, at = scores:topk(count, 1)
  return (at:sort(1))
end

local function units_of(sizes, scores, gates)
  local function pick(score, count, gate)
    local at = best_units(score, count)
    return { at = at, gate = gate and gate:gather(1, at) or nil }
  end
  local units = { embedding = pick(scores.embedding, sizes.embedding, gates and gates.embedding), layers = {} }
  for i, layer in ipairs(sizes.layers) do
    units.layers[i] = {
      head = pick(scores.layers[i].head, layer.head, gates and gates.layers[i].head),
      inner = pick(scores.layers[i].inner, layer.inner, gates and gates.layers[i].inner) }
  end
  return units
end

--- Cuts a model by the size of its weights to a share of its multiplications, in place: what searching is compared
-- with. All widths keep the same share. Returns the widths.
---@param model Module
---@param target number  in (0, 1]
---@return table sizes
function M.uniform(model, target)
  local who = "prune.ofb.uniform"
  expect(who, "model", model, "a module")
  expect(who, "target", target, "a number in (0, 1]")
  local full = gating.widths(model)
  local sizes = M.fit(model, full, target * gating.multiplications(model, full))
  gating.cut(model, units_of(sizes, gating.magnitudes(model)))
  return sizes
end

-- ---- the search ----

-- Draws the patches of hidden tokens again from the last states: one layer, as light as can be.
local function decoder_of(vit)
  local kernel = vit.embeddings.patch_embeddings.projection.weight
  local decoder = nn.Linear(kernel.shape[1], kernel:numel() // kernel.shape[1])
  local token = ty.keep((ty.randn(1, 1, kernel.shape[1]) * 0.02):requires_grad_())
  return decoder, token, kernel.shape[3], kernel.shape[4]
end

-- [n, c, h, w] to [n, patches, c * p * q].
local function patches_of(images, p, q)
  local n, c, h, w = table.unpack(images.shape)
  return images:reshape(n, c, h // p, p, w // q, q):permute(0, 2, 4, 1, 3, 5):reshape(n, (h // p) * (w // q), -1)
end

local own = { target = 0.5, steps = 600, way = "joint", warmup = 0.5, settle = 0.6, hidden = { 0.05, 0.25 },
  ratios = ratios, every = 3, interval = 5, threshold = 0.2, lr = 1e-3, score_lr = 2e-2, alpha_lr = 0.1,
  decide = 0.1, flops = 100.0, sparse = 1e-4, batch_size = 32, seed = 0, transform = none, quiet = false }
local kinds = { target = "a number in (0, 1]", steps = "an integer >= 2", way = '"joint" or "two-stage"',
  warmup = "a number in (0, 1]", settle = "a number in (0, 1]", hidden = false, ratios = "a list of numbers",
  every = "an integer >= 2", interval = "an integer >= 1", threshold = "a number in [0, 1]",
  lr = "a finite number >= 0", score_lr = "a finite number >= 0", alpha_lr = "a finite number >= 0",
  decide = "a finite number >= 0", flops = "a finite number >= 0", sparse = "a finite number >= 0",
  batch_size = "an integer >= 1", seed = "an integer", transform = "a function", quiet = "a boolean" }

local function expected(gates)
  local sizes = { embedding = gates.embedding:width(), layers = {} }
  for i, layer in ipairs(gates.layers) do
    sizes.layers[i] = { head = layer.head:width(), inner = layer.inner:width() }
  end
  return sizes
end

--- ((F - F*) / F0)^2 of the multiplications that gates leave on average: a tensor.
---@param gates table  of prune.vit_gates.attach
---@param target number  F* / F0
---@return Tensor
function M.flops_loss(gates, target)
  expect("prune.ofb.flops_loss", "gates", gates, "a table")
  expect("prune.ofb.flops_loss", "target", target, "a finite number >= 0")
  if not gates.embedding or not gates.layers or not gates.before then
    fail("prune.ofb.flops_loss: gates: expected those of prune.vit_gates.attach, got %s", arguments.describe(gates))
  end
  return (gating.multiplications(gates.model, expected(gates)) / gates.before - target):square()
end

local function search(model, dataset, options)
  local who = "prune.ofb.search"
  expect(who, "model", model, "a module")
  local o = arguments.read(who, options, own, kinds)
  if o.hidden and (type(o.hidden) ~= "table" or #o.hidden ~= 2 or math.max(table.unpack(o.hidden)) >= 1) then
    fail("%s: hidden: expected two shares below 1 or false, got %s", who, arguments.describe(o.hidden))
  end
  if type(dataset) ~= "table" or type(dataset.batch) ~= "function" then
    fail("%s: dataset: expected a data set of images and labels, got %s", who, arguments.describe(dataset))
  end
  local vit = gating.parts(who, model).vit
  local gates = gating.attach(model, o.ratios)
  gates.before = gating.multiplications(model, gating.widths(model))
  local decoder, token, p, q = decoder_of(vit)
  local scores, alphas = {}, {}
  for i, gate in ipairs(gates.list) do scores[i], alphas[i] = gate.score, gate.alpha end
  local weights = model:parameters()
  for _, t in ipairs(decoder:parameters()) do weights[#weights + 1] = t end
  if o.hidden then weights[#weights + 1] = token end
  local schedule = ty.optim.cosine { steps = o.steps, warmup = o.steps // 20, final = 0.2 }
  local learner = ty.optim.AdamW({ { params = weights }, { params = scores, lr = o.score_lr, weight_decay = 0 } },
    { lr = o.lr, weight_decay = 0.01, clip_norm = 1, schedule = schedule })
  local chooser = ty.optim.AdamW(alphas, { lr = o.alpha_lr, beta1 = 0.5, beta2 = 0.999, weight_decay = 0 })
  local loader = ty.data.DataLoader(dataset, { batch_size = math.min(o.batch_size, #dataset), shuffle = true,
    seed = o.seed, drop_last = true, device = model:device() })
  local report = { before = gates.before, history = {} }
  local last = math.max(2, math.floor(o.settle * o.steps)) -- step of the search; half of it for either stage

  -- The loss of the labels and, where patches are hidden, that of drawing them, at the same size.
  local function loss_of(batch, share)
    local images = o.transform and o.transform(batch.image) or batch.image
    gating.refresh(gates)
    local state = gates.state
    state.hidden, state.token = nil, token
    if share > 0 then
      local n, count = images.shape[1], vit.embeddings.rows * vit.embeddings.columns
      state.hidden = ty.rand(n, count, 1):lt(share):to(images.dtype):to { device = images.device }
    end
    local x = model.vit:hidden(images, { layer = #vit.encoder.layer, norm = true })
    local loss = nn.cross_entropy(model.classifier(x:select(1, 0)), batch.label)
    if state.hidden then
      local off = (decoder(x:narrow(1, 1, x.shape[2] - 1)) - patches_of(images, p, q)):square():mean(-1, true)
      local drawn = (off * state.hidden):sum() / (state.hidden:sum() + 1e-6)
      loss = loss + drawn * (loss:detach() / (drawn:detach() + 1e-6))
    end
    state.hidden = nil
    return loss
  end

  local function sparse_loss()
    local sum
    for _, gate in ipairs(gates.list) do
      local part = gate.score:sigmoid():sum()
      sum = sum and sum + part or part
    end
    return sum * o.sparse
  end

  -- Candidates are driven apart little at first, when multiplications and labels have not said much yet.
  local function choice_loss(urgency)
    local sum = M.flops_loss(gates, o.target) * o.flops
    for _, gate in ipairs(gates.list) do
      if gate:left() > 1 then sum = sum + gate:indecision() * (o.decide * urgency) end
    end
    return sum
  end

  -- One candidate for each width, all brought to the very target.
  local function settle()
    local chosen = { embedding = gates.embedding:decide(), layers = {} }
    for i, layer in ipairs(gates.layers) do
      chosen.layers[i] = { head = layer.head:decide(), inner = layer.inner:decide() }
    end
    report.chosen = gating.multiplications(model, chosen)
    report.sizes = M.fit(model, chosen, o.target * gates.before)
    gates.embedding:keep(report.sizes.embedding)
    for i, layer in ipairs(gates.layers) do
      layer.head:keep(report.sizes.layers[i].head)
      layer.inner:keep(report.sizes.layers[i].inner)
    end
  end

  local function step_of(step)
    local along, joint = step / last, o.way == "joint"
    local choosing = step <= last and (joint and step % o.every == 0 or not joint and along > 0.5)
    for _, gate in ipairs(gates.list) do
      if joint then
        gate.w = 0.99 + (0.1 - 0.99) * math.min(1, along / o.warmup)
      else
        gate.w = along > 0.5 and 0.1 or 1
      end
    end
    local share = o.hidden and o.hidden[1] + (o.hidden[2] - o.hidden[1]) * math.min(1, along / o.warmup) or 0
    local loss = loss_of(loader:next(), share)
    if choosing then
      loss = loss + choice_loss(math.min(1, (joint and along or 2 * along - 1) / o.warmup))
    elseif step <= last then
      loss = loss + sparse_loss()
    end
    loss:backward()
    if choosing then chooser:step() else learner:step() end
    learner:zero_grad()
    if step <= last then chooser:zero_grad() end
    if choosing and step % (o.interval * (joint and o.every or 1)) == 0 then
      for _, gate in ipairs(gates.list) do gate:drop(o.threshold) end
    end
    if step == last then ty.no_grad(settle) end
    if step % 10 == 0 or step == o.steps then
      local now = {}
      for i, gate in ipairs(gates.list) do now[i] = gate:width():item() / gate.units end
      report.history[#report.history + 1] = { step = step, shares = now,
        multiplications = gating.multiplications(model, expected(gates)):item() / gates.before }
    end
  end

  model:train()
  local ok, problem = pcall(function()
    for step in ty.train.steps(nil, o.steps, { title = "search", quiet = o.quiet }) do step_of(step) end
  end)
  if not ok then
    gating.detach(model)
    error(problem, 0)
  end

  -- The gates go into the weights.
  ty.no_grad(function()
    local order, open = { layers = {} }, { layers = {} }
    local function parts(gate) return gate.score:detach(), gate.score:detach():sigmoid() * gate.w + (1 - gate.w) end
    order.embedding, open.embedding = parts(gates.embedding)
    for i, layer in ipairs(gates.layers) do
      order.layers[i], open.layers[i] = {}, {}
      for _, key in ipairs { "head", "inner" } do order.layers[i][key], open.layers[i][key] = parts(layer[key]) end
    end
    report.units = units_of(report.sizes, order, open)
    gating.detach(model)
    gating.cut(model, report.units)
    report.multiplications = gating.multiplications(model, gating.widths(model))
  end)
  model:eval()
  return report
end

--- Searches and cuts a ViTForImageClassification, in place. options:
--   target      0.5: the share of its multiplications that stay
--   steps       600: training steps; after a share of them, settle (0.6), widths stay
--   batch_size (32), seed (0), transform (of the images), quiet
--   way         "joint"; for comparison "two-stage", until then scores for half of the steps and then candidates
--   ratios      the candidates, shares of a width: 0.25 to 1 by eighths
--   warmup      0.5 of the search: how long gates go from scores to candidates (w from 0.99 to 0.1)
--   hidden      { 0.05, 0.25 }: the share of patches that are hidden, at first and after warmup; false: none
--   every       3: of so many steps one is the candidates'; interval (5 of those): when unlikely ones are dropped,
--               those below threshold (0.2) over how many are left
--   lr (1e-3), score_lr (2e-2), alpha_lr (0.1)
--   decide (0.1), flops (100), sparse (1e-4)  shares of the loss: indecision, which grows to its share over warmup;
--               multiplications; the sum of all scores
-- Returns { before, chosen, multiplications, sizes, units, history }: multiplications of a picture before, as chosen,
-- and as they are; widths; what was kept of each; and every ten steps { step, shares (of each gate), multiplications }.
---@param model Module
---@param dataset table  items { image = [c, h, w], label = integer }
---@param options? table
---@return table report
function M.search(model, dataset, options) return nn.for_caller(search, model, dataset, options) end

return M
