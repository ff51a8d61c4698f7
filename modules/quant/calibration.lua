--- Calibration with two streams: what a block of the original model gets and gives on some text, beside what the same
-- block gets after the blocks before it were changed. tycho.quant.blocks goes through layers with one stream.
--
--     calibration.walk("mine", model, corpus.training, { rows = 64, held = 8 }, function(step)
--       -- change step.block, so that step.output(step.inputs[k]) comes near step.targets[k]
--     end)
local ty = require "tycho"
local arguments = require "tycho.arguments"
local blocks = require "tycho.quant.blocks"
local moments = require "tycho.quant.moments"

local M = {}

--- One block in its turn.
---@class CalibrationStep
---@field index integer     from 1
---@field block Module
---@field layers { name: string, module: Module }[]  its linear layers
---@field inputs table[]    the block's arguments (table.pack), a batch each, after what came before was changed
---@field originals table[] the same in the original model
---@field targets Tensor[]  what the original block makes of `originals`: the residual stream behind it
---@field held { inputs: table[], targets: Tensor[] }  batches that are kept apart, to see overfitting

--- What a block adds up to: the residual stream behind it. A decoder layer returns the stream and what is still to be
-- added to it.
---@param block Module
---@param call table  of table.pack
---@return Tensor
function M.output(block, call)
  local out = table.pack(block(table.unpack(call, 1, call.n)))
  local sum = out[1]
  for i = 2, out.n do sum = sum + out[i] end
  return sum
end

--- Options of walk() with their defaults: those of quant.blocks.walk, and held: rows of the data, the last ones, that
-- are kept apart.
M.options = { held = 0 }
for key, value in pairs(blocks.options) do M.options[key] = value end

-- Moves all calls behind a block.
local function move(block, calls)
  for k, call in ipairs(calls) do calls[k] = blocks.next_call(block, call) end
end

local function sums(block, calls)
  local list = {}
  for k, call in ipairs(calls) do list[k] = ty.scope(function() return M.output(block, call) end) end
  return list
end

-- The first `n` of a list, and the rest.
local function cut(list, n)
  return table.move(list, 1, n, 1, {}), table.move(list, n + 1, #list, 1, {})
end

--- Goes through the blocks of a model; visit(step) may change the block. Its inputs are those that the blocks changed
-- so far give, its targets those of the model as it was. visit is called with gradients allowed, the model in
-- evaluation mode. data: llm.data.Packed, or a list of its batches.
---@param who string  in front of errors
---@param model LanguageModel
---@param data PackedDataset|table[]
---@param o table     rows, batch, seed, device, skip, held as in M.options
---@param visit fun(step: CalibrationStep)
function M.walk(who, model, data, o, visit)
  arguments.expect(who, "held", o.held, "an integer >= 0")
  local list, linears = blocks.list(who, model), blocks.linears(who, model, o.skip)
  local batches = moments.batches(who, data, o)
  local kept = data[1] and o.held or (o.held + o.batch - 1) // o.batch -- in batches
  if kept >= #batches then
    arguments.fail("%s: held: expected fewer than the %d %s of the data, got %d", who, data[1] and #batches
      or math.min(o.rows or 128, data.size),
      data[1] and "batches" or "rows", o.held)
  end
  local count, was_training = #batches - kept, model.training
  model:eval()
  local ok, message = pcall(function()
    local calls = ty.no_grad(blocks.first_calls, model, list[1], batches)
    local originals = table.move(calls, 1, #calls, 1, {})
    ty.core.program.renew()
    for i, block in ipairs(list) do
      local mine = {}
      for _, layer in ipairs(linears) do
        if layer.block == i then mine[#mine + 1] = layer end
      end
      local targets = ty.no_grad(sums, block, originals)
      local original = originals
      if i < #list then
        originals = table.move(original, 1, #original, 1, {})
        ty.no_grad(move, block, originals)
      end
      local inputs, held_inputs = cut(calls, count)
      local wanted, held_wanted = cut(targets, count)
      visit { index = i, block = block, layers = mine, inputs = inputs, originals = cut(original, count),
        targets = wanted, held = { inputs = held_inputs, targets = held_wanted },
        output = function(call) return M.output(block, call) end }
      ty.core.program.renew()
      if i < #list then ty.no_grad(move, block, calls) end
    end
  end)
  model:train(was_training)
  if not ok then error(message, 0) end
end

return M
