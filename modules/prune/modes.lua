--- Experts that a token can do without are not computed: MoDES, Huang et al. 2025, "MoDES: Accelerating
-- Mixture-of-Experts Multimodal Large Language Models via Dynamic Expert Skipping" (arXiv 2511.15690). Of a token's
-- chosen experts, expert i of layer l is skipped where
--
--     alpha[l] p[i] < tau[m]        p: the router's weight; m: text, or visual for a picture's tokens
--
-- without weighing the others anew. alpha is what a layer matters: the mean divergence KL(before | after) of the words
-- of answers when all its experts are skipped. The two tau are those with the least such divergence at which a wanted
-- share of the experts is skipped, found on calibration data by a walk along the frontier of a table of thresholds:
-- shares and divergences grow with both.
--
--     prune.modes.apply(model, { image = 1 })
--     local found = prune.modes.calibrate(model, function() return logits of answers end, { share = 0.8 })
--     ...                                    -- the model skips
--     prune.modes.set(model, { text = 0, visual = 0 })     -- and no longer
--     prune.modes.remove(model)
local ty = require "tycho"
local arguments = require "tycho.arguments"

local nn = ty.nn
local M = {}

-- Which rows are of a picture, bool [m, 1], where the layer works on all tokens, the last ones, or some places.
local function visual_rows(at, image)
  local tokens = at.tokens
  if at.places then
    tokens = tokens:flatten():index_select(0, at.places)
  elseif at.last and at.last < tokens.shape[2] then
    tokens = tokens:narrow(1, tokens.shape[2] - at.last, at.last)
  end
  return tokens:reshape(-1, 1):eq(image)
end

local skipping = nn.surgery.wrapper { name = "Skipping", field = "_skipping",
  describe = function(state) return ("skips below %.3g and %.3g"):format(state.text, state.visual) end,
  forward = function(base)
    return function(self, x, at)
      local state = self._skipping
      if not state.counts and state.text <= 0 and state.visual <= 0 then return base.forward(self, x, at) end
      local shape = x.shape
      x = x:flatten(0, 1)
      local weights, experts, shares = self:route(x)
      if at.record then table.insert(at.record, { shares = shares, experts = experts }) end
      local visual = visual_rows(at, state.image)
      local important = weights * ty.where(visual, state.alpha.visual, state.alpha.text)
      local kept = important:ge(ty.where(visual, state.visual, state.text))
      local y, executed = self:mix(x, weights, experts, kept)
      local counts = state.counts
      if counts then
        local seen = visual:to("i64"):sum():item()
        local kept_visual = kept:logical_and(visual):to("i64"):sum():item()
        counts.visual, counts.text = counts.visual + seen * self.chosen, counts.text + (x.shape[1] - seen) * self.chosen
        counts.executed, counts.executed_visual = counts.executed + executed, counts.executed_visual + kept_visual
        if state.watch then state.watch(at.layer, visual, important:detach(), kept) end
      end
      return y:reshape(shape)
    end
  end }

local function wrapped(who, model)
  local list = skipping:wrapped(who, arguments.expect(who, "model", model, "a module"))
  if #list == 0 then arguments.fail("%s: model: expected one with modes.apply(), got one without", who) end
  return list
end

--- Lets the mixtures of experts of a decoder skip: those with the methods of Mixtral's. Nothing is skipped until set()
-- or calibrate() says what. options: image (the token that stands for a feature of a picture; that of a Llava's config,
-- or none). Returns the number of such layers.
---@param model LanguageModel
---@param options? { image?: integer }
---@return integer
function M.apply(model, options)
  local who = "prune.modes.apply"
  arguments.expect(who, "model", model, "a module")
  local o = arguments.read(who, options, { image = arguments.none }, { image = "an integer >= 0" })
  local image, count = o.image or model.language_model and model.config.image_token_index or -1, 0
  for _, module in model:named_modules() do
    if module.route and module.mix and module.experts then
      skipping:wrap(module, { image = image, text = 0.0, visual = 0.0, alpha = { text = 1.0, visual = 1.0 } })
      count = count + 1
    end
  end
  if count == 0 then arguments.fail("%s: model: expected a mixture of experts, got a model without one", who) end
  return count
end

--- Makes the layers what they were.
---@param model LanguageModel
function M.remove(model)
  for _, layer in ipairs(wrapped("prune.modes.remove", model)) do skipping:unwrap(layer.module) end
end

--- Says what is skipped. options: text and visual (the thresholds; 0 skips nothing), alpha ({ text = list, visual =
-- list } of numbers by layer). What is not given stays.
---@param model LanguageModel
---@param options { text?: number, visual?: number, alpha?: table }
function M.set(model, options)
  local who = "prune.modes.set"
  local list = wrapped(who, model)
  local o = arguments.read(who, options, { text = arguments.none, visual = arguments.none, alpha = arguments.none },
    { text = "a number >= 0", visual = "a number >= 0", alpha = "a table" })
  for _, kind in ipairs(o.alpha and { "text", "visual" } or {}) do
    arguments.expect(who, "alpha." .. kind, o.alpha[kind], "a list of numbers")
    if #o.alpha[kind] ~= #list then
      arguments.fail("%s: alpha.%s: expected a number for each of %d layers, got %d", who, kind, #list, #o.alpha[kind])
    end
  end
  for i, layer in ipairs(list) do
    local state = layer.module._skipping
    state.text, state.visual = o.text or state.text, o.visual or state.visual
    if o.alpha then state.alpha = { text = o.alpha.text[i] + 0.0, visual = o.alpha.visual[i] + 0.0 } end
  end
end

--- What fn() makes the experts compute: fn's result, and pairs of a token and one of its chosen experts, summed over
-- the layers: text and visual (chosen), executed, executed_visual, and skipped, the share of all that was not computed.
-- watch(layer, visual, importance, kept) is called in each layer, with bool [m, 1], f32 [m, chosen] and bool [m,
-- chosen].
---@param model LanguageModel
---@param fn function
---@param watch? function
---@return any
---@return { text: integer, visual: integer, executed: integer, executed_visual: integer, skipped: number }
function M.count(model, fn, watch)
  local who = "prune.modes.count"
  local list = wrapped(who, model)
  arguments.expect(who, "fn", fn, "a function")
  arguments.expect(who, "watch", watch, "a function or nil")
  local counts = { text = 0, visual = 0, executed = 0, executed_visual = 0 }
  for _, layer in ipairs(list) do layer.module._skipping.counts, layer.module._skipping.watch = counts, watch end
  local result = table.pack(pcall(fn))
  for _, layer in ipairs(list) do layer.module._skipping.counts, layer.module._skipping.watch = nil, nil end
  if not result[1] then error(result[2], 0) end
  local chosen = counts.text + counts.visual
  counts.skipped = chosen > 0 and 1 - counts.executed / chosen or 0
  return result[2], counts
end

--- Pictures, darker where fewer experts are computed: image u8 [n, 3, h, w] on the CPU; chosen [tokens, experts of
-- each], not 0 where one is computed, as count() watches them, the tokens of picture after picture, of which the first
-- `side` x `side` of each are its patches.
---@param image Tensor
---@param chosen Tensor
---@param side integer
---@return Tensor u8
function M.paint(image, chosen, side)
  local who = "prune.modes.paint"
  arguments.expect(who, "image", image, "a tensor")
  arguments.expect(who, "chosen", chosen, "a tensor")
  arguments.expect(who, "side", side, "an integer >= 1")
  local n, tokens = image.shape[1], chosen.shape[1]
  if image.ndim ~= 4 or chosen.ndim ~= 2 or n == 0 or tokens % n ~= 0 or tokens < n * side * side then
    arguments.fail("%s: expected an image [n, 3, h, w] and chosen [n x at least %d, experts], got %s and %s", who,
      side * side, arguments.describe(image), arguments.describe(chosen))
  end
  local share = chosen:to { device = "cpu", dtype = "f32" }:mean({ 1 }):reshape(n, -1):narrow(1, 0, side * side)
  local map = ty.interpolate(share:sqrt():reshape(n, 1, side, side), image.shape[3], 0, "nearest")
  return (image:to "f32" * (map * 0.9 + 0.1)):to "u8"
end

--- The mean divergence KL(p | q) of rows of logits [n, vocabulary], those of p first.
---@param reference Tensor
---@param logits Tensor
---@return number
function M.divergence(reference, logits)
  local who = "prune.modes.divergence"
  arguments.expect(who, "reference", reference, "a tensor")
  arguments.expect(who, "logits", logits, "a tensor")
  return ty.no_grad(ty.scope, function()
    local p, q = reference:to("f32"):log_softmax(-1), logits:to("f32"):log_softmax(-1)
    return math.max(0, (p:exp() * (p - q)):sum(-1):mean():item())
  end)
end

local function measured(fn) return ty.no_grad(ty.scope, function() return fn():detach():clone() end) end

--- alpha of each layer: the divergence of logits() when the experts of the layer are skipped, divided by the sum over
-- all layers. options: apart (false: one number for both kinds of tokens, as in the paper; true: that of skipping for
-- text alone, and for pictures alone). logits() gives those of the answers of calibration data [n, vocabulary].
---@param model LanguageModel
---@param logits fun(): Tensor
---@param options? { apart?: boolean }
---@return { text: number[], visual: number[] } alpha
function M.importance(model, logits, options)
  local who = "prune.modes.importance"
  local list = wrapped(who, model)
  arguments.expect(who, "logits", logits, "a function")
  local o = arguments.read(who, options, { apart = false })
  M.set(model, { text = 0, visual = 0 })
  local reference, alpha = measured(logits), {}
  for _, kinds in ipairs(o.apart and { { "text" }, { "visual" } } or { { "text", "visual" } }) do
    local found, sum = {}, 0
    for i, layer in ipairs(list) do
      local state = layer.module._skipping
      for _, kind in ipairs(kinds) do state[kind] = math.huge end
      found[i] = M.divergence(reference, measured(logits))
      for _, kind in ipairs(kinds) do state[kind] = 0.0 end
      sum = sum + found[i]
    end
    for i = 1, #found do found[i] = sum > 0 and found[i] / sum or 1 / #found end
    for _, kind in ipairs(kinds) do alpha[kind] = { table.unpack(found) } end
  end
  return alpha
end

--- The least value in a table of `rows` by `columns` among the entries whose share is at least `wanted`, where both
-- grow with the row and the column: a walk from the first row's last column, rows + columns measurements at most where
-- a table of all would take their product. measure(row, column) gives value and share. Returns row, column, value and
-- share, and the number of measurements; nil where no entry has the share.
---@param rows integer
---@param columns integer
---@param wanted number
---@param measure fun(row: integer, column: integer): number, number
---@return integer? row
---@return integer? column
---@return number? value
---@return number? share
---@return integer measurements
function M.search(rows, columns, wanted, measure)
  local who = "prune.modes.search"
  arguments.expect(who, "rows", rows, "an integer >= 1")
  arguments.expect(who, "columns", columns, "an integer >= 1")
  arguments.expect(who, "wanted", wanted, "a finite number")
  arguments.expect(who, "measure", measure, "a function")
  local i, j, best, count = 1, columns, nil, 0
  while i <= rows and j >= 1 do
    local value, share = measure(i, j)
    count = count + 1
    if share >= wanted then
      -- Less of the column may do; more of the row, at this column, cannot be better.
      if not best or value < best[3] then best = { i, j, value, share } end
      j = j - 1
    else
      i = i + 1
    end
  end
  if not best then return nil, nil, nil, nil, count end
  return best[1], best[2], best[3], best[4], count
end

-- Thresholds for each kind of tokens at which even shares of the pairs of calibration data lie below, from none to all.
local function grid(model, logits, points)
  local found = { text = {}, visual = {} }
  ty.no_grad(ty.scope, function()
    M.count(model, logits, function(_, visual, important)
      local is_visual = visual:flatten():to("u8"):tolist()
      for k, row in ipairs(important:tolist()) do
        local list = found[is_visual[k] == 1 and "visual" or "text"]
        table.move(row, 1, #row, #list + 1, list)
      end
    end)
  end)
  local thresholds = {}
  for kind, list in pairs(found) do
    table.sort(list)
    local last = 0.0
    thresholds[kind] = { 0.0 }
    for k = 1, points - 2 do
      local value = list[math.max(1, math.ceil(#list * k / (points - 1)))]
      if value and value > last then table.insert(thresholds[kind], value) end
      last = value or last
    end
    if #list > 0 then table.insert(thresholds[kind], list[#list] * 2 + 1) end
  end
  return thresholds
end

--- Sets alpha and the thresholds with the least divergence at which `share` of the chosen experts is skipped on
-- calibration data. logits() gives those of its answers [n, vocabulary]. options: share (0.8), points (24: thresholds
-- of each kind that are tried; they lie where even shares of the calibration data's pairs lie below), alpha (of
-- importance(), which is called without it), one (false; true: one threshold for both kinds of tokens). Returns the
-- table that set() takes, with divergence, share and measurements.
---@param model LanguageModel
---@param logits fun(): Tensor
---@param options? { share?: number, points?: integer, alpha?: table, one?: boolean }
---@return table
function M.calibrate(model, logits, options)
  local who = "prune.modes.calibrate"
  wrapped(who, model)
  arguments.expect(who, "logits", logits, "a function")
  local o = arguments.read(who, options, { share = 0.8, points = 24, alpha = arguments.none, one = false },
    { share = "a number in [0, 1]", points = "an integer >= 2", alpha = "a table" })
  M.set(model, { text = 0, visual = 0 })
  local alpha = o.alpha or M.importance(model, logits)
  M.set(model, { alpha = alpha })
  local reference, thresholds = measured(logits), grid(model, logits, o.points)
  local texts, visuals = thresholds.text, thresholds.visual
  if o.one then -- of all the values that either kind would try
    texts = table.move(visuals, 1, #visuals, #texts + 1, texts)
    table.sort(texts)
    visuals = { 0.0 }
  end
  local function choose(i, j)
    local text, visual = texts[i], o.one and texts[i] or visuals[j]
    M.set(model, { text = text, visual = visual })
    return text, visual
  end
  local function measure(i, j)
    choose(i, j)
    return ty.no_grad(ty.scope, function()
      local after, counts = M.count(model, logits)
      return M.divergence(reference, after), counts.skipped
    end)
  end
  local row, column, value, share, count
  if o.one then -- the first row whose share is enough, by halving
    local below, tries = 0, 0
    row, column = #texts, 1
    while row - below > 1 do
      local middle = (row + below) // 2
      local _, enough = measure(middle, 1)
      if enough >= o.share then row = middle else below = middle end
      tries = tries + 1
    end
    value, share = measure(row, 1)
    count = tries + 1
  else
    row, column, value, share, count = M.search(#texts, #visuals, o.share, measure)
  end
  local text, visual = choose(row, column)
  return { alpha = alpha, text = text, visual = visual, divergence = value, share = share, measurements = count }
end

return M
