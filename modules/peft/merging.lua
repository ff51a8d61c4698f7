--- Putting an adapter into the weights, and taking it out again.
local ty = require "tycho"
local adapter = require "tycho.peft.adapter"
local audit = require "tycho.peft.audit"
local layers = require "tycho.peft.layers"

local nn = ty.nn
local M = {}

local Report = {}
Report.__index = Report

function Report.__tostring(r)
  local text = ("merged %d modules: weights changed by %.3g at most, %.3g on average; rounding took %.3g at most, %.3g "
    .. "on average"):format(r.modules, r.max_change, r.mean_change, r.max_error, r.mean_error)
  if r.output then
    text = text .. ("; the output changed by %.3g at most, %.3g on average"):format(r.output.max, r.output.mean)
  end
  return text
end

local function largest_and_sum(t)
  if t:numel() == 0 then return 0, 0 end
  t = t:abs()
  return t:max():item(), t:sum():item()
end

--- Puts the adapter into the weights: sums are taken in f64 and rounded once, to the dtype of the weights. options:
-- keep (true: the weights that were there stay in memory, for peft.unmerge), dtype (of the merged weights; without it
-- block-quantized ones are encoded again, which takes more than rounding does), check (a function of the model that
-- returns a tensor, called before and after), gate (a report of peft.audit.run on this adapter as it is, which has to
-- have passed). Returns a report, made for print: modules, max_change and mean_change (of
-- the weights), max_error and mean_error (what rounding to the weights' dtype took), by_module (the same by name) and,
-- with check, output = { max, mean } (how far its result moved). An adapter of an embedding that is the head as well
-- is an error: model:untie() makes them two.
---@param model Module
---@param options? {keep?: boolean, dtype?: string, check?: (fun(model: Module): Tensor), gate?: AuditReport}
---@return table report
function M.merge(model, options)
  local who = "peft.merge"
  local o = nn.options(who, options, { keep = true, check = nn.none, dtype = nn.none, gate = nn.none })
  local record = adapter.of(who, model)
  nn.for_caller(adapter.plain, who, record, true)
  for _, layer in ipairs(record.way and record.layers or {}) do
    local why = record.way.refuse and record.way.refuse(layer.module)
    if why then error(("%s: %s: cannot be merged: %s"):format(who, layer.name, why), 2) end
  end
  if record.merged then error(who .. ": the adapter is merged already", 2) end
  if o.gate then audit.gate(who, model, o.gate) end
  local tied = type(model.tied) == "function" and model:tied()
  for _, layer in ipairs(record.layers) do
    if layer.module == tied then
      error(("%s: %s: expected an embedding that is not the head as well, got a tied one: the adapter is the "
        .. "embedding's alone, and merging would change the logits; model:untie() gives the head weights of its own")
        :format(who, layer.name), 2)
    end
  end
  local before = o.check and ty.no_grad(o.check, model)
  local report = setmetatable({ modules = #record.layers, by_module = {}, max_change = 0, mean_change = 0,
    max_error = 0, mean_error = 0 }, Report)
  local count, weights = 0, {}
  ty.no_grad(function()
    for i, layer in ipairs(record.layers) do
      weights[i] = ty.scope(function()
        local old, dtype = nn.surgery.rows(layer.module), o.dtype or layer.module.weight.dtype
        local exact = layers.merged_weight(layer.module)
        local ok, new = pcall(exact.to, exact, dtype)
        if not ok then error(("%s: %s: the weights are to be %s: %s"):format(who, layer.name, dtype, new), 0) end
        local max_change, change = largest_and_sum(exact - old:to "f64")
        local max_error, lost = largest_and_sum(new:to "f64" - exact)
        local n = exact:numel()
        new = nn.surgery.laid_out(layer.module, new)
        report.by_module[layer.name] = { max_change = max_change, mean_change = change / math.max(n, 1),
          max_error = max_error, mean_error = lost / math.max(n, 1) }
        report.max_change = math.max(report.max_change, max_change)
        report.max_error = math.max(report.max_error, max_error)
        report.mean_change, report.mean_error = report.mean_change + change, report.mean_error + lost
        count = count + n
        return new
      end)
    end
  end)
  count = math.max(count, 1)
  report.mean_change, report.mean_error = report.mean_change / count, report.mean_error / count
  for i, layer in ipairs(record.layers) do
    layer.module._lora.merged = o.keep and layer.module.weight or true
    layer.module._lora.merged_dtype = weights[i].dtype
    rawset(layer.module, "weight", ty.keep(weights[i]))
  end
  record.merged = true
  ty.core.program.renew()
  if before then
    local after = ty.no_grad(o.check, model)
    local max, sum = largest_and_sum(after:to "f64" - before:to "f64")
    report.output = { max = max, mean = sum / math.max(after:numel(), 1) }
  end
  return report
end

--- Takes a merged adapter out of the weights, which become exactly what they were. Returns the model.
---@param model Module
---@return Module model
function M.unmerge(model)
  local record = adapter.of("peft.unmerge", model)
  if not record.merged then error("peft.unmerge: the adapter is not merged", 2) end
  for _, layer in ipairs(record.layers) do
    if layer.module._lora.merged == true then error("peft.unmerge: the model was merged with keep = false", 2) end
  end
  for _, layer in ipairs(record.layers) do
    local a = layer.module._lora
    rawset(layer.module, "weight", ty.keep(adapter.moved(a.merged, layer.module.weight, a.merged_dtype)))
    a.merged, a.merged_dtype = nil, nil
  end
  record.merged = nil
  ty.core.program.renew()
  return model
end

return M
