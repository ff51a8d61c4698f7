--- Factors of channels that move from what layers are given into their weights, which changes nothing but what is easy
-- to round: columns times s, and what comes before, a norm or a linear layer, over s. Xiao et al. 2023, "SmoothQuant"
-- (inputs with large channels become even), and what AWQ stands on (weights of large channels become large).
--
--     quant.smooth(model, corpus.training, { strength = 0.5 })     -- then 8 bits for weights and activations
--
-- What comes before a layer is not read from its class or its name but tried: the module of the block whose outputs,
-- over s, leave what the block gives as it was.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local blocks = require "tycho.quant.blocks"
local calibration = require "tycho.quant.calibration"
local gptq = require "tycho.quant.gptq"

local nn = ty.nn
local surgery = nn.surgery
local expect = arguments.expect
local M = {}

local TOLERANCE = 1e-4 -- of a block's output, for f32; other factors than the right ones change far more

-- Divides the outputs of a module by s [outputs].
local function divide(module, s)
  local linear = surgery.kind(module) == "linear"
  for _, name in ipairs { "weight", "bias" } do
    local p = module[name]
    if ty.is_tensor(p) then
      p = p:detach()
      local by = s:to { dtype = p.dtype, device = p.device }
      if p.ndim == 2 and linear then
        p:copy_(surgery.laid_out(module, surgery.rows(module) / by:unsqueeze(1)))
      else
        p:div_(by)
      end
    end
  end
end

-- Multiplies the columns of a linear layer by s [inputs].
local function multiply(module, s)
  local w = module.weight:detach()
  w:copy_(surgery.laid_out(module, surgery.rows(module) * s:to { dtype = w.dtype, device = w.device }:unsqueeze(0)))
end

--- Moves factors s [channels] into the layers of a group: their columns times s, the outputs of what comes before them
-- over s.
---@param before Module  of feeder()
---@param group { name: string, module: Module }[]
---@param s Tensor
function M.move(before, group, s)
  expect("quant.scaling.move", "before", before, "a module")
  expect("quant.scaling.move", "group", group, "a list of tables")
  expect("quant.scaling.move", "s", s, "a tensor")
  ty.no_grad(function()
    divide(before, s)
    for _, layer in ipairs(group) do multiply(layer.module, s) end
  end)
end

-- Whether a module has an output for each of n channels: a norm with so many weights, or a linear layer.
local function gives(module, n)
  local w = module.weight
  if not ty.is_tensor(w) or not w:is_floating_point() then return false end
  if surgery.kind(module) == "linear" then return select(2, surgery.sizes(module)) == n end
  return w.ndim == 1 and w.shape[1] == n
end

--- The module of a block that what a group of layers is given comes from, channel by channel, so that factors may be
-- moved between them; nil where there is none. call: what the block is called with, of table.pack. Norms are tried
-- first.
---@param block Module
---@param group { name: string, module: Module }[]
---@param call table
---@return Module? before
---@return string? name
function M.feeder(block, group, call)
  local who = "quant.scaling.feeder"
  expect(who, "block", block, "a module")
  expect(who, "group", group, "a list of tables")
  expect(who, "call", call, "a table")
  local n, mine, norms, linears = surgery.sizes(group[1].module), {}, {}, {}
  for _, layer in ipairs(group) do mine[layer.module] = true end
  for name, module in block:named_modules() do
    if name ~= "" and not mine[module] and gives(module, n) then
      table.insert(surgery.kind(module) == "linear" and linears or norms, { module, name })
    end
  end
  return ty.no_grad(function()
    local function output() return ty.scope(function() return calibration.output(block, call):to "f32" end) end
    local before = output()
    local size = before:abs():max():item()
    -- Factors that no symmetry of the block would hide.
    local s = (ty.arange(n, { dtype = "f32", device = before.device }) * 2.399963):sin() * 0.5 + 1.2
    for _, list in ipairs { norms, linears } do
      for _, entry in ipairs(list) do
        local kept = {}
        local function keep(module)
          for _, key in ipairs { "weight", "bias" } do
            local p = module[key]
            if ty.is_tensor(p) then kept[#kept + 1] = { p:detach(), p:detach():clone() } end
          end
        end
        keep(entry[1])
        for _, layer in ipairs(group) do keep(layer.module) end
        M.move(entry[1], group, s)
        local ok, off = pcall(function() return (output() - before):abs():max():item() end)
        for _, pair in ipairs(kept) do pair[1]:copy_(pair[2]) end
        if ok and off <= TOLERANCE * math.max(size, 1e-30) then return entry[1], entry[2] end
      end
    end
    return nil
  end)
end

local function smooth(model, data, options)
  local who, defaults = "quant.smooth", { strength = 0.5 }
  for key, value in pairs(blocks.options) do defaults[key] = value end
  local o = nn.options(who, options, defaults)
  expect(who, "strength", o.strength, "a number in [0, 1]")
  local report = { left = {} }
  blocks.walk(who, model, data, o, function(group, _, _, place)
    local before, name = M.feeder(place.block, group, place.calls[1])
    if not before then
      for _, layer in ipairs(group) do report.left[#report.left + 1] = layer.name end
      return
    end
    local largest, rows
    place.each(function(x)
      local found = ty.norm(x:detach():flatten(0, -2):to "f32", math.huge, 0)
      largest = ty.keep(largest and ty.maximum(largest, found) or found)
    end)
    for _, layer in ipairs(group) do
      local found = ty.norm(gptq.weight_of(who, layer):to "f32", math.huge, 0)
      rows = rows and ty.maximum(rows, found) or found
    end
    local s = (largest:clamp(1e-5):pow(o.strength) / rows:clamp(1e-5):pow(1 - o.strength)):clamp(1e-5)
    M.move(before, group, s)
    for _, layer in ipairs(group) do
      report[#report + 1] = { name = layer.name, before = name, least = s:min():item(), most = s:max():item() }
    end
  end)
  ty.core.program.renew()
  return report
end

--- Makes the inputs of a model's layers even, so that 8 bits hold them: channel i over s_i = largest_i^strength /
-- (largest of the columns i)^(1 - strength), folded into the norm or the layer before, and the columns times s_i. The
-- model gives what it gave. data: llm.data.Packed, or a list of its batches. options: strength (0.5: 0 leaves inputs
-- alone, 1 makes them all equal), rows (128), batch (8), seed (0), device, skip: as in quant.gptq.quantize(). Returns a
-- list of { name, before (where the factors went), least, most }, with the names of layers that have nothing before
-- them to take factors in `left`.
---@param model LanguageModel
---@param data PackedDataset|table[]
---@param options? table
---@return table report
function M.smooth(model, data, options) return nn.for_caller(smooth, model, data, options) end

return M
