--- The weights of a model's linear layers in blocks of few bits, in place: what stays in memory is the codes.
local ty = require "tycho"
local imatrix = require "tycho.quant.imatrix"

local nn = ty.nn
local surgery = nn.surgery
local M = {}

local elements = { q8_0 = 32, q4_0 = 32, q2_k = 256, q3_k = 256, q4_k = 256, q6_k = 256, nf4 = 64,
  mxfp4 = 32, nvfp4 = 64 } -- of a block

-- The codes of w [outputs, inputs]; and the squares of what that changed and of the weights, added to what there was.
local function encode(w, dtype, mean, wrong, all)
  local codes
  ty.no_grad(ty.scope, function()
    if mean and mean.device ~= w.device then mean = mean:to { device = w.device } end
    codes = ty.keep(mean and w:to "f32":quantize(dtype, mean) or w:to(dtype))
    if w.device == "meta" then return end
    local value = w:to "f32"
    wrong = wrong + (codes:to "f32" - value):square():sum():item()
    all = all + value:square():sum():item()
  end)
  return codes, wrong, all
end

--- What quantize() does, for a function `who` whose option `what` is the dtype.
---@return table report
function M.encode_linear(who, what, model, dtype, skip, importance)
  if not elements[dtype] then
    error(("%s: %s: expected nf4, mxfp4, nvfp4, q8_0, q4_0, q2_k, q3_k, q4_k or q6_k, got %s"):format(who, what,
      tostring(dtype)), 0)
  end
  if importance ~= nil and dtype == "nf4" then
    error(("%s: importance: nf4 has fixed levels and takes none"):format(who), 0)
  end
  local report = { modules = 0, parameters = 0, bytes = 0, left = {}, weighed = 0 }
  local mean_of = importance and imatrix.of(who, model, importance)
  local done, wrong, all = {}, 0.0, 0.0
  local list = surgery.find(who, model, { skip = skip })
  for _, layer in ipairs(list) do
    local w = layer.module.weight
    if w:is_floating_point() and w.device ~= "meta" and not w:isfinite():all():item() then
      error(("%s: %s: a weight is not finite"):format(who, layer.name), 0)
    end
  end
  for _, layer in ipairs(list) do
    local module = layer.module
    if module.weight:is_floating_point() then
      local old, inputs = module.weight, surgery.sizes(module)
      if inputs % elements[dtype] ~= 0 then
        table.insert(report.left, layer.name)
      else
        local new = done[old]
        if not new then
          local mean = mean_of and dtype ~= "q8_0" and mean_of(layer.name, inputs) or nil
          new, wrong, all = encode(surgery.rows(module), dtype, mean, wrong, all)
          report.weighed = report.weighed + (mean and 1 or 0)
          done[old] = new
          report.parameters, report.bytes = report.parameters + new:numel(), report.bytes + new:nbytes()
        end
        surgery.exchange(module, "weight", new)
        report.modules = report.modules + 1
      end
    end
  end
  report.bits = report.parameters > 0 and 8 * report.bytes / report.parameters or 0
  report.error = all > 0 and math.sqrt(wrong / all) or nil
  ty.core.program.renew()
  return report
end

--- Encodes the weights of the linear layers of a model (of GPT-2's Conv1D too), which are frozen from then on: no
-- gradient flows into codes, but through them to what comes before. options: dtype ("nf4": the 4-bit NormalFloat with
-- scales of 8 bits, Dettmers et al. 2023; mxfp4 and nvfp4: floats of four bits, quant.fp4; q8_0, q4_0, q2_k, q3_k,
-- q4_k, q6_k), skip (names or ends of names of layers that are left as they are; by default "lm_head"), importance (of
-- quant.imatrix: by which columns the codes lose least; layers that it knows nothing of, and q8_0, are encoded
-- without). Returns a report: modules (how many), parameters and bytes (of their weights), bits (of a weight), error
-- (root mean square of what encoding changed, over that of the weights; nil on the meta device), weighed (weights whose
-- codes were chosen by importance), left (names of layers whose rows are no whole blocks).
---@param model Module
---@param options? {dtype?: string, skip?: string[], importance?: Imatrix}
---@return table report  {modules, parameters, bytes, bits, error, weighed, left}
function M.quantize(model, options)
  return nn.for_caller(function()
    local who = "quant.quantize"
    local o = nn.options(who, options, { dtype = "nf4", skip = { "lm_head" }, importance = nn.none },
      { importance = "a table" })
    return M.encode_linear(who, "dtype", model, o.dtype, o.skip, o.importance)
  end)
end

return M
