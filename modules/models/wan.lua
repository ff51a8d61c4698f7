--- The transformer of Wan, which draws moving pictures, with the names and the config.json of diffusers'
-- WanTransformer3DModel (text to video): patches of all frames attend to each other, turned by their places along time,
-- height and width, and then to the text; all blocks share one reading of the time. Wan Team 2025, "Wan: Open and
-- Advanced Large-Scale Video Generative Models".
local ty = require "tycho"
local arguments = require "tycho.arguments"
local blocks = require "tycho.models.unet_blocks"
local configs = require "tycho.models.config"
local parts = require "tycho.models.dit_blocks"
local Component = require "tycho.models.component"

local nn = ty.nn
local WHO = "WanTransformer3DModel"
local gated = parts.gated

local Attention = nn.module "WanAttention"

function Attention:init(width, heads, eps)
  self.heads = heads
  for _, name in ipairs { "to_q", "to_k", "to_v" } do self[name] = nn.Linear(width, width) end
  self.to_out = nn.ModuleList { nn.Linear(width, width) }
  self.norm_q, self.norm_k = nn.RMSNorm(width, { eps = eps }), nn.RMSNorm(width, { eps = eps }) -- over all heads
end

-- x [n, t, width]; context [n, s, width] (nil: x itself); at: cos and sin of turns, or nil; mask: bool [n, 1, 1, s].
function Attention:forward(x, context, at, mask)
  context = context or x
  local q = nn.split_heads(self.norm_q(self.to_q(x)), self.heads)
  local k = nn.split_heads(self.norm_k(self.to_k(context)), self.heads)
  if at then q, k = ty.rotary(q, at.cos, at.sin, true), ty.rotary(k, at.cos, at.sin, true) end
  return self.to_out[1](nn.attention(q, k, nn.split_heads(self.to_v(context), self.heads), { mask = mask }))
end

local Block = nn.module "WanTransformerBlock"

function Block:init(config, width)
  local eps, plain = config.eps, { elementwise_affine = false, eps = config.eps }
  self.norm1, self.norm3 = nn.LayerNorm(width, plain), nn.LayerNorm(width, plain)
  self.norm2 = config.cross_attn_norm and nn.LayerNorm(width, { eps = eps }) or nn.Identity()
  self.attn1 = Attention(width, config.num_attention_heads, eps)
  self.attn2 = Attention(width, config.num_attention_heads, eps)
  self.ffn = parts.FeedForward(width, nil, config.ffn_dim)
  self.scale_shift_table = parts.scale_shift { 1, 6, width }
end

-- modulation [n, 6, width].
function Block:forward(x, text, modulation, at, mask)
  local shift, scale, gate, shift_ff, scale_ff, gate_ff = (self.scale_shift_table + modulation):unbind(1)
  x = gated(x, gate, self.attn1(nn.modulate(self.norm1(x), shift, scale), nil, at))
  x = x + self.attn2(self.norm2(x), text, nil, mask)
  return gated(x, gate_ff, self.ffn(nn.modulate(self.norm3(x), shift_ff, scale_ff)))
end

local Condition = nn.module "WanTimeTextImageEmbedding"

function Condition:init(config, width)
  self.sines = nn.Sinusoidal(config.freq_dim)
  self.time_embedder = blocks.TimeEmbedding(config.freq_dim, width)
  self.time_proj = blocks.zero(nn.Linear(width, 6 * width))
  self.text_embedder = parts.TextProjection(config.text_dim, width)
end

-- ---- the network ----

---@class WanTransformer3DModel: Component
local Wan = nn.module(WHO, Component)
Wan.architecture = WHO

local fields = {
  patch_size = { "counts", { 1, 2, 2 } }, num_attention_heads = { "count", 40 }, attention_head_dim = { "count", 128 },
  in_channels = { "count", 16 }, out_channels = { "count", 16 }, text_dim = { "count", 4096 },
  freq_dim = { "count", 256 }, ffn_dim = { "count", 13824 }, num_layers = { "few", 40 },
  cross_attn_norm = { "flag", true }, qk_norm = { "text", "rms_norm_across_heads" }, eps = { "epsilon", 1e-6 },
  image_dim = { "count", configs.none }, added_kv_proj_dim = { "count", configs.none },
  rope_max_seq_len = { "count", 1024 }, pos_embed_seq_len = { "count", configs.none },
}

local function read(given)
  local config = configs.read(WHO, given, fields)
  configs.only(WHO, config, { qk_norm = "rms_norm_across_heads" })
  local function fail(key, expected, got)
    error(("%s: config key '%s': expected %s, got %s"):format(WHO, key, expected, got), 0)
  end
  for _, key in ipairs { "image_dim", "added_kv_proj_dim", "pos_embed_seq_len" } do
    if config[key] then fail(key, "none (pictures are no condition here)", config[key]) end
  end
  if #config.patch_size ~= 3 then
    fail("patch_size", "three numbers, of frames, rows and columns", table.concat(config.patch_size, ", "))
  end
  if config.attention_head_dim < 6 or config.attention_head_dim % 2 ~= 0 then
    fail("attention_head_dim", "an even number of at least 6", config.attention_head_dim)
  end
  if config.freq_dim % 2 ~= 0 then fail("freq_dim", "an even number", config.freq_dim) end
  return config
end

--- given: the keys of diffusers' config.json: patch_size ({ 1, 2, 2 }: frames, rows, columns), in_channels (16),
-- out_channels (16), num_layers (40), num_attention_heads (40), attention_head_dim (128), ffn_dim (13824: the width
-- inside of feed-forward networks), text_dim (4096), freq_dim (256: sines of the time), cross_attn_norm (true), eps
-- (1e-6), rope_max_seq_len (1024: the most places along an axis). The variants that begin from a picture (image_dim,
-- added_kv_proj_dim) are refused.
function Wan:init(given)
  local config = read(given)
  local width = config.num_attention_heads * config.attention_head_dim
  local values = config.patch_size[1] * config.patch_size[2] * config.patch_size[3]
  self.config = config
  self.patch_embedding = nn.Conv3d(config.in_channels, width, config.patch_size, { stride = config.patch_size })
  self.condition_embedder = Condition(config, width)
  self.blocks = nn.ModuleList {}
  for _ = 1, config.num_layers do self.blocks:append(Block(config, width)) end
  self.norm_out = nn.LayerNorm(width, { elementwise_affine = false, eps = config.eps })
  self.proj_out = blocks.zero(nn.Linear(width, config.out_channels * values))
  self.scale_shift_table = parts.scale_shift { 1, 2, width }
end

-- Patches of x [n, c, f, h, w], a row of numbers each, [n, tokens, c * values]; and back, from [n, tokens, values * c].
local function pack(x, p, counts)
  local n, c = x.shape[1], x.shape[2]
  local tokens = counts[1] * counts[2] * counts[3]
  return x:reshape(n, c, counts[1], p[1], counts[2], p[2], counts[3], p[3]):permute(0, 2, 4, 6, 1, 3, 5, 7)
    :reshape(n, tokens, c * p[1] * p[2] * p[3])
end

local function unpack(y, p, counts)
  local n, c = y.shape[1], y.shape[3] // (p[1] * p[2] * p[3])
  return y:reshape(n, counts[1], counts[2], counts[3], p[1], p[2], p[3], c):permute(0, 7, 1, 4, 2, 5, 3, 6)
    :reshape(n, c, counts[1] * p[1], counts[2] * p[2], counts[3] * p[3])
end

-- The turns of all patches: a third of a head for height, as much for width, the rest for time.
local function turns(config, counts, device)
  local head = config.attention_head_dim
  local side = 2 * (head // 6)
  local shape, at = { counts[1], counts[2], counts[3] }, {}
  for axis = 1, 3 do
    local own = { 1, 1, 1 }
    own[axis] = counts[axis]
    at[axis] = ty.arange(counts[axis], { device = device }):reshape(own):expand(shape):flatten()
  end
  return parts.turns({ head - 2 * side, side, side }, 10000, at)
end

--- x [n, in_channels, frames, h, w] whose sizes patch_size divides, t [n] from 0 to 1000: [n, out_channels, frames, h,
-- w], the velocity from clean to noise. condition: text = { embeddings [n, tokens, text_dim], mask [n, tokens] (true:
-- seen; left out: all are) }.
---@param x Tensor
---@param t Tensor
---@param condition { text: table }
---@return Tensor
function Wan:forward(x, t, condition)
  local config, p = self.config, self.config.patch_size
  arguments.expect(WHO, "condition", condition, "a table or nil")
  local n = ty.is_tensor(x) and x.ndim == 5 and x.shape[2] == config.in_channels and x.shape[1]
  if not n then
    arguments.fail("%s: x: expected [n, %d, frames, h, w], got %s", WHO, config.in_channels, arguments.describe(x))
  end
  local counts = {}
  for axis = 1, 3 do
    local size = x.shape[2 + axis]
    counts[axis] = size // p[axis]
    if size % p[axis] ~= 0 or counts[axis] > config.rope_max_seq_len then
      arguments.fail("%s: x: expected sizes that patch_size { %s } divides into at most %d, got %s", WHO,
        table.concat(p, ", "), config.rope_max_seq_len, arguments.describe(x))
    end
  end
  if not ty.is_tensor(t) or t.ndim ~= 1 or t.shape[1] ~= n and t.shape[1] ~= 1 then
    arguments.fail("%s: t: expected [%d], got %s", WHO, n, arguments.describe(t))
  end
  local text, _, mask = parts.text(WHO, condition, n, config.text_dim)
  mask = mask and mask:to("bool"):unsqueeze(1):unsqueeze(1)
  local reader, weight = self.condition_embedder, self.patch_embedding.weight
  local embedded = reader.time_embedder(reader.sines(t):to(text.dtype))
  local modulation = reader.time_proj(embedded:silu()):unflatten(1, { 6, -1 })
  text = reader.text_embedder(text)
  -- A convolution whose windows do not meet is a product.
  local h = ty.linear(pack(x, p, counts), weight:flatten(1), self.patch_embedding.bias)
  local at = turns(config, counts, x.device)
  for _, block in ipairs(self.blocks) do h = block(h, text, modulation, at, mask) end
  local shift, scale = (self.scale_shift_table + embedded:unsqueeze(1)):unbind(1)
  return unpack(self.proj_out(nn.modulate(self.norm_out(h), shift, scale)), p, counts)
end

return Wan
