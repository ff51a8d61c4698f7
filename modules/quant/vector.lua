--- Weights as entries of a codebook, whose assignments are calibrated with it. Deng et al. 2025, "VQ4DiT: Efficient
-- Post-Training Vector Quantization for Diffusion Transformers". Rows are cut into vectors of d weights; each becomes
-- the number of one of K codewords, which the layer keeps besides: log2(K) / d bits a weight, and the codebook.
--
--     local vector = quant.vector
--     local report = vector.quantize(network:clone(), { dimension = 4, codewords = 256 })    -- k-means alone
--     local report = vector.calibrate(network, calls, { steps = 100 })                       -- VQ4DiT
--
-- Calibration: each vector has the n nearest codewords as candidates, and is their mean with ratios that are trained
-- together with the codebook, until one ratio is as good as 1 and is left alone; in the end the largest one is taken.
-- It is trained on what the blocks and the whole network gave for calls that a sampler makes from noise: there is no
-- data.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local blocks = require "tycho.quant.blocks"

local nn = ty.nn
local surgery = nn.surgery
local expect, fail = arguments.expect, arguments.fail
local M = {}

-- ---- k-means ----

-- Squared distances of vectors [n, d] to codewords [k, d].
local function squares(x, codebook)
  return (x:square():sum(1, true) - ty.matmul(x, codebook:transpose(0, 1)) * 2 + codebook:square():sum(1):unsqueeze(0))
    :clamp(0)
end

--- k-means: codewords [k, d] for vectors [n, d], and the nearest of each, i64 [n]. A codeword that nothing is near to
-- takes the place of one of the vectors that are farthest from theirs. options: codewords (256; no more than vectors),
-- rounds (15), seed (0).
---@param vectors Tensor
---@param options? { codewords?: integer, rounds?: integer, seed?: integer }
---@return Tensor codebook
---@return Tensor nearest
function M.kmeans(vectors, options)
  local who = "quant.vector.kmeans"
  expect(who, "vectors", vectors, "a tensor")
  local o = arguments.read(who, options, { codewords = 256, rounds = 15, seed = 0 },
    { codewords = "an integer >= 1", rounds = "an integer >= 0", seed = "an integer" })
  if vectors.ndim ~= 2 or vectors:numel() == 0 then
    fail("%s: vectors: expected [n, d], got %s", who, arguments.describe(vectors))
  end
  return ty.no_grad(ty.scope, function()
    local x = vectors:detach():to "f32"
    local n, k = x.shape[1], math.min(o.codewords, x.shape[1])
    local order = ty.seeded_noise(ty.zeros(n), o.seed, "uniform"):argsort():to { device = x.device }
    local codebook = x:index_select(0, order:narrow(0, 0, k)):clone()
    local nearest
    for round = 0, o.rounds do
      local distance = squares(x, codebook)
      nearest = distance:argmin(1)
      if round == o.rounds then break end
      local counts = ty.zeros(k, { device = x.device }):index_add(0, nearest, ty.ones(n, { device = x.device }))
      local sums = ty.zeros_like(codebook):index_add(0, nearest, x)
      local used = counts:gt(0)
      local next_codebook = ty.where(used:unsqueeze(1), sums / counts:clamp(1):unsqueeze(1), codebook)
      local empty = k - used:to("f32"):sum():item() // 1 | 0
      if empty > 0 then
        -- The vectors themselves, so that few different ones are all found.
        local off = (x - next_codebook:index_select(0, nearest)):square():sum(1)
        local farthest = off:argsort(0, true):narrow(0, 0, math.min(empty, n))
        local places = used:to("f32"):argsort():narrow(0, 0, farthest.shape[1])
        local moved = off:index_select(0, farthest):gt(0):unsqueeze(1)
        next_codebook = next_codebook:index_copy(0, places, ty.where(moved, x:index_select(0, farthest),
          next_codebook:index_select(0, places)))
      end
      codebook = next_codebook
    end
    return codebook, nearest
  end)
end

-- ---- layers ----

-- Soft: the mean of candidates. Its codebook and logits are trained.
local soft = surgery.wrapper {
  name = "SoftVector", field = "_soft_vector", fields = { "codebook", "logits", "candidates", "settled", "choice" },
  forward = function()
    return function(self, x, residual, activation)
      return surgery.finish(ty.linear(x, M.weight(self):to(x.dtype), self.bias), residual, activation)
    end
  end,
}

local packed = surgery.wrapper {
  name = "Vector", field = "_vector", fields = { "codebook", "codes" },
  forward = function()
    return function(self, x, residual, activation)
      local y = ty.linear_codebook(x, self.codes, self.codebook)
      return surgery.finish(self.bias and y + self.bias or y, residual, activation)
    end
  end,
  describe = function(o) return ("%d codewords of %d weights"):format(o.codewords, o.dimension) end,
}

local function soft_state(who, module)
  local o = nn.is_module(module) and soft:state(module)
  if not o then fail("%s: module: expected a layer of begin(), got %s", who, arguments.describe(module)) end
  return o
end

--- The ratios of a soft layer's candidates, f32 [vectors, n], each row with the sum 1; of a settled vector 1 and zeros.
---@param module Module
---@return Tensor
function M.ratios(module)
  soft_state("quant.vector.ratios", module)
  local settled = module.settled:unsqueeze(1)
  return module.logits:softmax(1) * (1 - settled) + module.choice * settled
end

--- The weight that a layer stands for, f32 [outputs, inputs], soft or packed.
---@param module Module
---@return Tensor
function M.weight(module)
  local o = nn.is_module(module) and (soft:state(module) or packed:state(module))
  if not o then
    fail("quant.vector.weight: module: expected a layer of codewords, got %s", arguments.describe(module))
  end
  if module.codes then return ty.embedding(module.codebook, module.codes:to "i64"):reshape(o.rows, o.columns) end
  local vectors = ty.embedding(module.codebook, module.candidates)
  if module.candidates.shape[2] == 1 then return vectors:reshape(o.rows, o.columns) end
  return (vectors * M.ratios(module):unsqueeze(2)):sum(1):reshape(o.rows, o.columns)
end

local grid = { dimension = 4, codewords = 256, rounds = 15, seed = 0, skip = {} }
local kinds = { dimension = "an integer >= 1", codewords = "an integer in [2, 256]", rounds = "an integer >= 0",
  seed = "an integer", candidates = "an integer >= 1", start = '"even" or "distance"', steps = "an integer >= 0",
  codebook_lr = "a finite number >= 0", logits_lr = "a finite number >= 0", settle = "a number in (0.5, 1]",
  settled_by = "a number in [0, 1]",
  blocks_weight = "a finite number >= 0", ratio_weight = "a finite number >= 0" }

local function read(who, options, more)
  local defaults = {}
  for _, list in ipairs { grid, more or {} } do
    for key, value in pairs(list) do defaults[key] = value end
  end
  local o = arguments.read(who, options, defaults, kinds)
  o.who = who
  return o
end

-- The layers that become vectors, all checked before any is changed; names of those whose rows are no whole vectors.
local function layers_of(o, model)
  local found, left = {}, {}
  for _, layer in ipairs(blocks.linears(o.who, model, o.skip)) do
    local module = layer.module
    if soft:state(module) or packed:state(module) then fail("%s: %s has codewords already", o.who, layer.name) end
    if not module.weight:is_floating_point() then
      fail("%s: %s is quantized already (%s)", o.who, layer.name, module.weight.dtype)
    end
    if not module.weight:isfinite():all():item() then fail("%s: %s: a weight is not finite", o.who, layer.name) end
    local list = surgery.sizes(module) % o.dimension == 0 and found or left
    list[#list + 1] = layer
  end
  if #found == 0 then
    fail("%s: dimension: no layer's inputs are a multiple of %d", o.who, o.dimension)
  end
  for i, layer in ipairs(left) do left[i] = layer.name end
  return found, left
end

-- Makes a layer soft: a codebook by k-means and the nearest codewords of each vector.
local function soften(layer, o, k)
  local module = layer.module
  local w = surgery.rows(module):to("f32"):contiguous()
  local vectors = w:reshape(-1, o.dimension)
  local codebook = M.kmeans(vectors, { codewords = o.codewords, rounds = o.rounds, seed = o.seed * 1009 + k })
  local n = math.min(o.candidates, codebook.shape[1])
  local near, candidates = squares(vectors, codebook):topk(n, 1, false)
  local logits = ty.zeros({ vectors.shape[1], n }, { device = w.device })
  if o.start == "distance" then
    local distance = near:sqrt():clamp(1e-8)
    logits = (distance:narrow(1, n - 1, 1) / distance):log():clamp(nil, 8)
  end
  soft:wrap(module, { rows = w.shape[1], columns = w.shape[2], dimension = o.dimension, dtype = module.weight.dtype })
  module:parameter("codebook", codebook)
  module:parameter("logits", logits)
  module:buffer("candidates", candidates)
  module:buffer("settled", ty.zeros(vectors.shape[1], { device = w.device }))
  module:buffer("choice", ty.zeros_like(logits))
end

--- Makes the linear layers of a network's blocks soft, in place: what calibrate() begins with. options: those of
-- calibrate(). Returns the layers, { name, module } each, and the names of those that were left as they are.
---@param model Module
---@param options? table
---@return { name: string, module: Module }[] layers
---@return string[] left
function M.begin(model, options)
  local o = read("quant.vector.begin", options, { candidates = 2, start = "even" })
  local found, left = layers_of(o, model)
  for k, layer in ipairs(found) do ty.no_grad(ty.scope, soften, layer, o, k) end
  return found, left
end

--- Leaves vectors alone whose largest ratio is above a threshold: that candidate is theirs from now on. With a least
-- share, of each layer the vectors whose largest ratios are the largest are left alone as well, until so many are.
-- Returns the share of all vectors that are settled.
---@param layers { name: string, module: Module }[]  of begin()
---@param threshold number
---@param least? number  in [0, 1]; 0 if not given
---@return number share
function M.settle(layers, threshold, least)
  local who = "quant.vector.settle"
  expect(who, "layers", layers, "a list of tables")
  expect(who, "threshold", threshold, "a number")
  if least ~= nil then expect(who, "least", least, "a number in [0, 1]") end
  local done, all = 0, 0
  for _, layer in ipairs(layers) do
    local module = layer.module
    soft_state(who, module)
    ty.no_grad(ty.scope, function()
      local ratios = module.logits:detach():softmax(1)
      local largest_ratio = ratios:max(1)
      local sure = largest_ratio:gt(threshold):to "f32"
      local count = math.ceil((least or 0) * ratios.shape[1])
      if count > 0 then
        -- What is settled stands in front: it counts.
        local order = (largest_ratio + module.settled * 2):argsort(0, true):narrow(0, 0, count)
        sure = sure:maximum(ty.zeros_like(sure):index_add(0, order, ty.ones_like(order):to "f32"))
      end
      sure = sure * (1 - module.settled)
      local largest = ty.one_hot(ratios:argmax(1), ratios.shape[2]):to "f32"
      module.choice:add_(largest * sure:unsqueeze(1))
      module.settled:add_(sure)
      done, all = done + module.settled:sum():item(), all + module.settled:numel()
    end)
  end
  return all > 0 and done / all or 0
end

-- Packs a soft layer: its largest ratios decide. Returns its row of the report.
local function pack(layer)
  local module = layer.module
  local o = soft_state("quant.vector.finish", module)
  local first = M.ratios(module):detach():argmax(1)
  local codes = module.candidates:gather(1, first:unsqueeze(1)):squeeze(1)
  local codebook = module.codebook:detach():to("f16"):to "f32" -- as it is stored
  local changed = first:gt(0):to("f32"):mean():item()
  soft:unwrap(module)
  packed:wrap(module, { rows = o.rows, columns = o.columns, dimension = o.dimension, codewords = codebook.shape[1],
    dtype = o.dtype })
  surgery.remove(module, "weight")
  module:buffer("codebook", codebook)
  module:buffer("codes", codes:to("u8"):reshape(o.rows, o.columns // o.dimension))
  local width = 1
  while 1 << width < codebook.shape[1] do width = width + 1 end
  local bytes = (codes:numel() * width + 7) // 8 + 2 * codebook:numel()
  return { name = layer.name, parameters = o.rows * o.columns, bits = 8 * bytes / (o.rows * o.columns),
    changed = changed }
end

--- Packs soft layers, in place: codes of 8 bits in memory (as many bits as they need when counted), a codebook in half
-- precision, no soft weight. Returns a list of { name, parameters, bits, changed (the share of vectors that did not
-- take their nearest codeword) }, with the means of bits and changed.
---@param layers { name: string, module: Module }[]  of begin()
---@return table report
function M.finish(layers)
  expect("quant.vector.finish", "layers", layers, "a list of tables")
  local report, parameters = { bits = 0, changed = 0 }, 0
  for i, layer in ipairs(layers) do
    report[i] = ty.no_grad(pack, layer)
    parameters = parameters + report[i].parameters
    for _, key in ipairs { "bits", "changed" } do
      report[key] = report[key] + report[i][key] * report[i].parameters
    end
  end
  report.bits, report.changed = report.bits / math.max(1, parameters), report.changed / math.max(1, parameters)
  return report
end

-- ---- a network ----

local function quantize(model, options)
  local o = read("quant.vector.quantize", options)
  o.candidates, o.start = 1, "even"
  local found, left = layers_of(o, model)
  for k, layer in ipairs(found) do ty.no_grad(ty.scope, soften, layer, o, k) end
  local report = M.finish(found)
  report.left = left
  return report
end

--- Puts the nearest codewords of k-means in the place of weights of the linear layers of a network's blocks, in place.
-- options: dimension (4), codewords (256), rounds (15, of k-means), seed (0), skip (names of layers to leave out, or
-- their ends). Layers whose inputs are no multiple of the dimension stay. Returns a list of { name, parameters, bits,
-- changed }, with the mean of bits, and in `left` the names of layers that stay.
---@param model Module
---@param options? table
---@return table report
function M.quantize(model, options) return nn.for_caller(quantize, model, options) end

-- What the blocks and the network give for a call, in order: the first result of each block, then that of the network.
local function outputs(network, list, call)
  local found, removes = {}, {}
  for i, block in ipairs(list) do
    removes[i] = block:register_forward_hook(function(_, results)
      found[#found + 1] = ty.is_tensor(results) and { results } or table.move(results, 1, #results, 1, {})
    end)
  end
  local result = table.pack(pcall(network, table.unpack(call, 1, call.n or #call)))
  for _, remove in ipairs(removes) do remove() end
  if not result[1] then error(result[2], 0) end
  return found, result[2]
end

-- The mean squared distance of the network's outputs, and the mean of the blocks' own, each over all it gives.
local function distances(model, list, call, targets, wanted)
  local found, output = outputs(model, list, call)
  local sum, count = nil, 0
  for i, results in ipairs(found) do
    for j, y in ipairs(results) do
      if ty.is_tensor(y) then
        local part = (y - targets[i][j]):square():mean()
        sum, count = sum and sum + part or part, count + 1
      end
    end
  end
  return (output - wanted):square():mean(), sum and sum / count
end

-- How undecided the ratios are: 0 where they are 0 or 1 (equation 9), as a mean over layers.
local function indecision(layers)
  local sum
  for _, layer in ipairs(layers) do
    local part = (1 - (M.ratios(layer.module) * 2 - 1):abs()):sum(1):mean()
    sum = sum and sum + part or part
  end
  return sum / #layers
end

local function calibrate(model, calls, options)
  local o = read("quant.vector.calibrate", options, { candidates = 2, start = "even", steps = 100,
    codebook_lr = 1e-3, logits_lr = 0.02, settle = 0.99, settled_by = 0.6, blocks_weight = 1, ratio_weight = 0.1 })
  expect(o.who, "calls", calls, "a list of tables")
  if #calls == 0 then fail("%s: calls: expected at least one, got an empty table", o.who) end
  local found, left = layers_of(o, model)
  local original, was_training, flags = model:clone(), model.training, {}
  original:eval()
  for _, p in ipairs(model:parameters()) do
    flags[p] = p.requires_grad
    p:requires_grad_(false)
  end
  for k, layer in ipairs(found) do ty.no_grad(ty.scope, soften, layer, o, k) end
  model:eval()
  local books, logits = {}, {}
  for _, layer in ipairs(found) do
    books[#books + 1] = layer.module.codebook:requires_grad_(true)
    if o.candidates > 1 then logits[#logits + 1] = layer.module.logits:requires_grad_(true) end
  end
  local groups = { { params = books, lr = o.codebook_lr } }
  if #logits > 0 then groups[2] = { params = logits, lr = o.logits_lr } end
  local opt = ty.optim.AdamW(groups, { weight_decay = 0, schedule = function(at)
    return (1 + math.cos(math.pi * math.min(1, at / math.max(1, o.steps)))) / 2
  end })
  local list, losses, settled, order = blocks.list(o.who, model), {}, 0, {}
  local originals = blocks.list(o.who, original)
  local ok, problem = pcall(function()
    for step = 1, o.steps do
      if #order == 0 then
        order = ty.seeded_noise(ty.zeros(#calls), o.seed * 100003 + step, "uniform"):argsort():tolist()
      end
      local call = calls[table.remove(order) + 1]
      ty.scope(function()
        local targets, wanted = ty.no_grad(outputs, original, originals, call)
        local loss, own = distances(model, list, call, targets, wanted)
        losses[step] = loss:item()
        if own then loss = loss + own * o.blocks_weight end
        if #logits > 0 and o.ratio_weight > 0 then loss = loss + indecision(found) * o.ratio_weight end
        opt:step(loss)
      end)
      -- The codebook has to follow what is decided: a mean of two codewords says little of either. So a share of the
      -- vectors that grows from the first step on is decided, the surest first, and no step changes many at once.
      if #logits > 0 then
        settled = M.settle(found, o.settle, o.settled_by > 0 and math.min(1, step / (o.settled_by * o.steps)) or 1)
      end
    end
  end)
  for _, p in ipairs(model:parameters()) do p:requires_grad_(flags[p] or false) end
  model:train(was_training)
  if not ok then error(problem, 0) end
  local report = M.finish(found)
  report.left, report.losses, report.settled = left, losses, settled
  return report
end

--- VQ4DiT: codebooks and assignments of the linear layers of a network's blocks, calibrated together, in place. calls:
-- lists of what the network is called with (x, t, condition; table.pack), which a sampler makes from noise. options:
-- those of quantize() and
--   candidates (2: nearest codewords for each vector; 1 calibrates the codebook alone), start ("even": all ratios the
--   same in the begin; "distance": the nearer the larger)
--   steps (100: a call each), codebook_lr (1e-3), logits_lr (0.02), both along a cosine to 0
--   settle (0.99: a ratio above it is left alone as 1), settled_by (0.6: by this share of the steps all are, the surest
--   first, as many in each step; the codebook alone is trained on after that), blocks_weight (1, of the mean over the
--   blocks' own squared distances beside that of the network's output), ratio_weight (0.1, of how undecided ratios are)
-- Returns the list of quantize(), with bits, changed, left, losses (mean squared distance of the network's output at
-- each step) and settled (the share of vectors that were decided before the end).
---@param model Module
---@param calls table[]
---@param options? table
---@return table report
function M.calibrate(model, calls, options) return nn.for_caller(calibrate, model, calls, options) end

return M
