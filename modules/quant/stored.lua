--- What quantized weights take, to the byte: codes, scales, zero points, planes, padding, and what was not quantized.
--
--     local report = quant.gptq.quantize(model, data, { bits = 2, group = 64 })
--     local size = quant.stored.model(model, report)
--     print(size.bits, size.whole, size.bytes)     -- of a quantized weight, of any parameter, of all
local arguments = require "tycho.arguments"

local expect, fail = arguments.expect, arguments.fail
local M = {}

--- Bytes of n codes of `bits` each, side by side: the last byte is padded.
---@param n integer
---@param bits integer
---@return integer
function M.codes(n, bits)
  expect("quant.stored.codes", "n", n, "an integer >= 0")
  expect("quant.stored.codes", "bits", bits, "an integer in [1, 16]")
  return (n * bits + 7) // 8
end

--- Groups that a row has: the last one may be shorter.
---@param columns integer
---@param group integer  0: the whole row
---@return integer
function M.groups(columns, group)
  expect("quant.stored.groups", "columns", columns, "an integer >= 1")
  expect("quant.stored.groups", "group", group, "an integer >= 0")
  return group == 0 and 1 or (columns + group - 1) // group
end

--- Bytes of a matrix on a uniform grid: for each row its codes, for each of its groups a scale in half precision and,
-- of an asymmetric grid, the code of zero; each row's codes and zeros begin with a byte of their own.
---@param rows integer
---@param columns integer
---@param o { bits: integer, group: integer, symmetric?: boolean }
---@return integer bytes
function M.grid(rows, columns, o)
  expect("quant.stored.grid", "rows", rows, "an integer >= 1")
  expect("quant.stored.grid", "o", o, "a table")
  local groups = M.groups(columns, o.group)
  return rows * (M.codes(columns, o.bits) + 2 * groups + (o.symmetric and 0 or M.codes(groups, o.bits)))
end

--- What a model takes whose layers a report lists ({ name, parameters, bits } of each, bits with all that belongs to
-- it); every other parameter, each once, is counted in half precision. Returns bits (of a weight of the report), whole
-- (of a parameter of the model), bytes (of the model), parameters.
---@param model Module
---@param report { name: string, parameters: integer, bits: number }[]
---@return { bits: number, whole: number, bytes: integer, parameters: integer }
function M.model(model, report)
  local who = "quant.stored.model"
  expect(who, "model", model, "a module")
  expect(who, "report", report, "a list")
  local weights, bits, listed = 0, 0.0, {}
  for _, layer in ipairs(report) do
    if type(layer) ~= "table" or not math.tointeger(layer.parameters) or type(layer.bits) ~= "number" then
      fail("%s: report: expected a list of { name, parameters, bits }, got %s in it", who, arguments.describe(layer))
    end
    weights, bits = weights + layer.parameters, bits + layer.bits * layer.parameters
    listed[layer.name] = true
  end
  local rest, seen, found = 0, {}, 0
  for name in model:named_modules() do found = found + (listed[name] and 1 or 0) end
  if found < #report then
    fail("%s: report: %d of its %d layers are not in the model", who, #report - found, #report)
  end
  for name, parameter in model:named_parameters() do
    local owner, key = name:match "^(.*)%.([^.]+)$"
    if not seen[parameter] and (not listed[owner] or key == "bias") then
      seen[parameter] = true
      rest = rest + parameter:numel()
    end
  end
  local bytes = math.ceil(bits / 8 - 1e-6) + 2 * rest
  return { bits = weights > 0 and bits / weights or 0, whole = 8 * bytes / (weights + rest), bytes = bytes,
    parameters = weights + rest }
end

return M
