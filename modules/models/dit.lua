--- The diffusion transformer, with the parameter names of the public DiT checkpoints. Peebles and Xie 2023, "Scalable
-- Diffusion Models with Transformers".
local ty = require "tycho"

local nn = ty.nn

local function zero(linear)
  nn.init.zeros(linear.weight)
  nn.init.zeros(linear.bias)
  return linear
end

-- Xavier weights and no bias: the initialisation of the public code for the layers of the transformer.
local function linear(inputs, outputs)
  local layer = nn.Linear(inputs, outputs)
  nn.init.xavier_uniform(layer.weight)
  nn.init.zeros(layer.bias)
  return layer
end

local function small_normal(layer)
  nn.init.normal(layer.weight, 0, 0.02)
  if layer.bias then nn.init.zeros(layer.bias) end
  return layer
end

local Attention = nn.module "Attention"

function Attention:init(width, heads)
  self.heads = heads
  self.qkv = linear(width, 3 * width)
  self.proj = linear(width, width)
end

function Attention:forward(x)
  local shape = x.shape
  local qkv = self.qkv(x):reshape(shape[1], shape[2], 3, self.heads, -1):permute(2, 0, 3, 1, 4)
  return self.proj(nn.attention(qkv:select(0, 0), qkv:select(0, 1), qkv:select(0, 2)))
end

local Mlp = nn.module "Mlp"

function Mlp:init(width, inner)
  self.fc1 = linear(width, inner)
  self.fc2 = linear(inner, width)
end

function Mlp:forward(x) return self.fc2(ty.gelu(self.fc1(x), "tanh")) end

local Block = nn.module "DiTBlock"

function Block:init(width, heads, ratio)
  local plain = { elementwise_affine = false, eps = 1e-6 }
  self.norm1 = nn.LayerNorm(width, plain)
  self.attn = Attention(width, heads)
  self.norm2 = nn.LayerNorm(width, plain)
  self.mlp = Mlp(width, math.floor(width * ratio))
  self.adaLN_modulation = nn.Modulation(width, 6)
end

-- x [n, t, width], condition [n, width]
function Block:forward(x, condition)
  local shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(condition)
  x = x + gate1:unsqueeze(1) * self.attn(nn.modulate(self.norm1(x), shift1, scale1))
  return x + gate2:unsqueeze(1) * self.mlp(nn.modulate(self.norm2(x), shift2, scale2))
end

local FinalLayer = nn.module "FinalLayer"

function FinalLayer:init(width, outputs)
  self.norm_final = nn.LayerNorm(width, { elementwise_affine = false, eps = 1e-6 })
  self.linear = zero(nn.Linear(width, outputs))
  self.adaLN_modulation = nn.Modulation(width, 2)
end

function FinalLayer:forward(x, condition)
  local shift, scale = self.adaLN_modulation(condition)
  return self.linear(nn.modulate(self.norm_final(x), shift, scale))
end

local TimestepEmbedder = nn.module "TimestepEmbedder"

function TimestepEmbedder:init(width)
  self.mlp = nn.Sequential(small_normal(nn.Linear(256, width)), nn.SiLU(), small_normal(nn.Linear(width, width)))
  self.frequencies = nn.Sinusoidal(256)
end

function TimestepEmbedder:forward(t) return self.mlp(self.frequencies(t)) end

local LabelEmbedder = nn.module "LabelEmbedder"

function LabelEmbedder:init(classes, width) self.embedding_table = small_normal(nn.Embedding(classes + 1, width)) end

function LabelEmbedder:forward(labels) return self.embedding_table(labels) end

---@class DiT: Module
---@field null_label integer  the label that means "any class"
local DiT = nn.module "DiT"

local size = "an integer >= 1"
local kinds = { size = size, patch = size, channels = size, width = size, depth = size, heads = size,
  mlp_ratio = "a finite number > 0", classes = "an integer >= 0" }

--- options: size (8: height and width of the input), patch (2), channels (1), width (128), depth (4), heads (4),
-- mlp_ratio (4), classes (10), learn_sigma (false: true doubles the output channels, as the public checkpoints have).
function DiT:init(options)
  local o = nn.options("DiT", options, { size = 8, patch = 2, channels = 1, width = 128, depth = 4, heads = 4,
    mlp_ratio = 4, classes = 10, learn_sigma = false }, kinds)
  if o.size % o.patch ~= 0 then error(("DiT: patch %d must divide size %d"):format(o.patch, o.size), 3) end
  if o.width % 4 ~= 0 or o.width % o.heads ~= 0 then
    error(("DiT: width %d must be a multiple of 4 and of heads %d"):format(o.width, o.heads), 3)
  end
  self.patch, self.rows = o.patch, o.size // o.patch
  self.out_channels = o.learn_sigma and 2 * o.channels or o.channels
  self.null_label = o.classes
  self.x_embedder = nn.PatchEmbed(o.channels, o.width, o.patch)
  self.t_embedder = TimestepEmbedder(o.width)
  self.y_embedder = LabelEmbedder(o.classes, o.width)
  self:parameter("pos_embed", nn.sinusoidal_2d(o.width, self.rows):unsqueeze(0)
    :to { device = self.x_embedder.proj.weight.device })
  self.blocks = nn.ModuleList {}
  for _ = 1, o.depth do self.blocks:append(Block(o.width, o.heads, o.mlp_ratio)) end
  self.final_layer = FinalLayer(o.width, o.patch * o.patch * self.out_channels)
end

--- x [n, channels, size, size], t [n] from 0 to 1000: [n, out_channels, size, size].
-- condition: labels (i64 [n]; null_label for any class).
---@param x Tensor
---@param t Tensor
---@param condition {labels: Tensor}
---@return Tensor
function DiT:forward(x, t, condition)
  local labels = condition and condition.labels
  if not labels then error("DiT: condition.labels: expected i64 [n] (null_label for any class), got nil", 2) end
  local c = self.t_embedder(t) + self.y_embedder(labels)
  x = self.x_embedder(x) + self.pos_embed
  for _, block in ipairs(self.blocks) do x = block(x, c) end
  return nn.unpatchify(self.final_layer(x, c), self.patch, self.rows)
end

return DiT
