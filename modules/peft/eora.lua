--- EoRA: what compressing a model's layers took from them, given back by low-rank adapters without training. Liu et al.
-- 2024, "EoRA: Training-free Compensation for Compressed LLM with Eigenspace Low-Rank Approximation".
--
--     quant.round(model, { bits = 3, group = 64 })
--     peft.eora.compensate(model, original, corpus.training, { rank = 16 })
--     peft.save(model, "adapter")
--
-- With the inputs' covariance X X' = Q L Q', the error E = W - W' is brought into the space Q L^(1/2), where the plain
-- norm of a matrix is the norm of its products with X; cut off at rank r there, and brought back.
local ty = require "tycho"
local blocks = require "tycho.quant.blocks"
local adapter = require "tycho.peft.adapter"
local moments = require "tycho.quant.moments"

local nn = ty.nn
local surgery = nn.surgery
local expect = require("tycho.arguments").expect
local M = {}

--- b [outputs, rank] and a [rank, inputs] that make |(error - b a) X| the least for inputs with X X' = moment, or,
-- without one, |error - b a|. All in f64.
---@param error Tensor   [outputs, inputs]
---@param moment? Tensor [inputs, inputs]
---@param rank integer
---@return Tensor b
---@return Tensor a
function M.factors(error, moment, rank)
  local who = "quant.eora.factors"
  expect(who, "error", error, "a tensor")
  expect(who, "moment", moment, "a tensor or nil")
  expect(who, "rank", rank, "an integer >= 1")
  error = error:to "f64"
  local root, back
  if moment then
    local s, inverse = moments.whiten(moment)
    root, back = s:transpose(0, 1), inverse:transpose(0, 1)
    error = ty.matmul(error, root)
  end
  local u, s, v = ty.svd(error)
  local b = u:narrow(1, 0, rank) * s:narrow(0, 0, rank):unsqueeze(0)
  local a = v:narrow(0, 0, rank)
  return b, back and ty.matmul(a, back) or a
end

-- [outputs, inputs] of a layer in f64.
local function dense(module) return surgery.rows(module):to "f64" end

local function shape_text(t) return "[" .. table.concat(t.shape, ", ") .. "]" end

local function compensate(model, original, data, options)
  local who, defaults = "peft.eora", { rank = 16, method = "eora", dtype = "f32" }
  for key, value in pairs(blocks.options) do defaults[key] = value end
  local o = nn.options(who, options, defaults)
  if o.method ~= "eora" and o.method ~= "svd" then
    error(("%s: method: expected eora or svd, got %s"):format(who, tostring(o.method)), 0)
  end
  if not math.tointeger(o.rank) or o.rank < 1 then
    error(("%s: rank: expected a positive integer, got %s"):format(who, tostring(o.rank)), 0)
  end
  local found, wanted = blocks.linears(who, model, o.skip), {}
  for _, layer in ipairs(blocks.linears(who, original, o.skip)) do wanted[layer.name] = layer.module end
  local targets = {}
  for i, layer in ipairs(found) do
    local other = wanted[layer.name]
    if not other or shape_text(other.weight) ~= shape_text(layer.module.weight) then
      error(("%s: original: %s is %s in the model, %s in the original"):format(who, layer.name,
        shape_text(layer.module.weight), other and shape_text(other.weight) or "missing"), 0)
    end
    local inputs, outputs = surgery.sizes(layer.module)
    if o.rank > math.min(inputs, outputs) then
      error(("%s: rank: %d is more than %s has, %d"):format(who, o.rank, layer.name, math.min(inputs, outputs)), 0)
    end
    targets[i] = layer.name
  end
  local report = {}
  adapter.lora(model, { rank = o.rank, alpha = o.rank, dtype = o.dtype,
    targets = function(name)
      for _, target in ipairs(targets) do
        if name == target then return true end
      end
      return false
    end })
  local function give(layer, moment)
    local module = layer.module
    local error = dense(wanted[layer.name]) - dense(module)
    local b, a = M.factors(error, o.method == "eora" and moment or nil, o.rank)
    module.lora_A.weight:detach():copy_(a)
    module.lora_B.weight:detach():copy_(b)
    local function size(e)
      return moment and (ty.matmul(e, moment) * e):sum():item() or e:square():sum():item()
    end
    report[#report + 1] = { name = layer.name, before = size(error), after = size(error - ty.matmul(b, a)) }
  end
  if o.method == "svd" and not data then
    ty.no_grad(function()
      for _, layer in ipairs(found) do ty.scope(give, layer) end
    end)
    ty.core.program.renew()
    return report
  end
  blocks.walk(who, model, data, o, function(group, moment, count)
    for _, layer in ipairs(group) do
      if count > 0 then give(layer, moment) end -- an expert that no token went to stays as it is
    end
  end)
  return report
end

--- Gives a compressed model (quantized, pruned) adapters that make up for what its layers lost: low-rank, as peft.lora
-- adds them, to be saved, loaded, trained on and merged as those. original: the model as it was, with the same layers.
-- data: llm.data.Packed, or a list of its batches, whose activations weigh the error; each layer sees those of the
-- compensated layers before it. options:
--   rank (16), method ("eora"; "svd": plain truncation, which needs no data), dtype ("f32", of the adapters)
--   rows (128), batch (8), seed (0), device, skip: as in quant.gptq.quantize()
-- Returns a list of { name, before, after }: |E X|^2 of each layer without and with it (svd without data: of E).
---@param model LanguageModel
---@param original LanguageModel
---@param data PackedDataset|table[]|nil
---@param options? table
---@return table report
function M.compensate(model, original, data, options)
  return nn.for_caller(compensate, model, original, data, options)
end

return M
