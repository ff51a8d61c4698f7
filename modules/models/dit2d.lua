--- The class-conditional transformer of diffusion, with the names and the config.json of diffusers'
-- DiTTransformer2DModel. Peebles and Xie 2023, "Scalable Diffusion Models with Transformers". (models.DiT is the same
-- network with the names of the authors' files.)
local ty = require "tycho"
local arguments = require "tycho.arguments"
local blocks = require "tycho.models.unet_blocks"
local configs = require "tycho.models.config"
local parts = require "tycho.models.dit_blocks"
local Component = require "tycho.models.component"

local nn = ty.nn
local WHO = "DiTTransformer2DModel"

-- What time and class say together; each block has one of its own.
local Conditioning = nn.module "CombinedTimestepLabelEmbeddings"

local Labels = nn.module "LabelEmbedding"

function Labels:init(classes, width) self.embedding_table = nn.Embedding(classes + 1, width) end

function Labels:forward(labels) return self.embedding_table(labels) end

function Conditioning:init(classes, width)
  self.time_proj = nn.Sinusoidal(256, { shift = 1 })
  self.timestep_embedder = blocks.TimeEmbedding(256, width)
  self.class_embedder = Labels(classes, width)
end

function Conditioning:forward(t, labels, dtype)
  return self.timestep_embedder(self.time_proj(t):to(dtype)) + self.class_embedder(labels)
end

local Norm = nn.module("AdaLayerNormZero", parts.AdaLayerNorm)

function Norm:init(classes, width)
  parts.AdaLayerNorm.init(self, width, 6)
  self.emb = Conditioning(classes, width)
end

local Block = nn.module "BasicTransformerBlock"

function Block:init(config, width)
  self.norm1 = Norm(config.num_embeds_ada_norm, width)
  self.attn1 = parts.Attention(width, config.num_attention_heads, width, config.attention_bias)
  self.norm3 = nn.LayerNorm(width, { elementwise_affine = config.norm_elementwise_affine, eps = config.norm_eps })
  self.ff = parts.FeedForward(width, config.dropout)
end

function Block:forward(x, t, labels)
  local condition = self.norm1.emb(t, labels, x.dtype):silu()
  local normed, shift, scale, gate, shift_ff, scale_ff, gate_ff = self.norm1(x, condition)
  x = parts.gated(x, gate, self.attn1(nn.modulate(normed, shift, scale)))
  return parts.gated(x, gate_ff, self.ff(nn.modulate(self.norm3(x), shift_ff, scale_ff)))
end

---@class DiTTransformer2DModel: Component
---@field null_label integer  the label that means "any class"
local DiT = nn.module(WHO, Component)
DiT.architecture = WHO

local fields = {
  num_attention_heads = { "count", 16 }, attention_head_dim = { "count", 72 }, in_channels = { "count", 4 },
  out_channels = { "count", configs.none }, num_layers = { "few", 28 }, dropout = { "share", 0 },
  norm_num_groups = { "count", 32 }, attention_bias = { "flag", true }, sample_size = { "count", 32 },
  patch_size = { "count", 2 }, activation_fn = { "text", "gelu-approximate" },
  num_embeds_ada_norm = { "count", 1000 }, upcast_attention = { "flag", false },
  norm_type = { "text", "ada_norm_zero" }, norm_elementwise_affine = { "flag", false },
  norm_eps = { "epsilon", 1e-5 },
}

--- given: the keys of diffusers' config.json: sample_size (32: height and width of the latents), patch_size (2),
-- in_channels (4), out_channels (as many; twice as many where the network guesses variances too), num_layers (28),
-- num_attention_heads (16), attention_head_dim (72), num_embeds_ada_norm (1000: classes).
function DiT:init(given)
  local config = configs.read(WHO, given, fields)
  configs.only(WHO, config, { activation_fn = "gelu-approximate", norm_type = "ada_norm_zero" })
  local width = config.num_attention_heads * config.attention_head_dim
  if width % 4 ~= 0 then
    error(("%s: num_attention_heads * attention_head_dim: expected a multiple of 4, got %d"):format(WHO, width), 0)
  end
  local patch = config.patch_size
  configs.divides(WHO, config, "patch_size", "sample_size")
  self.config, self.null_label = config, config.num_embeds_ada_norm
  self.pos_embed = parts.GridPatches(config.in_channels, width, patch, config.sample_size // patch, 1)
  self.transformer_blocks = nn.ModuleList {}
  for _ = 1, config.num_layers do self.transformer_blocks:append(Block(config, width)) end
  self.norm_out = nn.LayerNorm(width, { elementwise_affine = false, eps = parts.EPS })
  self.proj_out_1 = nn.Linear(width, 2 * width)
  self.proj_out_2 = blocks.zero(nn.Linear(width, patch * patch * (config.out_channels or config.in_channels)))
end

--- x [n, in_channels, h, w] with sides that patch_size divides, t [n] from 0 to 1000: [n, out_channels, h, w].
-- condition: labels (i64 [n]; null_label for any class).
---@param x Tensor
---@param t Tensor
---@param condition { labels: Tensor }
---@return Tensor
function DiT:forward(x, t, condition)
  local config = self.config
  Component.check_inputs(WHO, config.in_channels, x, t, condition)
  local labels = condition and condition.labels
  if not ty.is_tensor(labels) or labels.ndim ~= 1 then
    arguments.fail("%s: condition.labels: expected i64 [%d] (%d for any class), got %s", WHO, x.shape[1],
      self.null_label, arguments.describe(labels))
  end
  local rows, columns = parts.grid(WHO, x, config.patch_size)
  local h = self.pos_embed(x)
  for _, block in ipairs(self.transformer_blocks) do h = block(h, t, labels) end
  local embedded = self.transformer_blocks[1].norm1.emb(t, labels, h.dtype):silu()
  local shift, scale = self.proj_out_1(embedded):chunk(2, 1)
  return nn.unpatchify(self.proj_out_2(nn.modulate(self.norm_out(h), shift, scale)), config.patch_size, rows, columns)
end

return DiT
