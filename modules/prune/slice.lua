--- SliceGPT as a yardstick: the stream between the sublayers of a decoder of Llama's shape keeps its first principal
-- components alone, at every place others. Ashkboos et al. 2024, "SliceGPT: Compress Large Language Models by Deleting
-- Rows and Columns". There the rotations are taken into the weights and rows and columns are cut; here the stream is
-- projected, which computes the same and shows what is lost, not what is saved: sliced_cost() says what would be.
local ty = require "tycho"
local blocks = require "tycho.quant.blocks"
local moments = require "tycho.quant.moments"
local shrink = require "tycho.prune.shrink"

local nn = ty.nn
local surgery = nn.surgery
local arguments = require "tycho.arguments"
local M = {}

-- x on the components of a place: projection [hidden, hidden] or nil.
local function projected(x, projection) return projection and ty.matmul(x, projection) or x end

-- Norms see the whole width's mean of squares in the paper as well, so that a norm of the projection is its norm.
local sliced = surgery.wrapper { name = "Sliced", field = "_sliced", forward = function()
  return function(self, stream, more, at)
    local p = self._sliced
    local function see(place, x)
      if p.see == place then p.visit(x) end
      return projected(x, p[place])
    end
    local x = see("first", more and stream + more or stream)
    if p.see == "first" then return x end
    x = see("second", x + self.self_attn(self.input_layernorm(x), at))
    if p.see == "second" then return x end
    x = x + self[self.mlp_name](self.post_attention_layernorm(x), at)
    return p.final and see("last", x) or x
  end
end }

--- Numbers that the linear layers of the blocks would have with `width` components: rows or columns of every layer, and
-- the two rotations of the residual stream in each block.
---@param parts table[]  of shrink.parts()
---@param width integer
---@return number
function M.cost(parts, width)
  local sum = 0
  for _, part in ipairs(parts) do
    sum = sum + shrink.count { part } * width / part.model.config.hidden_size + 2 * width * width
  end
  return sum
end

--- The components that keep a share of the blocks' numbers.
function M.width(parts, keep)
  local budget, width = keep * shrink.count(parts), parts[1].model.config.hidden_size
  while width > 1 and M.cost(parts, width) > budget do width = width - 1 end
  return width
end

local function slice(model, data, options)
  local who, defaults = "prune.slice", { keep = 0.7 }
  for key, value in pairs(moments.options) do defaults[key] = value end
  local o = arguments.read(who, options, defaults, { keep = "a number in (0, 1]" })
  local parts = shrink.parts(who, model)
  local hidden = model.config.hidden_size
  local width = M.width(parts, o.keep)
  local batches = moments.batches(who, data, o)
  local was_training = model.training
  model:eval()
  ty.no_grad(function()
    local calls = blocks.first_calls(model, parts[1].block, batches)
    for i, part in ipairs(parts) do
      local state = { final = i == #parts }
      sliced:wrap(part.block, state)
      for _, place in ipairs(state.final and { "first", "second", "last" } or { "first", "second" }) do
        local moment = moments.new(hidden, part.attention.q_proj.weight.device, true)
        state.see, state.visit = place, function(x) moments.add(moment, x) end
        for _, call in ipairs(calls) do ty.scope(function() part.block(table.unpack(call, 1, call.n)) end) end
        state.see, state.visit = nil, nil
        moments.check_finite(who, part.name, moment)
        local _, vectors = ty.eigh(moment.sum)
        local kept = vectors:narrow(1, hidden - width, width)
        state[place] = ty.keep(ty.matmul(kept, kept:transpose(0, 1)):to(model.model.norm.weight.dtype))
      end
      for k, call in ipairs(calls) do
        local stream = ty.scope(function() return part.block(table.unpack(call, 1, call.n)) end)
        calls[k] = { stream, nil, call[3], n = 3 }
      end
    end
  end)
  model:train(was_training)
  ty.core.program.renew()
  return { width = width, before = shrink.count(parts), after = M.cost(parts, width) }
end

--- Keeps so many principal components of a decoder's stream that its blocks would keep a share of their numbers if they
-- were sliced by them, each place after those before it. For comparison: the model gets no smaller, and cannot be
-- saved so. options: keep (0.7), rows (128), batch (8), seed (0), device. Returns { width, before, after }.
---@param model LanguageModel
---@param data PackedDataset|table[]
---@param options? table
---@return { width: integer, before: integer, after: number }
function M.slice(model, data, options) return nn.for_caller(slice, model, data, options) end

return M
