--- What methods of few bits are measured against: rounding to nearest and GPTQ on the same grids, each the best of its
-- settings by a measure that the user gives.
--
--     for _, row in ipairs(quant.baselines.run(model, corpus.training, { bits = { 2, 3, 4 }, group = 64,
--       measure = function(m) return corpus:evaluate(m, "validation").loss end })) do
--       print(row.name, row.bits, corpus:evaluate(row.model).perplexity)
--     end
local ty = require "tycho"
local arguments = require "tycho.arguments"
local gptq = require "tycho.quant.gptq"

local expect = arguments.expect
local M = {}

-- The settings of a method: ranges plain or searched, columns in order or by the size of their inputs.
local settings = {
  round = { { mse = false }, { mse = true } },
  gptq = { { mse = false, act_order = false }, { mse = true, act_order = false }, { mse = false, act_order = true },
    { mse = true, act_order = true } },
}

--- Quantizes copies of a model. options: bits ({2, 3, 4}), group (64), methods ({"round", "gptq"}), measure (a function
-- of a model: the lower the better; of each method the settings with the least are kept), settled (what an earlier run
-- returned: its settings are taken, and none are searched for), rows, batch, seed, device, damp, skip as in
-- quant.gptq.quantize().
-- Returns a list of { name ("gptq, 2 bits"), method, bits (of a grid), model, report (what the method returned), found
-- (the measure), how (the settings) }, by bits and then methods.
---@param model LanguageModel
---@param data PackedDataset|table[]
---@param options table
---@return table[] rows
function M.run(model, data, options)
  local who = "quant.baselines.run"
  local none = arguments.none
  local o = arguments.read(who, options, { bits = { 2, 3, 4 }, group = 64, methods = { "round", "gptq" },
    measure = none, settled = none, rows = none, batch = 8, seed = 0, device = none, damp = 0.01, skip = {} },
    { bits = "a list of integers", group = "an integer >= 0", methods = "a list of strings", skip = "a list of strings",
      measure = "a function", settled = "a list of tables" })
  expect(who, "model", model, "a module")
  expect(who, "measure", o.measure, "a function")
  for _, method in ipairs(o.methods) do
    if not settings[method] then
      arguments.fail('%s: methods: expected "round" and "gptq", got %s', who, arguments.describe(method))
    end
  end
  local rows, settled = {}, {}
  for _, row in ipairs(o.settled or {}) do settled[row.name] = { row.how } end
  for _, bits in ipairs(o.bits) do
    for _, method in ipairs(o.methods) do
      local best
      for _, how in ipairs(settled[("%s, %d bits"):format(method, bits)] or settings[method]) do
        local copy = model:clone()
        local given = { bits = bits, group = o.group, mse = how.mse, skip = o.skip }
        if method == "gptq" then
          given.act_order, given.rows, given.batch, given.seed = how.act_order, o.rows, o.batch, o.seed
          given.device, given.damp = o.device, o.damp
        end
        local report = method == "gptq" and gptq.quantize(copy, data, given) or gptq.round(copy, given)
        local found = o.measure(copy)
        if not best or found < best.found then
          best = { name = ("%s, %d bits"):format(method, bits), method = method, bits = bits, model = copy,
            report = report, found = found, how = how }
        end
      end
      rows[#rows + 1] = best
    end
  end
  ty.core.program.renew()
  return rows
end

return M
