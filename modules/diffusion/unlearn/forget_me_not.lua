--- Forget-Me-Not, attention resteering: at noisy pictures of the concept the maps of cross-attention to the concept's
-- tokens are made small,
--
--     loss = | A |,  A: attention to the concept's tokens, of all heads, places and layers, as one vector
--
-- Zhang et al. 2023, "Forget-Me-Not: Learning to Forget in Text-to-Image Diffusion Models", section 3.2.
local ty = require "tycho"
local tuning = require "tycho.diffusion.unlearn.tuning"

local nn = ty.nn

-- A layer that leaves its attention to some keys in a list of its own.
local watched = nn.surgery.wrapper { name = "Watched", field = "_watched", forward = function(base)
  return function(self, x, context, ...)
    local state = self._watched
    if state.positions and context then
      local q, k = nn.split_heads(self.to_q(x), self.heads), nn.split_heads(self.to_k(context), self.heads)
      local shares = (q:matmul(k:transpose(-2, -1)) * q.shape[4] ^ -0.5):softmax(-1)
      local n, s = state.positions.shape[1], state.positions.shape[2]
      table.insert(state.seen, shares * state.positions:to(shares.dtype):reshape(n, 1, 1, s))
    end
    return base.forward(self, x, context, ...)
  end
end }

-- fn() with all layers that attend to text watched; state is shared by them.
local function with_watch(network, state, fn)
  local list = {}
  local names, modules = nn.surgery.modules(network)
  for _, name in ipairs(names) do
    if nn.surgery.ends_in(name, "attn2") then list[#list + 1] = watched:wrap(modules[name], state) end
  end
  local ok, result = pcall(fn)
  for _, module in ipairs(list) do watched:unwrap(module) end
  if not ok then error(result, 0) end
  return result
end

--- Makes a painter's network forget. options: part ("cross"; "all"), steps (40), batch (8), lr (1e-3), seed, every,
-- look.
---@param painter TextToImage
---@param task UnlearnTask
---@param options? table
---@return UnlearnReport
return function(painter, task, options)
  tuning.check("unlearn.forget_me_not", painter, task)
  local o = tuning.options("unlearn.forget_me_not", options, {})
  local forget, state = tuning.conditions(painter, task.forget), { seen = {} }
  if o.steps > 0 then tuning.pictures(painter, task, "forget") end
  return with_watch(painter.network, state, function()
    return tuning.train("forget_me_not", painter, o, function(network)
      local x0, at = tuning.some(painter, task, "forget", o.batch)
      state.positions, state.seen = task.positions:index_select(0, at):to { device = x0.device }, {}
      tuning.say(painter, network, painter.process.objective:noisy(x0), forget(at))
      local sum = 0
      for _, shares in ipairs(state.seen) do sum = sum + shares:square():sum() end
      state.positions, state.seen = nil, {}
      return (sum + 1e-12):sqrt()
    end)
  end)
end
