--- The parts that the transformers of diffusion share, with the parameter names of diffusers: places on a grid, what
-- time, guidance and pooled text say together, modulated norms, attention, the feed-forward network.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local blocks = require "tycho.models.unet_blocks"

local nn = ty.nn
local parameter = require("tycho.nn.options").parameter
local M = {}

--- Of the norms.
M.EPS = 1e-6

-- Patches of a map with their places added, as DiT and PixArt have them: a grid of `side` patches spans the same places
-- as any other that a picture has. spread: how far these are pulled together.
local GridPatches = nn.module("PatchEmbed", nn.PatchEmbed)
M.GridPatches = GridPatches

function GridPatches:init(channels, width, patch, side, spread)
  nn.PatchEmbed.init(self, channels, width, patch)
  self.width, self.side, self.spread, self.tables = width, side, spread, {}
end

-- The places of a grid on a device, which are kept.
local function places(self, rows, columns, device)
  local key = ("%d %d %s"):format(rows, columns, device)
  if not self.tables[key] then
    local scale = { self.side / rows / self.spread, self.side / columns / self.spread }
    self.tables[key] = ty.unscoped(function()
      return nn.sinusoidal_2d(self.width, rows, columns, scale):unsqueeze(0):to { device = device }
    end)
  end
  return self.tables[key]
end

function GridPatches:forward(x)
  local tokens = self.proj(x)
  local at = places(self, tokens.shape[3], tokens.shape[4], x.device)
  return tokens:flatten(2):transpose(1, 2) + at:to(x.dtype)
end

-- What time, pooled text and, where `guided`, the strength of guidance say together: [n, width].
local Conditioning = nn.module "CombinedTimestepTextProjEmbeddings"
M.Conditioning = Conditioning

function Conditioning:init(pooled, width, guided)
  self.time_proj = nn.Sinusoidal(256)
  self.timestep_embedder = blocks.TimeEmbedding(256, width)
  if guided then self.guidance_embedder = blocks.TimeEmbedding(256, width) end
  self.text_embedder = blocks.TimeEmbedding(pooled, width)
end

function Conditioning:forward(t, pooled, guidance)
  local embedded = self.timestep_embedder(self.time_proj(t):to(pooled.dtype))
  if guidance then embedded = embedded + self.guidance_embedder(self.time_proj(guidance):to(pooled.dtype)) end
  return embedded + self.text_embedder(pooled)
end

-- A norm and, from the condition [n, width], what modulates the half block after it: `parts` tensors [n, width], all 0
-- at the start (adaLN-Zero, Peebles and Xie 2023).
local AdaLayerNorm = nn.module "AdaLayerNorm"
M.AdaLayerNorm = AdaLayerNorm

function AdaLayerNorm:init(width, parts)
  self.parts = parts
  self.linear = nn.Linear(width, parts * width)
  if self.linear.weight.device ~= "meta" then blocks.zero(self.linear) end
  self.norm = nn.LayerNorm(width, { elementwise_affine = false, eps = M.EPS })
end

-- The norm of x and the parts; condition has been through silu.
function AdaLayerNorm:forward(x, condition) return self.norm(x), self.linear(condition):chunk(self.parts, 1) end

local Expand = nn.module "GELU"

function Expand:init(width, inner) self.proj = nn.Linear(width, inner) end

function Expand:forward(x) return self.proj(x, nil, "gelu_tanh") end

local FeedForward = nn.module "FeedForward"
M.FeedForward = FeedForward

-- inner: its width inside (4 width).
function FeedForward:init(width, dropout, inner) -- the published names count a dropout between
  inner = inner or 4 * width
  self.net = nn.Sequential(Expand(width, inner), dropout and nn.Dropout(dropout) or nn.Identity(),
    nn.Linear(inner, width))
end

function FeedForward:forward(x) return self.net(x) end

-- Attention of tokens to a context (nil: to themselves). context: its width. bias: of queries, keys and values.
local Attention = nn.module "Attention"
M.Attention = Attention

function Attention:init(width, heads, context, bias)
  self.heads = heads
  self.to_q = nn.Linear(width, width, { bias = bias })
  self.to_k = nn.Linear(context, width, { bias = bias })
  self.to_v = nn.Linear(context, width, { bias = bias })
  self.to_out = nn.ModuleList { nn.Linear(width, width) }
end

-- mask [n, s] (bool, true: seen) or nil.
function Attention:forward(x, context, mask)
  context = context or x
  return self.to_out[1](nn.attention(self.to_q(x), self.to_k(context), self.to_v(context), { heads = self.heads,
    mask = mask and mask:to("bool"):unsqueeze(1):unsqueeze(1) }))
end

--- What a layer makes of x [n, t, width], by heads: [n, heads, t, head], through a norm where there is one.
function M.by_heads(x, layer, heads, norm)
  x = nn.split_heads(layer(x), heads)
  return norm and norm(x) or x
end

-- Text embeddings at the network's width.
local TextProjection = nn.module "PixArtAlphaTextProjection"
M.TextProjection = TextProjection

function TextProjection:init(inputs, width)
  self.linear_1 = nn.Linear(inputs, width)
  self.linear_2 = nn.Linear(width, width)
end

function TextProjection:forward(x) return self.linear_2(self.linear_1(x, nil, "gelu_tanh")) end

--- Numbers that are learnt and added to what modulates: [...], the last of them the width.
---@param shape integer[]
---@return Tensor
function M.scale_shift(shape)
  return parameter(shape, function(t) nn.init.normal(t, 0, shape[#shape] ^ -0.5) end)
end

--- How far queries and keys turn at places along several axes, of which each has so many numbers of a head: { cos, sin
-- [..., head / 2] } of integer tensors [...], one for each axis. Su et al. 2021.
---@param widths integer[]
---@param theta number      1 / theta is the slowest turn
---@param at Tensor[]         the places, axis by axis
---@return { cos: Tensor, sin: Tensor }
function M.turns(widths, theta, at)
  local angles = {}
  for axis, width in ipairs(widths) do
    local frequencies = (ty.arange(width // 2, { dtype = "f64", device = at[axis].device })
      * (-2 * math.log(theta) / width)):exp()
    angles[axis] = at[axis]:to("f64"):unsqueeze(-1) * frequencies
  end
  local all = ty.concat(angles, -1)
  return { cos = all:cos():to "f32", sin = all:sin():to "f32" }
end

--- x with a change whose strength the condition says: gate [n, width].
function M.gated(x, gate, change) return x + gate:unsqueeze(1) * change end

--- Raises where an entry of a condition is no tensor of `dims` dimensions for n samples, whose last one is `last` (nil:
-- any). path: such as "text.embeddings"; words: what is expected.
function M.want(who, path, value, n, dims, last, words)
  local shape = ty.is_tensor(value) and value.shape or {}
  if #shape ~= dims or shape[1] ~= n or last and shape[dims] ~= last then
    arguments.fail("%s: condition.%s: expected %s, got %s", who, path, words, arguments.describe(value))
  end
  return value
end

--- The text embeddings [n, tokens, wide], pooled text [n, deep] (nil: not asked for) and mask [n, tokens] of a
-- condition, or an error that names what is wrong.
function M.text(who, condition, n, wide, deep)
  local text = condition and condition.text
  if type(text) ~= "table" then text = {} end
  M.want(who, "text.embeddings", text.embeddings, n, 3, wide, ("[%d, tokens, %d]"):format(n, wide))
  if deep then M.want(who, "text.pooled", text.pooled, n, 2, deep, ("[%d, %d]"):format(n, deep)) end
  if text.mask ~= nil then
    local tokens = text.embeddings.shape[2]
    M.want(who, "text.mask", text.mask, n, 2, tokens, ("[%d, %d] or nil"):format(n, tokens))
  end
  return text.embeddings, text.pooled, text.mask
end

--- Rows and columns of patches of x, or an error where `patch` does not divide the sides.
function M.grid(who, x, patch)
  if x.shape[3] % patch ~= 0 or x.shape[4] % patch ~= 0 then
    arguments.fail("%s: x: expected sides that patch_size %d divides, got %s", who, patch, arguments.describe(x))
  end
  return x.shape[3] // patch, x.shape[4] // patch
end

return M
