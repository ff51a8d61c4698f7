--- QLLM: weights and activations in few bits, once the channels that are far larger than others are split and as many
-- similar ones merged. Liu et al. 2024, "QLLM: Accurate and Efficient Low-Bitwidth Quantization for Large Language
-- Models". Then low-rank weights make up for what a block lost, and are fused into the quantized ones (section 4.2).
--
--     local report = quant.qllm.quantize(model, corpus.training, { bits = 4, activations = 4 })
--     print(report.bits, report.sites[1].extra, report.sites[1].largest)
--
-- A channel whose largest value is above a threshold theta becomes T = ceil(largest / theta) channels, each x / T with
-- the same column of the weight: nothing changes but the range. Of the channels that were not split every other one may
-- be merged with the most similar one of the rest: its values become the mean, the columns add up, and the layer has as
-- many channels as before. theta is chosen for each input of a block by what the block then gives. Weights are rounded
-- by rows and activations by tokens, both from the least to the largest value; attention scores are left alone.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local blocks = require "tycho.quant.blocks"
local calibration = require "tycho.quant.calibration"
local gptq = require "tycho.quant.gptq"
local moments = require "tycho.quant.moments"
local packing = require "tycho.quant.packing"

local nn = ty.nn
local surgery = nn.surgery
local expect, fail = arguments.expect, arguments.fail
local M = {}

-- ---- quantization ----

-- Codes of rows x [n, columns] and their grid.
local function encode(x, bits)
  local scale, offset = gptq.grid(x, { bits = bits, symmetric = false, mse = false })
  return ((x - offset) / scale):round():clamp(0, (1 << bits) - 1), scale, offset
end

--- x [..., n] rounded to 2^bits values a row, from its least to its largest one, 0 among them. The gradient is that of
-- x: rounding is passed straight through.
---@param x Tensor
---@param bits integer
---@return Tensor
function M.fake(x, bits)
  expect("quant.qllm.fake", "x", x, "a tensor")
  expect("quant.qllm.fake", "bits", bits, "an integer in [1, 8]")
  if x.ndim < 1 or x:numel() == 0 then
    fail("quant.qllm.fake: x: expected [..., n], got %s", arguments.describe(x))
  end
  local value = ty.no_grad(function()
    local rows = x:detach():reshape(-1, x.shape[#x.shape])
    local codes, scale, offset = encode(rows, bits)
    return (codes * scale + offset):reshape(x.shape)
  end)
  return x.requires_grad and value + (x - x:detach()) or value
end

-- ---- channels ----

--- The least threshold that splits channels into at most so many more. largest: largest magnitudes, f32 [channels] or a
-- list.
---@param largest Tensor|number[]
---@param most integer
---@return number theta
function M.threshold(largest, most)
  local who = "quant.qllm.threshold"
  if ty.is_tensor(largest) then largest = largest:tolist() end
  expect(who, "largest", largest, "a list of numbers")
  expect(who, "most", most, "an integer >= 0")
  local high = 0.0
  for _, x in ipairs(largest) do high = math.max(high, x) end
  if high ~= high or high == math.huge then
    fail("%s: largest: expected finite numbers, got %s", who, tostring(high))
  end
  local function extra(theta)
    local sum = 0
    for _, x in ipairs(largest) do sum = sum + math.max(1, math.ceil(x / theta)) - 1 end
    return sum
  end
  if high == 0 then return 1.0 end
  local low = high / (most + 2) -- where the largest channel alone becomes too many
  for _ = 1, 50 do
    local middle = (low + high) / 2
    if extra(middle) <= most then high = middle else low = middle end
  end
  return high
end

--- How much two channels differ for a layer's output (equation 5), for channels `from` against channels `to`:
-- |xi - xj|^2 |wi - wj|^2 / 4, f64 [from, to]. moment: x' x [channels, channels]; w: [outputs, channels].
---@param moment Tensor
---@param w Tensor
---@param from Tensor  i64
---@param to Tensor    i64
---@return Tensor
function M.distances(moment, w, from, to)
  local who = "quant.qllm.distances"
  expect(who, "moment", moment, "a tensor")
  expect(who, "w", w, "a tensor")
  expect(who, "from", from, "a tensor")
  expect(who, "to", to, "a tensor")
  if moment.ndim ~= 2 or w.ndim ~= 2 or moment.shape[1] ~= moment.shape[2] or w.shape[2] ~= moment.shape[1] then
    fail("%s: w: expected [outputs, channels] beside [channels, channels], got %s and %s", who, arguments.describe(w),
      arguments.describe(moment))
  end
  local function squares(gram)
    local own = gram:diagonal()
    local cross = gram:index_select(0, from):index_select(1, to)
    return (own:index_select(0, from):unsqueeze(1) + own:index_select(0, to):unsqueeze(0) - cross * 2):clamp(0)
  end
  w = w:to "f64"
  return squares(moment:to "f64") * squares(ty.matmul(w:transpose(0, 1), w)) / 4
end

-- A tensor of counts from 0 of a list.
local function indices(list, device) return ty.tensor(list, { dtype = "i64", device = device }) end

--- What becomes of the channels that a layer (or several with the same input) gets.
---@class Reassembly
---@field gather Tensor    i64 [channels]: the channel that each new one is made of
---@field factor Tensor    f32 [channels]: times this
---@field merged? Tensor   i64: channels that are added to others
---@field into? Tensor     i64: the new channels that they are added to
---@field share? Tensor    f32: times this
---@field weights? Tensor  f32 [channels]: what a column of the weight is multiplied by; 1 by default
---@field extra integer    channels that splitting made
---@field theta number

--- Splits channels at a threshold and merges as many of the others, so that there are as many as before; assemble =
-- false leaves the layer wider. largest: largest magnitudes of the inputs, f32 [channels]; moment: x' x [channels,
-- channels] of the inputs; w: [outputs, channels], rows of all layers with this input.
---@param largest Tensor
---@param moment Tensor
---@param w Tensor
---@param theta number
---@param assemble? boolean  true
---@return Reassembly
function M.reassemble(largest, moment, w, theta, assemble)
  local who = "quant.qllm.reassemble"
  expect(who, "largest", largest, "a tensor")
  expect(who, "moment", moment, "a tensor")
  expect(who, "w", w, "a tensor")
  expect(who, "theta", theta, "a finite number > 0")
  assemble = expect(who, "assemble", assemble == nil or assemble, "a boolean")
  local counts, whole, extra, device = {}, {}, 0, w.device
  for i, x in ipairs(largest:tolist()) do
    counts[i] = math.max(1, math.ceil(x / theta))
    extra = extra + counts[i] - 1
    if counts[i] == 1 then whole[#whole + 1] = i - 1 end
  end
  if #counts ~= w.shape[2] then
    fail("%s: largest: expected [%d], got %s", who, w.shape[2], arguments.describe(largest))
  end
  local target, size = {}, {} -- of a merged channel: where it goes; of a kept one: how many it stands for
  if assemble and extra > 0 then
    local from, to = {}, {}
    for k, i in ipairs(whole) do table.insert(k % 2 == 1 and from or to, i) end
    if extra > #from or #to == 0 then
      fail("%s: theta: %g splits channels into %d more, and only %d can be merged", who, theta, extra, #from)
    end
    local d = M.distances(moment, w, indices(from, device), indices(to, device))
    local least, nearest = d:min(1), d:argmin(1):tolist()
    for _, k in ipairs(least:argsort():narrow(0, 0, extra):tolist()) do
      local into = to[nearest[k + 1] + 1]
      target[from[k + 1]], size[into] = into, (size[into] or 1) + 1
    end
  end
  local gather, factor, place, merged, into, share = {}, {}, {}, {}, {}, {}
  for i, count in ipairs(counts) do
    local channel = i - 1
    if target[channel] then
      merged[#merged + 1], share[#share + 1] = channel, 1 / size[target[channel]]
    else
      place[channel] = #gather
      for _ = 1, count do
        gather[#gather + 1], factor[#factor + 1] = channel, 1 / (size[channel] or count)
      end
    end
  end
  for k, channel in ipairs(merged) do into[k] = place[target[channel]] end
  local result = { gather = indices(gather, device), extra = extra, theta = theta,
    factor = ty.tensor(factor, { device = device }) }
  if #merged > 0 then
    result.merged, result.into = indices(merged, device), indices(into, device)
    result.share = ty.tensor(share, { device = device })
  end
  return result
end

--- SmoothQuant in the same form: channel i of the input over s, its column times s = largest_i^strength /
-- (largest of the column)^(1 - strength). Xiao et al. 2023, "SmoothQuant".
---@param largest Tensor  f32 [channels]
---@param w Tensor        [outputs, channels]
---@param strength? number  0.5
---@return Reassembly
function M.smooth(largest, w, strength)
  local who = "quant.qllm.smooth"
  expect(who, "largest", largest, "a tensor")
  expect(who, "w", w, "a tensor")
  strength = expect(who, "strength", strength == nil and 0.5 or strength, "a number in [0, 1]")
  local s = largest:clamp(1e-5):pow(strength) / ty.norm(w:to "f32", math.huge, 0):clamp(1e-5):pow(1 - strength)
  s = s:clamp(1e-5)
  return { gather = ty.arange(largest.shape[1], { device = w.device }), factor = 1 / s, weights = s, extra = 0,
    theta = math.huge }
end

--- The inputs of a layer after reassembly: x [..., channels] to [..., new channels].
---@param r Reassembly
---@param x Tensor
---@return Tensor
function M.inputs(r, x)
  expect("quant.qllm.inputs", "r", r, "a table")
  expect("quant.qllm.inputs", "gather", r.gather, "a tensor")
  expect("quant.qllm.inputs", "x", x, "a tensor")
  local y = x:index_select(-1, r.gather) * r.factor:to(x.dtype)
  if not r.merged then return y end
  return y:index_add(-1, r.into, x:index_select(-1, r.merged) * r.share:to(x.dtype))
end

--- The weight of a layer after reassembly: w [outputs, channels] to [outputs, new channels].
---@param r Reassembly
---@param w Tensor
---@return Tensor
function M.columns(r, w)
  expect("quant.qllm.columns", "r", r, "a table")
  expect("quant.qllm.columns", "gather", r.gather, "a tensor")
  expect("quant.qllm.columns", "w", w, "a tensor")
  local y = w:index_select(1, r.gather)
  if r.weights then y = y * r.weights:to(w.dtype) end
  if not r.merged then return y end
  return y:index_add(1, r.into, w:index_select(1, r.merged))
end

-- ---- layers ----

local parts = { "gather", "factor", "merged", "into", "share" }

local wrapper = surgery.wrapper {
  name = "Qllm", field = "_qllm",
  fields = { "gather", "factor", "merged", "into", "share", "mapped", "rounded", "down", "up", "codes", "scales",
    "offsets" },
  forward = function()
    return function(self, x, residual, activation)
      local o = self._qllm
      if self.gather then x = M.inputs(self, x) end
      x = M.fake(x, o.activations)
      if o.fused and self.up then
        local w = M.fake(self.mapped + ty.matmul(self.up, self.down), o.bits)
        return surgery.finish(ty.linear(x, w, self.bias), residual, activation)
      end
      local y = ty.linear(x, self.rounded or M.weight(self):to(x.dtype), self.bias)
      if self.up then y = y + ty.linear(ty.linear(x, self.down), self.up) end
      return surgery.finish(y, residual, activation)
    end
  end,
  describe = function(o) return ("%d bits, inputs %d"):format(o.bits, o.activations) end,
}

-- Puts a reassembly (nil: none) and rounded weights on a layer whose own weight stays for the time being.
local function begin(layer, r, o)
  local module = layer.module
  local w = gptq.weight_of(o.who, layer)
  if r then w = M.columns(r, w) end
  wrapper:wrap(module, { bits = o.bits, activations = o.activations, rows = w.shape[1], columns = w.shape[2],
    fused = o.fused })
  for _, key in ipairs(parts) do
    if r and r[key] then module:buffer(key, r[key]) end
  end
  module:buffer("mapped", w)
  module:buffer("rounded", M.fake(w, o.bits))
end

-- Low-rank weights, the second of them zero, so that nothing has changed.
local function add_low_rank(layer, o, k)
  local state = layer.module._qllm
  local down = ty.seeded_noise(ty.zeros({ o.rank, state.columns }), o.seed * 100003 + k, "normal")
  layer.module:parameter("down", (down * (1 / state.columns) ^ 0.5):to { device = layer.module.weight.device })
  layer.module:parameter("up", ty.zeros({ state.rows, o.rank }, { device = layer.module.weight.device }))
end

-- Fuses the low-rank weights, packs the codes in the place of the weight; returns the layer's row of the report.
local function pack(layer, r, o, first)
  local module = layer.module
  local w = module.mapped
  if module.up then w = w + ty.matmul(module.up:detach(), module.down:detach()) end
  for _, key in ipairs { "mapped", "rounded", "down", "up" } do
    if module[key] then surgery.remove(module, key) end
  end
  local rows, columns = w.shape[1], w.shape[2]
  local codes, scale, offset = encode(w, o.bits)
  surgery.remove(module, "weight")
  module:buffer("codes", packing.pack(codes, o.bits))
  module:buffer("scales", scale:to("f16"):to "f32")
  module:buffer("offsets", (offset / scale):round() * module.scales)
  -- A scale in half precision and a code for zero of each row; of the channels, once for all layers that share them,
  -- places in 16 bits and counts in 8. Factors of smoothing belong into what is before the layer.
  local bytes = module.codes:nbytes() + 3 * rows
  if r and first and not r.weights then bytes = bytes + 3 * columns + 4 * (r.merged and r.merged:numel() or 0) end
  local inputs = r and r.inputs or columns
  return { name = layer.name, parameters = rows * inputs, bits = 8 * bytes / (rows * inputs), channels = columns,
    inputs = inputs }
end

--- The weight that a quantized layer stands for, f32 [outputs, channels].
---@param module Module
---@return Tensor
function M.weight(module)
  local o = nn.is_module(module) and wrapper:state(module)
  if not o or not module.codes then
    fail("quant.qllm.weight: module: expected a quantized layer, got %s", arguments.describe(module))
  end
  return packing.unpack(module.codes, o.bits, o.columns):to "f32" * module.scales + module.offsets
end

-- ---- a model ----

-- The largest magnitudes, second moments and kurtosis of what each group of layers gets.
local function look(block, groups, calls)
  local seen, removes = {}, {}
  for k, group in ipairs(groups) do
    local module = group[1].module
    local n = surgery.sizes(module)
    local s = { largest = ty.keep(ty.zeros(n, { device = module.weight.device })),
      moment = moments.new(n, module.weight.device), fourth = 0.0, second = 0.0, count = 0 }
    seen[k] = s
    removes[k] = module:register_forward_pre_hook(function(_, x)
      ty.scope(function()
        x = x:detach():reshape(-1, n):to "f32"
        s.largest:copy_(ty.maximum(s.largest, ty.norm(x, math.huge, 0)))
        moments.add(s.moment, x)
        local square = x:square()
        s.second, s.fourth = s.second + square:sum():item(), s.fourth + square:square():sum():item()
        s.count = s.count + x:numel()
      end)
    end)
  end
  local ok, problem = pcall(function()
    for _, call in ipairs(calls) do ty.scope(function() block(table.unpack(call, 1, call.n)) end) end
  end)
  for _, remove in ipairs(removes) do remove() end
  if not ok then error(problem, 0) end
  return seen
end

-- The mean squared distance of what a block gives to targets, over some batches.
local function distance(step, targets, count)
  local sum, all = 0, 0
  for k = 1, count do
    ty.no_grad(ty.scope, function()
      sum = sum + (step.output(step.inputs[k]) - targets[k]):square():sum():item()
      all = all + targets[k]:numel()
    end)
  end
  return sum / all
end

-- How the inputs of a group are reassembled, and the error of the block with that.
local function choose(step, group, s, o, exact)
  local stacked = {}
  for i, layer in ipairs(group) do stacked[i] = gptq.weight_of(o.who, layer) end
  local w = ty.concat(stacked, 0)
  local channels = w.shape[2]
  local function with(r)
    if not r then return nil end
    r.inputs = channels
    for _, key in ipairs { "gather", "factor", "merged", "into", "share", "weights" } do
      if r[key] then r[key] = ty.keep(r[key]) end
    end
    return r
  end
  if o.channels == "smooth" then return with(M.smooth(s.largest, w, o.strength)) end
  for _, ending in ipairs(o.whole) do
    if surgery.ends_in(group[1].name, ending) then return nil end
  end
  if o.channels == "none" then return nil end
  local best, least, last = nil, math.huge, nil
  for _, ratio in ipairs(o.ratios) do
    local most = math.floor(ratio * channels)
    local r = most > 0 and M.reassemble(s.largest, s.moment.sum, w, M.threshold(s.largest, most),
      o.channels == "assembled") or nil
    if (r and r.extra or 0) ~= last then
      last = r and r.extra or 0
      for _, layer in ipairs(group) do begin(layer, r, o) end
      local error = distance(step, exact, math.min(o.search, #step.inputs))
      for _, layer in ipairs(group) do wrapper:unwrap(layer.module) end
      if error < least then best, least = with(r), error end
    end
  end
  return best, least
end

-- Trains the low-rank weights of a block.
local function tune(step, layers, o, order)
  local list = {}
  for k, layer in ipairs(layers) do
    ty.no_grad(add_low_rank, layer, o, 1000 * step.index + k)
    list[#list + 1] = layer.module.down:requires_grad_(true)
    list[#list + 1] = layer.module.up:requires_grad_(true)
  end
  local total = o.epochs * #step.inputs
  local opt = ty.optim.AdamW(list, { lr = o.lr, weight_decay = 0,
    schedule = function(at) return math.max(0, 1 - at / total) end })
  for _ = 1, o.epochs do
    for _, k in ipairs(order(#step.inputs)) do
      ty.scope(function() opt:step((step.output(step.inputs[k]) - step.targets[k]):square():mean()) end)
    end
  end
  for _, p in ipairs(list) do p:requires_grad_(false) end
end

local defaults = { bits = 4, activations = 4, channels = "assembled", ratios = { 0, 0.01, 0.03, 0.05, 0.07, 0.1 },
  whole = { "o_proj" }, strength = 0.5, search = 1, rank = 4, epochs = 10, lr = 5e-4, fused = false }
local kinds = { bits = "an integer in [1, 4]", activations = "an integer in [1, 8]",
  channels = '"assembled" or "split" or "smooth" or "none"', ratios = "a list of numbers", whole = "a list of strings",
  strength = "a number in [0, 1]", search = "an integer >= 1", rank = "an integer >= 1", epochs = "an integer >= 0",
  fused = "a boolean", lr = "a finite number >= 0" }

local function quantize(model, data, options)
  local all = {}
  for _, list in ipairs { defaults, calibration.options } do
    for key, value in pairs(list) do all[key] = value end
  end
  local o = arguments.read("quant.qllm.quantize", options, all, kinds)
  o.who = "quant.qllm.quantize"
  if #o.ratios == 0 then fail("%s: ratios: expected at least one, got an empty list", o.who) end
  for _, ratio in ipairs(o.ratios) do
    if ratio < 0 or ratio > 0.25 then fail("%s: ratios: expected numbers in [0, 0.25], got %g", o.who, ratio) end
  end
  for _, layer in ipairs(blocks.linears(o.who, model, o.skip)) do
    if wrapper:state(layer.module) then fail("%s: %s is quantized already", o.who, layer.name) end
    gptq.weight_of(o.who, layer)
  end
  local report, flags, drawn = { sites = {}, blocks = {} }, {}, 0
  for _, p in ipairs(model:parameters()) do
    flags[p] = p.requires_grad
    p:requires_grad_(false)
  end
  local function order(n) -- a permutation of 1 to n, by the seed alone
    drawn = drawn + 1
    local list = ty.seeded_noise(ty.zeros(n), o.seed * 100003 + drawn, "uniform"):argsort():tolist()
    for i, at in ipairs(list) do list[i] = at + 1 end
    return list
  end
  local ok, problem = pcall(calibration.walk, o.who, model, data, o, function(step)
    local layers, chosen, row = step.layers, {}, { index = step.index }
    ty.no_grad(function()
      local groups = blocks.groups(step.block, layers, step.inputs)
      local seen = look(step.block, groups, step.inputs)
      local exact = {}
      for k = 1, math.min(o.search, #step.inputs) do
        exact[k] = ty.keep(ty.scope(function() return step.output(step.inputs[k]) end))
      end
      for k, group in ipairs(groups) do
        moments.check_finite(o.who, group[1].name, seen[k].moment)
        local r, error = choose(step, group, seen[k], o, exact)
        local s = seen[k]
        report.sites[#report.sites + 1] = { name = group[1].name, channels = s.largest.shape[1],
          extra = r and r.extra or 0, theta = r and r.theta or math.huge, error = error,
          largest = s.largest:tolist(), kurtosis = s.fourth * s.count / s.second ^ 2 }
        for i, layer in ipairs(group) do chosen[layer] = { r, i == 1 } end
      end
      for _, layer in ipairs(layers) do begin(layer, chosen[layer][1], o) end
      row.rounded = distance(step, step.targets, #step.inputs)
    end)
    if o.epochs > 0 then
      tune(step, layers, o, order)
      row.tuned = distance(step, step.targets, #step.inputs)
    end
    for _, layer in ipairs(layers) do
      report[#report + 1] = ty.no_grad(pack, layer, chosen[layer][1], o, chosen[layer][2])
    end
    row.packed = distance(step, step.targets, #step.inputs)
    report.blocks[#report.blocks + 1] = row
  end)
  for _, p in ipairs(model:parameters()) do p:requires_grad_(flags[p] or false) end
  if not ok then error(problem, 0) end
  local bits, parameters = 0, 0
  for _, row in ipairs(report) do
    bits, parameters = bits + row.bits * row.parameters, parameters + row.parameters
  end
  report.bits = bits / parameters
  return report
end

--- Quantizes the linear layers of a model's blocks and their inputs, in place, one block after the other, each to
-- give what the original one gave, from the inputs that the blocks before it now give. Embeddings, norms, biases and
-- the head stay. options:
--   bits (4; at most 4), activations (4)
--   channels ("assembled": split and merged; "split": the layers become wider; "smooth": SmoothQuant's scales in their
--   place; "none"), ratios ({ 0, 0.01, 0.03, 0.05, 0.07, 0.1 }: shares of more channels that are tried for each input),
--   search (1: batches that they are tried on), whole ({ "o_proj" }: names or ends of names of layers whose channels
--   stay, as the paper has it), strength (0.5, of SmoothQuant)
--   rank (4), epochs (10; 0: no low-rank weights), lr (5e-4, falls to 0 along a line), fused (false: the low-rank
--   weights are added to the rounded ones until both are rounded together in the end, as the paper has it; true: they
--   are inside of the rounding from the begin, which is passed straight through). The paper tunes four blocks at a
--   time; here it is one
--   rows (128), batch (8), seed (0), device, skip, held as in quant.calibration
-- Returns a list of { name, parameters, bits (stored, of a weight as it was), inputs, channels (that it has now) }, the
-- mean of bits in `bits`; in `sites` for each input { name, channels, extra, theta, error, largest (by channel),
-- kurtosis }; in `blocks` the mean squared distance of each block to the original: rounded, tuned, packed.
---@param model LanguageModel
---@param data PackedDataset|table[]
---@param options? table
---@return table report
function M.quantize(model, data, options) return nn.for_caller(quantize, model, data, options) end

return M
