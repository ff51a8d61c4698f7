--- Diffusion of bits: noise flips them towards evenly random ones, and a network says what they were. Wang et al. 2023,
-- "Binary Latent Diffusion", section 3.2; Austin et al. 2021, "Structured Denoising Diffusion Models in Discrete
-- State-Spaces" (uniform transitions of two states).
--
--     local process = diffusion.binary()
--     local loss = process:loss(network, bits, { labels = labels })
--     local bits = tokens.sample(process:way(network, { 32, 8 }, { steps = 20 }), { labels = labels })
--
-- q(b_t | b_s) = Bernoulli(r b_s + (1 - r) / 2) with r = keep(t) / keep(s): what is kept from s to t.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local conditions = require "tycho.diffusion.condition"

local expect = arguments.expect

--- Noise that flips bits, and the way back: its schedule, kernels, loss and sampling.
---@class BinaryProcess
local Binary = {}
Binary.__index = Binary
Binary.__name = "BinaryProcess"

--- The process with the cosine schedule: keep(t) = cos(pi t / 2).
---@return BinaryProcess
local function new() return setmetatable({}, Binary) end

--- How much of the clean bits there is at times from 0 to 1: 1 to 0.
---@param t Tensor|number
---@return Tensor|number
function Binary.keep(t)
  if ty.is_tensor(t) then return (t * (math.pi / 2)):cos() end
  expect("BinaryProcess.keep", "t", t, "a number in [0, 1]")
  return math.cos(t * math.pi / 2)
end

-- A factor for each sample, for bits of any shape.
local function for_each(factor, like)
  if not ty.is_tensor(factor) then return factor end
  local shape = { factor.shape[1] }
  for i = 2, like.ndim do shape[i] = 1 end
  return factor:reshape(shape)
end

--- The probability that bits are 1 after noise of which `ratio` lets through: ratio b + (1 - ratio) / 2.
---@param bits Tensor          0 and 1, or probabilities
---@param ratio Tensor|number  [n] or one for all
---@return Tensor
function Binary.forward(bits, ratio)
  expect("BinaryProcess.forward", "bits", bits, "a tensor")
  ratio = for_each(ratio, bits)
  return bits * ratio + (1 - ratio) / 2
end

--- The probability that bits were 1 at the time s, given those at t > s and how likely each was 1 at the beginning:
-- sum over b_0 of q(b_s = 1 | b_t, b_0) p(b_0).
---@param bits Tensor   at t, 0 and 1
---@param clean Tensor  probabilities that they are 1 at 0
---@param s number
---@param t number
---@return Tensor
function Binary:posterior(bits, clean, s, t)
  local who = "BinaryProcess:posterior"
  expect(who, "bits", bits, "a tensor")
  expect(who, "clean", clean, "a tensor")
  local kept = self.keep(s)
  local ratio = kept > 0 and self.keep(t) / kept or 0
  -- How likely what is seen at t is where the bit at s is 1, and 0.
  local one = self.forward(ty.ones_like(bits), ratio)
  local seen_one, seen_zero = bits * one + (1 - bits) * (1 - one), bits * (1 - one) + (1 - bits) * one
  local function given(b0)
    local p = (kept * b0 + (1 - kept) / 2)
    return seen_one * p / (seen_one * p + seen_zero * (1 - p))
  end
  return given(1) * clean + given(0) * (1 - clean)
end

--- What a network is trained for: the cross entropy of the clean bits, given noised ones at a time. options: t ([n],
-- from 0 to 1; drawn evenly by default), drop (the share of samples whose condition is dropped, for guidance: 0).
---@param network Module  network(bits, t from 0 to 1000, condition): logits
---@param bits Tensor     [n, ...] of 0 and 1
---@param condition? table
---@param options? {t?: Tensor, drop?: number}
---@return Tensor
function Binary:loss(network, bits, condition, options)
  local who = "BinaryProcess:loss"
  expect(who, "bits", bits, "a tensor")
  local o = arguments.read(who, options, { t = arguments.none, drop = 0 }, { t = "a tensor",
    drop = "a number in [0, 1]" })
  local t = o.t or ty.rand({ bits.shape[1] }, { device = bits.device })
  condition = condition or {}
  if o.drop > 0 then condition = conditions.drop(condition, conditions.null(network, condition), o.drop) end
  local noised = self.forward(bits, self.keep(t)):bernoulli()
  return ty.nn.bce_with_logits(network(noised, t * 1000, condition), bits)
end

local Way = {}
Way.__index = Way
Way.__name = "BinaryWay"

--- The way for tokens.sample: from even bits through `steps` times to clean ones. shape: of a sample. options: steps
-- (20). It draws with `draw`, of the posterior; temperatures of a draw given to tokens.sample are of the clean bits.
---@param network Module
---@param shape integer[]
---@param options? {steps?: integer}
---@return table
function Binary:way(network, shape, options)
  local who = "BinaryProcess:way"
  expect(who, "network", network, "a module or a function")
  expect(who, "shape", shape, "a list of integers")
  local o = arguments.read(who, options, { steps = 20 }, { steps = "an integer >= 1" })
  return setmetatable({ process = self, model = network, shape = shape, steps = o.steps,
    draw = require("tycho.diffusion.tokens.draw").guided }, Way)
end

function Way:begin(n)
  local model = self.model
  local device = type(model) == "table" and model.device and model:device() or "cpu"
  return { bits = ty.keep((ty.ones({ n, table.unpack(self.shape) }, { device = device }) * 0.5):bernoulli()) }
end

function Way:predict(state, step, condition)
  local n = conditions.tensors(condition)[1][2].shape[1]
  local bits = state.bits
  if bits.shape[1] < n then bits = ty.concat({ bits, bits }, 0) end
  local t = 1 - (step - 1) / self.steps
  return self.model(bits, ty.full({ n }, t * 1000, { dtype = bits.dtype, device = bits.device }), condition)
end

-- drawn: logits of the clean bits.
function Way:take(state, step, drawn)
  local t, s = 1 - (step - 1) / self.steps, 1 - step / self.steps
  state.bits = ty.keep(self.process:posterior(state.bits, drawn:sigmoid(), s, t):bernoulli())
  return state
end

function Way:finish(state) return state.bits end

return new
