--- A residual network of linear layers on vectors that change with time: diffusion and flows of points, and of pictures
-- so small that a vector holds them. Scale and shift of every block come from time and class, as in the diffusion
-- transformer (Peebles and Xie 2023).
local ty = require "tycho"
local arguments = require "tycho.arguments"

local nn = ty.nn

local Block = nn.module "TimeMLPBlock"

function Block:init(width)
  self.norm = nn.LayerNorm(width, { elementwise_affine = false, eps = 1e-6 })
  self.adaLN_modulation = nn.Modulation(width, 2)
  self.fc1 = nn.Linear(width, width)
  self.fc2 = nn.Linear(width, width)
end

function Block:forward(x, condition)
  return x + self.fc2(self.fc1(nn.modulate(self.norm(x), self.adaLN_modulation(condition))):silu())
end

local TimeEmbedder = nn.module "TimeMLPEmbedder"

function TimeEmbedder:init(waves, width)
  self.frequencies = nn.Sinusoidal(waves)
  self.fc1 = nn.Linear(waves, width)
  self.fc2 = nn.Linear(width, width)
end

function TimeEmbedder:forward(t) return self.fc2(self.fc1(self.frequencies(t)):silu()) end

-- Numbers of a sample with cosines and sines of them, at frequencies from 0.5 to 4: networks of smooth functions learn
-- edges slowly by themselves. Tancik et al. 2020, "Fourier Features Let Networks Learn High Frequency Functions in Low
-- Dimensional Domains".
local Places = nn.module "TimeMLPPlaces"

function Places:init(waves)
  local steps = {}
  for i = 1, waves do steps[i] = 0.5 * 2 ^ (3 * (i - 1) / math.max(1, waves - 1)) end
  self:buffer("frequencies", ty.tensor(steps), { persistent = false })
end

function Places:forward(x)
  local angles = (x:unsqueeze(2) * self.frequencies):flatten(1)
  return ty.concat({ x, angles:cos(), angles:sin() }, 1)
end

---@class TimeMLP: Module
---@field null_label? integer  the label that means "any class"
local TimeMLP = nn.module "TimeMLP"

local size = "an integer >= 1"

--- options: features (2: numbers of a sample), width (128), depth (3: residual blocks), classes (0: not conditioned on
-- a class), waves (64: cosines and sines of the time, an even number), places (0: frequencies at which cosines and
-- sines of the numbers themselves are added to these), outputs (as many numbers as a sample has, in its shape;
-- otherwise [n, outputs] comes, logits say).
function TimeMLP:init(options)
  local o = nn.options("TimeMLP", options, { features = 2, width = 128, depth = 3, classes = 0, waves = 64,
    places = 0, outputs = arguments.none }, { features = size, width = size, depth = size,
    classes = "an integer >= 0", waves = size, places = "an integer >= 0", outputs = size })
  self.features, self.classes, self.outputs = o.features, o.classes, o.outputs
  if o.places > 0 then self.places = Places(o.places) end
  self.x_embedder = nn.Linear(o.features * (1 + 2 * o.places), o.width)
  self.t_embedder = TimeEmbedder(o.waves, o.width)
  if o.classes > 0 then
    self.null_label = o.classes
    self.y_embedder = nn.Embedding(o.classes + 1, o.width)
  end
  self.blocks = nn.ModuleList {}
  for _ = 1, o.depth do self.blocks:append(Block(o.width)) end
  self.norm = nn.LayerNorm(o.width, { elementwise_affine = false, eps = 1e-6 })
  self.linear = nn.Linear(o.width, o.outputs or o.features)
  nn.init.zeros(self.linear.weight)
  nn.init.zeros(self.linear.bias)
end

--- x [n, ...] of `features` numbers each, t [n] from 0 to 1000: shaped like x, or [n, outputs]. condition: labels (i64
-- [n]; null_label for any class), where there are classes.
---@param x Tensor
---@param t Tensor
---@param condition? {labels: Tensor}
---@return Tensor
function TimeMLP:forward(x, t, condition)
  if x.ndim < 2 or x:numel() ~= x.shape[1] * self.features then
    arguments.fail("TimeMLP: x: expected [n, ...] of %d numbers each, got %s", self.features, arguments.describe(x))
  end
  local c = self.t_embedder(t)
  if self.y_embedder then
    local labels = arguments.expect("TimeMLP", "condition.labels", condition and condition.labels, "a tensor")
    c = c + self.y_embedder(labels)
  end
  local h = x:reshape(-1, self.features)
  h = self.x_embedder(self.places and self.places(h) or h)
  for _, block in ipairs(self.blocks) do h = block(h, c) end
  h = self.linear(self.norm(h))
  return self.outputs and h or h:reshape(x.shape)
end

return TimeMLP
