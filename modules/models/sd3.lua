--- The transformer of Stable Diffusion 3 and 3.5, with the names and the config.json of diffusers'
-- SD3Transformer2DModel: patches and text attend to each other, each with weights of its own, modulated by time and
-- pooled text. Esser et al. 2024, "Scaling Rectified Flow Transformers for High-Resolution Image Synthesis".
local ty = require "tycho"
local arguments = require "tycho.arguments"
local blocks = require "tycho.models.unet_blocks"
local configs = require "tycho.models.config"
local parts = require "tycho.models.dit_blocks"
local Component = require "tycho.models.component"

local nn = ty.nn
local WHO = "SD3Transformer2DModel"
local EPS = parts.EPS
local AdaLayerNorm, FeedForward = parts.AdaLayerNorm, parts.FeedForward
local by_heads, gated = parts.by_heads, parts.gated

-- Patches of a map and their places on a larger grid, from whose middle they are cut.
local PlacedPatches = nn.module("PatchEmbed", nn.PatchEmbed)

function PlacedPatches:init(config, width)
  nn.PatchEmbed.init(self, config.in_channels, width, config.patch_size)
  self.patch, self.side = config.patch_size, config.pos_embed_max_size
  local places = ty.empty({ 1, self.side * self.side, width }, { device = self.proj.weight.device })
  if places.device ~= "meta" then
    local scale = config.sample_size // config.patch_size / self.side
    places:copy_(nn.sinusoidal_2d(width, self.side, self.side, scale):unsqueeze(0))
  end
  self:buffer("pos_embed", places)
end

function PlacedPatches:forward(x)
  local rows, columns, side = x.shape[3] // self.patch, x.shape[4] // self.patch, self.side
  local places = self.pos_embed:reshape(1, side, side, -1):narrow(1, (side - rows) // 2, rows)
  places = places:narrow(2, (side - columns) // 2, columns)
  return nn.PatchEmbed.forward(self, x) + places:flatten(1, 2):to(x.dtype)
end

-- Attention of patches to patches and, where `context` says so, to the text: "both" comes out, or "patches" alone (the
-- last block); nil: there is no text.
local JointAttention = nn.module "Attention"

function JointAttention:init(config, context)
  local heads, head = config.num_attention_heads, config.attention_head_dim
  local width = heads * head
  self.heads = heads
  local function norms(...)
    for _, name in ipairs(config.qk_norm and { ... } or {}) do self[name] = nn.RMSNorm(head, { eps = EPS }) end
  end
  for _, name in ipairs { "to_q", "to_k", "to_v" } do self[name] = nn.Linear(width, width) end
  self.to_out = nn.ModuleList { nn.Linear(width, width) }
  norms("norm_q", "norm_k")
  if not context then return end
  for _, name in ipairs { "add_q_proj", "add_k_proj", "add_v_proj" } do self[name] = nn.Linear(width, width) end
  if context == "both" then self.to_add_out = nn.Linear(width, width) end
  norms("norm_added_q", "norm_added_k")
end

-- x [n, t, width]; text [n, s, width] or nil; mask [n, 1, 1, t + s] or nil. Returns what x and text become.
function JointAttention:forward(x, text, mask)
  local q = by_heads(x, self.to_q, self.heads, self.norm_q)
  local k = by_heads(x, self.to_k, self.heads, self.norm_k)
  local v = by_heads(x, self.to_v, self.heads)
  if not text then return self.to_out[1](nn.attention(q, k, v)) end
  k = ty.concat({ k, by_heads(text, self.add_k_proj, self.heads, self.norm_added_k) }, 2)
  v = ty.concat({ v, by_heads(text, self.add_v_proj, self.heads) }, 2)
  -- Where the text ends nobody asks for it: the weights of its queries are in the files, and do nothing.
  if not self.to_add_out then return self.to_out[1](nn.attention(q, k, v, { mask = mask })) end
  q = ty.concat({ q, by_heads(text, self.add_q_proj, self.heads, self.norm_added_q) }, 2)
  local y, t, s = nn.attention(q, k, v, { mask = mask }), x.shape[2], text.shape[2]
  return self.to_out[1](y:narrow(1, 0, t)), self.to_add_out(y:narrow(1, t, s))
end

-- options: dual (attention of the patches alone besides), last (the text ends here).
local JointBlock = nn.module "JointTransformerBlock"

function JointBlock:init(config, options)
  local width = config.num_attention_heads * config.attention_head_dim
  local plain = { elementwise_affine = false, eps = EPS }
  self.norm1 = AdaLayerNorm(width, options.dual and 9 or 6)
  self.norm1_context = AdaLayerNorm(width, options.last and 2 or 6)
  self.attn = JointAttention(config, options.last and "patches" or "both")
  if options.dual then self.attn2 = JointAttention(config) end
  self.norm2 = nn.LayerNorm(width, plain)
  self.ff = FeedForward(width)
  if not options.last then
    self.norm2_context = nn.LayerNorm(width, plain)
    self.ff_context = FeedForward(width)
  end
end

-- Patches x, text and the condition (through silu): patches and text after it, no text after the last block.
function JointBlock:forward(x, text, condition, mask)
  local normed, shift, scale, gate, shift_ff, scale_ff, gate_ff, shift2, scale2, gate2 = self.norm1(x, condition)
  local text_normed, a, b, text_gate, text_shift, text_scale, text_gate_ff = self.norm1_context(text, condition)
  if not self.ff_context then a, b = b, a end -- the scale comes first there
  local y, text_y = self.attn(nn.modulate(normed, shift, scale), nn.modulate(text_normed, a, b), mask)
  x = gated(x, gate, y)
  if self.attn2 then x = gated(x, gate2, self.attn2(nn.modulate(normed, shift2, scale2))) end
  x = gated(x, gate_ff, self.ff(nn.modulate(self.norm2(x), shift_ff, scale_ff)))
  if not self.ff_context then return x end
  text = gated(text, text_gate, text_y)
  return x, gated(text, text_gate_ff, self.ff_context(nn.modulate(self.norm2_context(text), text_shift, text_scale)))
end

---@class SD3Transformer2DModel: Component
local SD3 = nn.module(WHO, Component)
SD3.architecture = WHO

local fields = {
  sample_size = { "count", 128 }, patch_size = { "count", 2 }, in_channels = { "count", 16 },
  num_layers = { "few", 18 }, attention_head_dim = { "count", 64 }, num_attention_heads = { "count", 18 },
  joint_attention_dim = { "count", 4096 }, caption_projection_dim = { "count", configs.none },
  pooled_projection_dim = { "count", 2048 }, out_channels = { "count", configs.none },
  pos_embed_max_size = { "few", 96 }, dual_attention_layers = { "places", ty.io.array {} },
  qk_norm = { "text", configs.none },
}

local function read(given)
  local config = configs.read(WHO, given, fields)
  configs.only(WHO, config, { qk_norm = { false, "rms_norm" } })
  local width = config.num_attention_heads * config.attention_head_dim
  config.caption_projection_dim = config.caption_projection_dim or width
  config.out_channels = config.out_channels or config.in_channels
  configs.only(WHO, config, { caption_projection_dim = width })
  if width % 4 ~= 0 then
    error(("%s: num_attention_heads * attention_head_dim: expected a multiple of 4, got %d"):format(WHO, width), 0)
  end
  return config
end

--- given: the keys of diffusers' config.json: sample_size (128: height and width that the places stand for), patch_size
-- (2), in_channels (16), out_channels (as many), num_layers (18), num_attention_heads (18), attention_head_dim (64),
-- joint_attention_dim (4096: the width of text embeddings), pooled_projection_dim (2048), pos_embed_max_size (96: how
-- many patches a side may have), qk_norm (none, or "rms_norm"), dual_attention_layers ({}: from 0, those with attention
-- of the patches alone besides, as in Stable Diffusion 3.5 medium).
function SD3:init(given)
  local config = read(given)
  local width = config.num_attention_heads * config.attention_head_dim
  self.config = config
  self.pos_embed = PlacedPatches(config, width)
  self.time_text_embed = parts.Conditioning(config.pooled_projection_dim, width)
  self.context_embedder = nn.Linear(config.joint_attention_dim, width)
  self.transformer_blocks = nn.ModuleList {}
  local dual = {}
  for _, layer in ipairs(config.dual_attention_layers) do dual[layer] = true end
  for i = 0, config.num_layers - 1 do
    self.transformer_blocks:append(JointBlock(config, { dual = dual[i], last = i == config.num_layers - 1 }))
  end
  self.norm_out = AdaLayerNorm(width, 2)
  self.proj_out = blocks.zero(nn.Linear(width, config.patch_size * config.patch_size * config.out_channels))
end

-- The condition's text embeddings, pooled text and the mask of attention, or an error that names what is wrong.
local function read_text(config, condition, n, patches)
  local embeddings, pooled, mask = parts.text(WHO, condition, n, config.joint_attention_dim,
    config.pooled_projection_dim)
  if not mask then return embeddings, pooled, nil end
  local seen = ty.ones({ n, patches }, { dtype = "bool", device = mask.device })
  return embeddings, pooled, ty.concat({ seen, mask:to "bool" }, 1):unsqueeze(1):unsqueeze(1)
end

--- x [n, in_channels, h, w] with sides that patch_size divides, t [n] from 0 to 1000: [n, out_channels, h, w].
-- condition: text = { embeddings [n, tokens, joint_attention_dim], pooled [n, pooled_projection_dim], mask [n, tokens]
-- (true: seen; left out: all are) }.
---@param x Tensor
---@param t Tensor
---@param condition { text: table }
---@return Tensor
function SD3:forward(x, t, condition)
  local config = self.config
  Component.check_inputs(WHO, config.in_channels, x, t, condition)
  local patch, most = config.patch_size, config.pos_embed_max_size
  local rows, columns = x.shape[3] // patch, x.shape[4] // patch
  if x.shape[3] % patch ~= 0 or x.shape[4] % patch ~= 0 or math.max(rows, columns) > most then
    arguments.fail("%s: x: expected sides that patch_size %d divides, up to %d, got %s", WHO, patch, most * patch,
      arguments.describe(x))
  end
  local embeddings, pooled, mask = read_text(config, condition, x.shape[1], rows * columns)
  local embedded = self.time_text_embed(t, pooled):silu()
  local text = self.context_embedder(embeddings)
  local h = self.pos_embed(x)
  for _, block in ipairs(self.transformer_blocks) do h, text = block(h, text, embedded, mask) end
  local normed, scale, shift = self.norm_out(h, embedded)
  return nn.unpatchify(self.proj_out(nn.modulate(normed, shift, scale)), patch, rows, columns)
end

return SD3
