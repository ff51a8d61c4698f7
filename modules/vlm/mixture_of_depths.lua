--- Mixture of depths in a model that sees: each layer of the decoder works on a share of a picture's tokens that a
-- router of its own chooses, and deeper layers on fewer. Text always goes through. Zhang et al. 2025, "p-MoD: Building
-- Mixture-of-Depths MLLMs via Progressive Ratio Decay" (arXiv 2412.04449), and its reference code.
--
--     local mod = vlm.mixture_of_depths
--     local report = mod.apply(llava, { shift = 0.5 })
--     llava:loss(...)                -- the routers, zero at first, learn with all else
--     mod.remove(llava)
local ty = require "tycho"
local arguments = require "tycho.arguments"
local picked = require "tycho.vlm.picked"

local nn = ty.nn
local M = {}

--- Shares of a picture's tokens that each of `layers` layers keeps: R_l = cos(pi l / (layers - 1)) / 2 + shift, from
-- l = 0, at least `floor`; a layer whose share is above `dense` keeps all of them (1). The paper's examples: shift 0.5,
-- dense 0.85 and floor 0.15, or 0.75 and 0.25.
---@param layers integer
---@param options? { shift?: number, floor?: number, dense?: number }
---@return number[]
function M.shares(layers, options)
  local who = "mixture_of_depths.shares"
  arguments.expect(who, "layers", layers, "an integer in [2, 10000]")
  local o = arguments.read(who, options, { shift = 0.5, floor = 0.25, dense = 0.75 },
    { shift = "a finite number", floor = "a number in [0, 1]", dense = "a number in [0, 1]" })
  local list = {}
  for l = 0, layers - 1 do
    local share = math.cos(math.pi * l / (layers - 1)) / 2 + o.shift
    list[l + 1] = share > o.dense and 1 or math.max(share, o.floor)
  end
  return list
end

--- Weights and choice of one layer: w = scale * tanh(x . router + bias) + 1 of the picture's tokens (TanhNorm), and the
-- places of all that are kept, in their order: text, and of the picture's tokens of each row the floor(share * n) with
-- the largest weights. visual: bool [n, t], as many in each row.
---@param x Tensor        [n, t, hidden]
---@param visual Tensor
---@param state { router: Linear, share: number, scale: number }
---@return Tensor weights  [n, t], 1 for text
---@return Tensor places   i64 [n, kept]
local function route(x, visual, state)
  local logits = state.router(x):squeeze(-1)
  local count = visual:to("i64"):sum { 1 }
  local seen = count:max():item()
  if count:min():item() ~= seen then
    arguments.fail("mixture_of_depths: expected rows with as many tokens of pictures, got %d and %d",
      count:min():item(), seen)
  end
  local weights = ty.where(visual, logits:tanh() * state.scale + 1, 1.0)
  local kept = math.floor(state.share * seen + 1e-9)
  local places = ty.no_grad(function()
    -- Text comes before all pictures' tokens; what is chosen is put in its order again.
    local rank = ty.where(visual, logits:detach():to "f32", math.huge)
    local chosen = rank:argsort(1, true):narrow(1, 0, x.shape[2] - seen + kept)
    return (chosen:sort(1))
  end)
  return weights, places
end

local routed = nn.surgery.wrapper { name = "Routed", field = "_depths", fields = { "router" },
  describe = function(state) return ("keeps %.2f of pictures"):format(state.share) end,
  forward = function(base)
    return function(self, stream, more, at)
      local state = self._depths
      local cache = at.cache
      if cache and cache.past > 0 then return picked.follow(self, base.forward, stream, more, at) end
      local visual = at.tokens:eq(state.image)
      if not visual:any():item() then return base.forward(self, stream, more, at) end
      local x = more and stream + more or stream
      local weights, places = route(x, visual, { router = self.router, share = state.share, scale = state.scale })
      if state.watch then state.watch(at.layer, visual, places, weights) end
      local kept, added = picked.through("mixture_of_depths", self, base.forward, x, places, at)
      -- Symmetric reweighting: what the feed-forward network adds to a kept token, and a skipped token as it is.
      return picked.put(x * weights:unsqueeze(-1), places, kept + added * picked.pick(weights, places):unsqueeze(-1))
    end
  end }

--- Gives the decoder's layers routers. options: shares (of each layer, in place of shares() of shift, floor and dense:
-- see there), scale (0.2: of TanhNorm; with 0 the weights are 1), all (false; true: layers that keep everything weigh
-- it, too), own (false; true: the last layer has a router of its own, as in the reference code). Routers begin at zero,
-- as in the reference code. One of the last layer never leaves it: nothing reads what that layer makes of a picture's
-- tokens, so their weights have no gradient, and it would keep the first tokens for good. So the last layer asks the
-- router of the layer before, if there is one. Returns { shares = of each layer, layers = which are routed }.
---@param model Llava
---@param options? table
---@return table report
function M.apply(model, options)
  local who = "mixture_of_depths.apply"
  arguments.expect(who, "model", model, "a module")
  local decoder = picked.decoder(who, model)
  local o = arguments.read(who, options, { shares = arguments.none, shift = 0.5, floor = 0.25, dense = 0.75,
    scale = 0.2, all = false, own = false }, { shares = "a list of numbers", scale = "a finite number >= 0" })
  local layers = decoder.model.layers
  local shares = o.shares or M.shares(#layers, { shift = o.shift, floor = o.floor, dense = o.dense })
  if #shares ~= #layers then
    arguments.fail("%s: shares: expected one of each of %d layers, got %d", who, #layers, #shares)
  end
  local report = { shares = shares, layers = {} }
  for i, layer in ipairs(layers) do
    if not (shares[i] >= 0 and shares[i] <= 1) then
      arguments.fail("%s: shares: expected numbers in [0, 1], got %g as number %d", who, shares[i], i)
    end
    if shares[i] < 1 or o.all then
      local weight, attention = layer.input_layernorm.weight, layer.self_attn
      if attention and (attention.window or -1) >= 0 then
        arguments.fail("%s: model: expected layers that see all tokens, got a window of %d in layer %d", who,
          attention.window + 1, i)
      end
      local router = i == #layers and not o.own and layers[i - 1].router
      if not router then
        router = nn.Linear(weight.shape[1], 1):to { device = weight.device, dtype = weight.dtype }
        nn.init.zeros(router.weight)
        nn.init.zeros(router.bias)
      end
      layer.router = router
      routed:wrap(layer, { share = shares[i], scale = o.scale, image = model.config.image_token_index })
      report.layers[#report.layers + 1] = i
    end
  end
  return report
end

--- Takes the routers off again.
---@param model Llava
function M.remove(model)
  local who = "mixture_of_depths.remove"
  arguments.expect(who, "model", model, "a module")
  for _, layer in ipairs(routed:wrapped(who, picked.decoder(who, model))) do
    routed:unwrap(layer.module)
  end
end

--- Calls fn(layer, visual, places, weights) whenever a layer has chosen: visual bool [n, t], places of what is kept i64
-- [n, kept], weights [n, t]. nil: no longer.
---@param model Llava
---@param fn? function
function M.watch(model, fn)
  local who = "mixture_of_depths.watch"
  arguments.expect(who, "model", model, "a module")
  arguments.expect(who, "fn", fn, "a function or nil")
  for _, layer in ipairs(routed:wrapped(who, picked.decoder(who, model))) do layer.module._depths.watch = fn end
end

return M
