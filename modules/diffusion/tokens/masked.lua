--- Continuous tokens in a random order, several at a time: training and the way of models.MAR. Li et al. 2024,
-- "Autoregressive Image Generation without Vector Quantization"; the cosine schedule is that of Chang et al. 2022,
-- "MaskGIT".
local ty = require "tycho"
local arguments = require "tycho.arguments"
local conditions = require "tycho.diffusion.condition"
local predictions = require "tycho.diffusion.prediction"
local process = require "tycho.diffusion.process"

local expect, none = arguments.expect, arguments.none

--- Training of a masked autoregressive model, and its way for tokens.sample.
---@class MaskedWay
---@field model MAR
---@field steps integer
local Way = {}
Way.__index = Way
Way.__name = "MaskedWay"

--- Training of a model and the way for tokens.sample. options: steps (8, in which all places are filled), flow (a
-- process of single tokens: diffusion.Flow { drop = 0 }), head_steps (10, in which the head draws a token), solver
-- (that of the process), ratio ({ 0.5, 1 }: of the share of places that is masked in training, drawn evenly), null (the
-- condition that means anything), temperature (1, of the head's noise).
---@param model MAR
---@param options? table
---@return MaskedWay
local function masked(model, options)
  local who = "tokens.masked"
  expect(who, "model", model, "a module")
  expect(who, "model.head", model.head, "a module")
  local o = arguments.read(who, options, { steps = 8, flow = none, head_steps = 10, solver = none,
    ratio = { 0.5, 1 }, null = none, temperature = 1 }, { steps = "an integer >= 1", flow = "a table",
    head_steps = "an integer >= 1", solver = "a table", ratio = "a pair of numbers", null = "a table",
    temperature = "a finite number >= 0" })
  local flow = o.flow or process.Flow { drop = 0 }
  local self = setmetatable({ model = model, steps = o.steps, flow = flow, ratio = o.ratio, null = o.null,
    temperature = o.temperature }, Way)
  local sampler = flow:sampler { steps = o.head_steps, solver = o.solver }
  -- said: vectors of the places to be filled, [n, k, width].
  function self.draw(said, other, scale)
    local n, k, width = table.unpack(said.shape)
    local function head(x, t)
      local function under(z) return model.head(x, t, { z = z:reshape(-1, width) }) end
      local own = under(said)
      if not other then return own end
      local rest = under(other)
      return rest + (own - rest) * scale
    end
    local noise = ty.randn({ n * k, model.channels }, { device = said.device }) * self.temperature
    return (sampler:sample(head, noise.shape, { noise = noise })):reshape(n, k, model.channels)
  end
  return self
end

-- Random numbers for the order of places, [n, tokens], where the model is.
local function drawn_order(self, n) return ty.rand({ n, self.model.tokens }, { device = self.model:device() }) end

-- Random orders of places, i64 [n, tokens].
local function orders(self, n) return drawn_order(self, n):argsort(1) end

local function at(x, places) return x:gather(1, places:unsqueeze(2):expand(-1, -1, x.shape[3])) end

--- What the head gets wrong about the tokens of each picture, f32 [n]: the mean square of what it should have said less
-- what it says, over the masked places. options: drop (0: the share of samples whose condition is dropped), repeats (1:
-- draws of noise for each place). Everything random is drawn anew: under the same seed two models, or two pictures, get
-- the same masks and noise.
---@param x Tensor          [n, tokens, channels]
---@param condition table
---@param options? {drop?: number, repeats?: integer}
---@return Tensor
function Way:errors(x, condition, options)
  expect("MaskedWay:errors", "x", x, "a tensor")
  local o = arguments.read("MaskedWay:errors", options, { drop = 0, repeats = 1 }, { drop = "a number in [0, 1]",
    repeats = "an integer >= 1" })
  local n, tokens = x.shape[1], self.model.tokens
  local order = orders(self, n)
  local share = self.ratio[1] + (self.ratio[2] - self.ratio[1]) * ty.rand({ 1 }):item()
  local count = math.max(1, math.min(tokens, math.ceil(tokens * share)))
  local hidden, visible = order:narrow(1, 0, count), order:narrow(1, count, tokens - count)
  if o.drop > 0 then
    condition = conditions.drop(condition, conditions.null(self.model, condition, self.null), o.drop)
  end
  local z = at(self.model(x, visible, condition), hidden)
  local target = at(x, hidden):reshape(-1, self.model.channels)
  z, target = z:reshape(-1, z.shape[3]), target:detach()
  if o.repeats > 1 then z, target = z:tile { o.repeats, 1 }, target:tile { o.repeats, 1 } end
  local objective = self.flow.objective
  local noisy = objective:noisy(target)
  local said = objective:output(self.model.head, noisy, { z = z })
  local wanted = predictions.target(objective.predict, target, noisy.noise, noisy.alpha, noisy.sigma, objective.data)
  return (said - wanted):square():mean { 1 }:reshape(o.repeats, n, count):mean { 0, 2 }
end

--- The training loss, the mean of errors(), whose options it has.
---@return Tensor
function Way:loss(x, condition, options) return self:errors(x, condition, options):mean() end

--- Before the first step. known: tokens [n, tokens, channels] of which those at `places` (i64 [n, k]) are there already
-- and stay as they are; none by default.
---@param n integer
---@return table
function Way:begin(n)
  local known = self.known
  local filled = known and known.places.shape[2] or 0
  local order = known and drawn_order(self, n):scatter(1, known.places, -1.0):argsort(1) or orders(self, n)
  local x = known and known.tokens:clone()
    or ty.zeros({ n, self.model.tokens, self.model.channels }, { device = order.device })
  return { x = ty.keep(x), order = ty.keep(order), filled = filled, begun = filled }
end

-- How many places are filled after a step, by the cosine schedule: at least one more each time while there are any.
local function goal(self, state, step)
  local all = self.model.tokens
  local left = step == self.steps and 0
    or math.floor((all - state.begun) * math.cos(math.pi / 2 * step / self.steps))
  return math.min(all, math.max(all - left, math.min(all, state.filled + 1)))
end

function Way:predict(state, step, condition)
  local n, x = conditions.tensors(condition)[1][2].shape[1], state.x
  local count = goal(self, state, step) - state.filled
  local visible, next = state.order:narrow(1, 0, state.filled), state.order:narrow(1, state.filled, count)
  if x.shape[1] < n then
    x, visible, next = ty.concat({ x, x }, 0), ty.concat({ visible, visible }, 0), ty.concat({ next, next }, 0)
  end
  if count == 0 then return ty.zeros({ n, 0, self.model.width }, { device = x.device }) end
  return at(self.model(x, visible, condition), next)
end

function Way:take(state, step, drawn)
  local count = goal(self, state, step) - state.filled
  if count > 0 then
    local next = state.order:narrow(1, state.filled, count)
    state.x = ty.keep(state.x:scatter(1, next:unsqueeze(2):expand(-1, -1, drawn.shape[3]), drawn))
    state.filled = state.filled + count
  end
  return state
end

function Way:finish(state) return state.x end

--- The same way for pictures of which some tokens are given.
---@param tokens Tensor  [n, tokens, channels]
---@param places Tensor  i64 [n, k], which of them stay
---@return MaskedWay
function Way:given(tokens, places)
  expect("MaskedWay:given", "tokens", tokens, "a tensor")
  expect("MaskedWay:given", "places", places, "a tensor")
  local other = setmetatable({}, Way)
  for key, value in pairs(self) do other[key] = value end
  other.known = { tokens = tokens, places = places }
  return other
end

return masked
