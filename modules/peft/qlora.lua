--- QLoRA: adapters on a frozen model whose linear weights are 4-bit codes. Dettmers et al. 2023, "QLoRA: Efficient
-- Finetuning of Quantized LLMs".
local ty = require "tycho"
local arguments = require "tycho.arguments"
local adapter = require "tycho.peft.adapter"
local weights = require "tycho.quant.weights"

local M = {}

--- Encodes the linear weights of a model (quant.quantize) and gives it adapters on top, which change nothing until they
-- are trained. Gradients go through the codes to what comes before; the model computes in the dtype that it has, best
-- bf16. options: those of peft.lora, with the paper's defaults rank 64, alpha 16 and targets "all-linear"; quantize
-- ("nf4", with scales of 8 bits: double quantization; or another block-quantized dtype), skip (names or ends of names
-- of layers that keep their weights; by default "lm_head"). Returns the model, and the report of quant.quantize. Train
-- peft.parameters with optim.AdamW { paged = true }, save the adapter with peft.save; peft.merge with dtype = "bf16"
-- gives a model of full weights.
---@param model Module
---@param options? table
---@return Module model
---@return table report
function M.qlora(model, options)
  return ty.nn.for_caller(function()
    local who = "peft.qlora"
    local attach, o = adapter.prepare(who, model, options, { rank = 64, alpha = 16, targets = "all-linear",
      quantize = "nf4", skip = { "lm_head" } })
    local report = weights.encode_linear(who, "quantize", model, o.quantize, o.skip)
    attach()
    return model, report
  end)
end

--- What a model with an adapter takes while it is trained, in bytes, without activations: frozen (of which codes are
-- `quantized`), adapter, gradients (as large as the adapter) and, of an optimizer that is given, state. On the meta
-- device it is what it would take.
---@param model Module
---@param optimizer? Optimizer
---@return {frozen: integer, quantized: integer, adapter: integer, gradients: integer, state: integer, total: integer}
function M.footprint(model, optimizer)
  local trained, result = {}, { frozen = 0, quantized = 0, adapter = 0, state = 0 }
  for _, p in ipairs(adapter.parameters(model)) do
    trained[p] = true
    result.adapter = result.adapter + p:nbytes()
  end
  for _, p in ipairs(model:parameters()) do
    if not trained[p] then
      result.frozen = result.frozen + p:nbytes()
      if not p:is_floating_point() then result.quantized = result.quantized + p:nbytes() end
    end
  end
  for _, state in pairs(optimizer and optimizer.state or {}) do
    for _, value in pairs(state) do
      if ty.is_tensor(value) then result.state = result.state + value:nbytes() end
    end
  end
  result.gradients = result.adapter
  result.total = result.frozen + result.adapter + result.gradients + result.state
  return result
end

--- A model of a configuration as it is fine-tuned by qlora(), with gradients and the paged moments that the first step
-- of AdamW makes: report (qlora's), footprint, parameters (of the model without adapters), model, optimizer. On the
-- meta device, which computes nothing, any size takes no time.
---@param class function      makes the model of its config
---@param config table
---@param device? string      meta
---@return {report: table, footprint: table, parameters: integer, model: Module, optimizer: Optimizer}
function M.account(class, config, device)
  arguments.expect("peft.account", "class", class, "a function")
  arguments.expect("peft.account", "config", config, "a table")
  arguments.expect("peft.account", "device", device, "a string or nil")
  local model = ty.nn.with_defaults({ device = device or "meta", dtype = "bf16" }, class, config)
  if not arguments.is_module(model) then
    arguments.fail("peft.account: class: expected a function that makes a module, got one that makes %s",
      arguments.describe(model))
  end
  local parameters = model:count_parameters()
  local _, report = M.qlora(model)
  local trained = adapter.parameters(model)
  local optimizer = ty.optim.AdamW(trained, { paged = true })
  for _, p in ipairs(trained) do p:set_grad(ty.zeros_like(p)) end
  optimizer:step()
  return { report = report, footprint = M.footprint(model, optimizer), parameters = parameters, model = model,
    optimizer = optimizer }
end

return M
