--- The transformer of PixArt-alpha and PixArt-sigma, with the names and the config.json of diffusers'
-- PixArtTransformer2DModel: patches attend to each other and to the text; all blocks share one reading of the time.
-- Chen et al. 2024, "PixArt-alpha: Fast Training of Diffusion Transformer for Photorealistic Text-to-Image Synthesis".
local ty = require "tycho"
local blocks = require "tycho.models.unet_blocks"
local configs = require "tycho.models.config"
local parts = require "tycho.models.dit_blocks"
local Component = require "tycho.models.component"

local nn = ty.nn
local WHO = "PixArtTransformer2DModel"

-- Time and, where `sizes` says so, the height, width and their ratio that the picture is to have.
local Embeddings = nn.module "PixArtAlphaCombinedTimestepSizeEmbeddings"

function Embeddings:init(width, sizes)
  self.time_proj = nn.Sinusoidal(256)
  self.timestep_embedder = blocks.TimeEmbedding(256, width)
  if not sizes then return end
  self.resolution_embedder = blocks.TimeEmbedding(256, width // 3)
  self.aspect_ratio_embedder = blocks.TimeEmbedding(256, width // 3)
end

function Embeddings:forward(t, sizes, dtype)
  local embedded = self.timestep_embedder(self.time_proj(t):to(dtype))
  if not sizes then return embedded end
  local n = sizes.shape[1]
  local waves = self.time_proj(sizes:flatten()):to(dtype):reshape(n, 3, 256)
  local sides = self.resolution_embedder(waves:narrow(1, 0, 2)):reshape(n, -1)
  return embedded + ty.concat({ sides, self.aspect_ratio_embedder(waves:select(1, 2)) }, 1)
end

local Single = nn.module "AdaLayerNormSingle"

function Single:init(width, sizes)
  self.emb = Embeddings(width, sizes)
  self.linear = nn.Linear(width, 6 * width)
end

-- What modulates blocks [n, 6 width], and what modulates the end [n, width].
function Single:forward(t, sizes, dtype)
  local embedded = self.emb(t, sizes, dtype)
  return self.linear(embedded:silu()), embedded
end

local Block = nn.module "BasicTransformerBlock"

function Block:init(config, width, context)
  local norm = { elementwise_affine = config.norm_elementwise_affine, eps = config.norm_eps }
  local heads, bias = config.num_attention_heads, config.attention_bias
  self.norm1 = nn.LayerNorm(width, norm)
  self.attn1 = parts.Attention(width, heads, width, bias)
  self.norm2 = nn.LayerNorm(width, norm)
  self.attn2 = parts.Attention(width, heads, context, bias)
  self.ff = parts.FeedForward(width, config.dropout)
  self.scale_shift_table = parts.scale_shift { 6, width }
end

function Block:forward(x, text, mask, condition)
  local n, _, width = table.unpack(x.shape)
  local shift, scale, gate, shift_ff, scale_ff, gate_ff =
    (self.scale_shift_table + condition:reshape(n, 6, width)):unbind(1)
  x = parts.gated(x, gate, self.attn1(nn.modulate(self.norm1(x), shift, scale)))
  x = x + self.attn2(x, text, mask)
  return parts.gated(x, gate_ff, self.ff(nn.modulate(self.norm2(x), shift_ff, scale_ff)))
end

---@class PixArtTransformer2DModel: Component
local PixArt = nn.module(WHO, Component)
PixArt.architecture = WHO

local fields = {
  num_attention_heads = { "count", 16 }, attention_head_dim = { "count", 72 }, in_channels = { "count", 4 },
  out_channels = { "count", 8, null = false }, num_layers = { "few", 28 }, dropout = { "share", 0 },
  norm_num_groups = { "count", 32 }, cross_attention_dim = { "count", 1152 }, attention_bias = { "flag", true },
  sample_size = { "count", 128 }, patch_size = { "count", 2 }, activation_fn = { "text", "gelu-approximate" },
  num_embeds_ada_norm = { "count", 1000 }, upcast_attention = { "flag", false },
  norm_type = { "text", "ada_norm_single" }, norm_elementwise_affine = { "flag", false },
  norm_eps = { "epsilon", 1e-6 }, interpolation_scale = { "number", configs.none },
  use_additional_conditions = { "flag", configs.none }, caption_channels = { "count", configs.none },
  attention_type = { "text", "default" },
}

local function read(given)
  local config = configs.read(WHO, given, fields)
  configs.only(WHO, config, { activation_fn = "gelu-approximate", norm_type = "ada_norm_single",
    attention_type = "default" })
  configs.divides(WHO, config, "patch_size", "sample_size")
  if config.use_additional_conditions == nil then config.use_additional_conditions = config.sample_size == 128 end
  local width = config.num_attention_heads * config.attention_head_dim
  local divisor = config.use_additional_conditions and 12 or 4
  if width % divisor ~= 0 then
    error(("%s: num_attention_heads * attention_head_dim: expected a multiple of %d, got %d"):format(WHO, divisor,
      width), 0)
  end
  if (config.interpolation_scale or 1) <= 0 then
    error(("%s: config key 'interpolation_scale': expected a number > 0, got %g"):format(WHO,
      config.interpolation_scale), 0)
  end
  if config.caption_channels and config.cross_attention_dim ~= width then
    error(("%s: config key 'cross_attention_dim': expected %d beside caption_channels, got %d"):format(WHO, width,
      config.cross_attention_dim), 0)
  end
  local outputs = config.out_channels or config.in_channels
  if not config.out_channels then config.out_channels = nil end -- the file's null
  return config, outputs
end

--- given: the keys of diffusers' config.json: sample_size (128: height and width of the latents), patch_size (2),
-- in_channels (4), out_channels (8: means and variances), num_layers (28), num_attention_heads (16), attention_head_dim
-- (72), cross_attention_dim (1152: the width of text in attention), caption_channels (the width of text embeddings,
-- where a projection comes first), interpolation_scale (sample_size // 64, at least 1), use_additional_conditions
-- (whether the network is told sizes; true where sample_size is 128).
function PixArt:init(given)
  local config, outputs = read(given)
  local width, patch = config.num_attention_heads * config.attention_head_dim, config.patch_size
  self.config = config
  self.pos_embed = parts.GridPatches(config.in_channels, width, patch, config.sample_size // patch,
    config.interpolation_scale or math.max(config.sample_size // 64, 1))
  self.transformer_blocks = nn.ModuleList {}
  for _ = 1, config.num_layers do self.transformer_blocks:append(Block(config, width, config.cross_attention_dim)) end
  self.norm_out = nn.LayerNorm(width, { elementwise_affine = false, eps = parts.EPS })
  self.scale_shift_table = parts.scale_shift { 2, width }
  self.proj_out = blocks.zero(nn.Linear(width, patch * patch * outputs))
  self.adaln_single = Single(width, config.use_additional_conditions)
  if config.caption_channels then self.caption_projection = parts.TextProjection(config.caption_channels, width) end
end

--- x [n, in_channels, h, w] with sides that patch_size divides, t [n] from 0 to 1000: [n, out_channels, h, w].
-- condition: text = { embeddings [n, tokens, caption_channels], mask [n, tokens] (true: seen; left out: all are) },
-- sizes [n, 3] (with use_additional_conditions: height and width of the picture, and their ratio).
---@param x Tensor
---@param t Tensor
---@param condition { text: table, sizes?: Tensor }
---@return Tensor
function PixArt:forward(x, t, condition)
  local config = self.config
  Component.check_inputs(WHO, config.in_channels, x, t, condition)
  local n = x.shape[1]
  local rows, columns = parts.grid(WHO, x, config.patch_size)
  local text, _, mask = parts.text(WHO, condition, n, config.caption_channels or config.cross_attention_dim)
  local sizes = condition.sizes
  if config.use_additional_conditions then
    parts.want(WHO, "sizes", sizes, n, 2, 3, ("[%d, 3]: height, width, height / width"):format(n))
  else
    sizes = nil
  end
  local h = self.pos_embed(x):to(x.dtype) -- published files keep its weights in f32
  local modulation, embedded = self.adaln_single(t, sizes, h.dtype)
  if modulation.shape[1] ~= n then
    modulation, embedded = modulation:expand(n, modulation.shape[2]), embedded:expand(n, embedded.shape[2])
  end
  if self.caption_projection then text = self.caption_projection(text) end
  for _, block in ipairs(self.transformer_blocks) do h = block(h, text, mask, modulation) end
  local shift, scale = (self.scale_shift_table + embedded:unsqueeze(1)):unbind(1)
  return nn.unpatchify(self.proj_out(nn.modulate(self.norm_out(h), shift, scale)), config.patch_size, rows, columns)
end

return PixArt
