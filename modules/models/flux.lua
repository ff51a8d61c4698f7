--- The transformer of Flux, with the names and the config.json of diffusers' FluxTransformer2DModel: text and patches
-- attend to each other, first with weights of their own, then with the same ones; places turn queries and keys. Black
-- Forest Labs 2024; Esser et al. 2024 (two streams); Dehghani et al. 2023 (parallel attention and feed-forward); Su et
-- al. 2021 (rotary places).
local ty = require "tycho"
local arguments = require "tycho.arguments"
local blocks = require "tycho.models.unet_blocks"
local configs = require "tycho.models.config"
local parts = require "tycho.models.dit_blocks"
local Component = require "tycho.models.component"

local nn = ty.nn
local WHO = "FluxTransformer2DModel"
local EPS = parts.EPS
local by_heads, gated = parts.by_heads, parts.gated

-- Attention over text and patches in one sequence, the text first. text: it has weights of its own; otherwise there is
-- one stream, and no layer after attention.
local Attention = nn.module "FluxAttention"

function Attention:init(heads, head, text)
  local width = heads * head
  self.heads, self.head = heads, head
  for _, name in ipairs { "norm_q", "norm_k" } do self[name] = nn.RMSNorm(head, { eps = EPS }) end
  for _, name in ipairs { "to_q", "to_k", "to_v" } do self[name] = nn.Linear(width, width) end
  if not text then return end
  self.to_out = nn.ModuleList { nn.Linear(width, width) }
  for _, name in ipairs { "norm_added_q", "norm_added_k" } do self[name] = nn.RMSNorm(head, { eps = EPS }) end
  for _, name in ipairs { "add_q_proj", "add_k_proj", "add_v_proj" } do self[name] = nn.Linear(width, width) end
  self.to_add_out = nn.Linear(width, width)
end

-- x [n, t, width]; text [n, s, width] or nil; at: cos and sin of the turns of all tokens, the text's first.
function Attention:forward(x, text, at)
  local q = by_heads(x, self.to_q, self.heads, self.norm_q)
  local k = by_heads(x, self.to_k, self.heads, self.norm_k)
  local v = by_heads(x, self.to_v, self.heads)
  if text then
    q = ty.concat({ by_heads(text, self.add_q_proj, self.heads, self.norm_added_q), q }, 2)
    k = ty.concat({ by_heads(text, self.add_k_proj, self.heads, self.norm_added_k), k }, 2)
    v = ty.concat({ by_heads(text, self.add_v_proj, self.heads), v }, 2)
  end
  q, k = ty.rotary(q, at.cos, at.sin, true), ty.rotary(k, at.cos, at.sin, true)
  local y = nn.attention(q, k, v)
  if not text then return y end
  local s, t = text.shape[2], x.shape[2]
  return self.to_out[1](y:narrow(1, s, t)), self.to_add_out(y:narrow(1, 0, s))
end

local Double = nn.module "FluxTransformerBlock"

function Double:init(heads, head)
  local width, plain = heads * head, { elementwise_affine = false, eps = EPS }
  self.norm1, self.norm1_context = parts.AdaLayerNorm(width, 6), parts.AdaLayerNorm(width, 6)
  self.attn = Attention(heads, head, true)
  self.norm2, self.norm2_context = nn.LayerNorm(width, plain), nn.LayerNorm(width, plain)
  self.ff, self.ff_context = parts.FeedForward(width), parts.FeedForward(width)
end

function Double:forward(x, text, condition, at)
  local normed, shift, scale, gate, shift_ff, scale_ff, gate_ff = self.norm1(x, condition)
  local text_normed, a, b, text_gate, text_shift, text_scale, text_gate_ff = self.norm1_context(text, condition)
  local y, text_y = self.attn(nn.modulate(normed, shift, scale), nn.modulate(text_normed, a, b), at)
  x = gated(x, gate, y)
  x = gated(x, gate_ff, self.ff(nn.modulate(self.norm2(x), shift_ff, scale_ff)))
  text = gated(text, text_gate, text_y)
  return x, gated(text, text_gate_ff, self.ff_context(nn.modulate(self.norm2_context(text), text_shift, text_scale)))
end

local Single = nn.module "FluxSingleTransformerBlock"

function Single:init(heads, head)
  local width = heads * head
  self.norm = parts.AdaLayerNorm(width, 3)
  self.proj_mlp = nn.Linear(width, 4 * width)
  self.proj_out = nn.Linear(5 * width, width)
  self.attn = Attention(heads, head)
end

-- x [n, s + t, width]: text and patches.
function Single:forward(x, condition, at)
  local normed, shift, scale, gate = self.norm(x, condition)
  normed = nn.modulate(normed, shift, scale)
  local wide = self.proj_mlp(normed, nil, "gelu_tanh")
  return gated(x, gate, self.proj_out(ty.concat({ self.attn(normed, nil, at), wide }, 2)))
end

---@class FluxTransformer2DModel: Component
local Flux = nn.module(WHO, Component)
Flux.architecture = WHO

local fields = {
  patch_size = { "count", 1 }, in_channels = { "count", 64 }, out_channels = { "count", configs.none },
  num_layers = { "few", 19 }, num_single_layers = { "few", 38 }, attention_head_dim = { "count", 128 },
  num_attention_heads = { "count", 24 }, joint_attention_dim = { "count", 4096 },
  pooled_projection_dim = { "count", 768 }, guidance_embeds = { "flag", false },
  axes_dims_rope = { "counts", { 16, 56, 56 } },
}

local function read(given)
  local config = configs.read(WHO, given, fields)
  configs.only(WHO, config, { patch_size = 1 })
  local axes, sum = config.axes_dims_rope, 0
  for _, width in ipairs(axes) do
    sum = sum + width
    if width % 2 ~= 0 then
      error(("%s: config key 'axes_dims_rope': expected even numbers, got %d"):format(WHO, width), 0)
    end
  end
  if #axes ~= 3 or sum ~= config.attention_head_dim then
    error(("%s: config key 'axes_dims_rope': expected three numbers with the sum attention_head_dim %d, got %s"):format(
      WHO, config.attention_head_dim, table.concat(axes, ", ")), 0)
  end
  return config
end

--- given: the keys of diffusers' config.json: in_channels (64: of a patch of 2 x 2 latents), out_channels (as many),
-- num_layers (19: with weights of their own for the text) and num_single_layers (38), num_attention_heads (24),
-- attention_head_dim (128), axes_dims_rope ({ 16, 56, 56 }: how much of a head turns with each of the three axes of a
-- place), joint_attention_dim (4096: the width of text embeddings), pooled_projection_dim (768), guidance_embeds
-- (false; true: the network is told how strong guidance shall be).
function Flux:init(given)
  local config = read(given)
  local heads, head = config.num_attention_heads, config.attention_head_dim
  local width = heads * head
  self.config = config
  self.time_text_embed = parts.Conditioning(config.pooled_projection_dim, width, config.guidance_embeds)
  self.context_embedder = nn.Linear(config.joint_attention_dim, width)
  self.x_embedder = nn.Linear(config.in_channels, width)
  self.transformer_blocks, self.single_transformer_blocks = nn.ModuleList {}, nn.ModuleList {}
  for _ = 1, config.num_layers do self.transformer_blocks:append(Double(heads, head)) end
  for _ = 1, config.num_single_layers do self.single_transformer_blocks:append(Single(heads, head)) end
  self.norm_out = parts.AdaLayerNorm(width, 2)
  self.proj_out = blocks.zero(nn.Linear(width, config.out_channels or config.in_channels))
end

-- Latents [n, c, h, w] as patches [n, h / 2 * w / 2, 4 c], each channel's four beside each other; and back.
local function pack(x)
  local n, c, h, w = table.unpack(x.shape)
  return x:reshape(n, c, h // 2, 2, w // 2, 2):permute(0, 2, 4, 1, 3, 5):reshape(n, h * w // 4, 4 * c)
end

local function unpack(tokens, rows, columns)
  local n, _, width = table.unpack(tokens.shape)
  return tokens:reshape(n, rows, columns, width // 4, 2, 2):permute(0, 3, 1, 4, 2, 5)
    :reshape(n, width // 4, 2 * rows, 2 * columns)
end

-- The places of a picture's patches: (0, row, column).
local function grid(rows, columns, device)
  local row = ty.arange(rows, { device = device }):unsqueeze(1):expand(rows, columns):flatten()
  local column = ty.arange(columns, { device = device }):unsqueeze(0):expand(rows, columns):flatten()
  return ty.stack({ ty.zeros_like(row), row, column }, 1)
end

-- x as patches, their places, and what makes the output of the form that x had.
local function patches(config, x, condition)
  local function wrong(words) arguments.fail("%s: x: expected %s, got %s", WHO, words, arguments.describe(x)) end
  local width = config.in_channels
  if ty.is_tensor(x) and x.ndim == 3 and x.shape[3] == width then
    local at = condition and condition.places
    local shape = ty.is_tensor(at) and at.shape or {}
    if #shape ~= 2 or shape[1] ~= x.shape[2] or shape[2] ~= 3 then
      arguments.fail("%s: condition.places: expected [%d, 3] beside packed x, got %s", WHO, x.shape[2],
        arguments.describe(at))
    end
    return x, at, function(y) return y end
  end
  if not ty.is_tensor(x) or x.ndim ~= 4 or 4 * x.shape[2] ~= width then
    wrong(("[n, %g, h, w] or [n, tokens, %d]"):format(width / 4, width))
  elseif x.shape[3] % 2 ~= 0 or x.shape[4] % 2 ~= 0 then
    wrong "even sides"
  end
  local rows, columns = x.shape[3] // 2, x.shape[4] // 2
  return pack(x), grid(rows, columns, x.device), function(y) return unpack(y, rows, columns) end
end

--- x [n, in_channels / 4, h, w] with even sides, t [n] from 0 to 1000: [n, out_channels / 4, h, w]. Packed already, x
-- is [n, tokens, in_channels] and condition.places [tokens, 3]; so is then what comes out.
-- condition: text = { embeddings [n, tokens, joint_attention_dim], pooled [n, pooled_projection_dim] }, guidance [n]
-- (with guidance_embeds: how strong, such as 3.5).
---@param x Tensor
---@param t Tensor
---@param condition { text: table, guidance?: Tensor, places?: Tensor }
---@return Tensor
function Flux:forward(x, t, condition)
  local config = self.config
  arguments.expect(WHO, "condition", condition, "a table or nil")
  local tokens, at, formed = patches(config, x, condition)
  local n = x.shape[1]
  if not ty.is_tensor(t) or t.ndim ~= 1 or t.shape[1] ~= n and t.shape[1] ~= 1 then
    arguments.fail("%s: t: expected [%d], got %s", WHO, n, arguments.describe(t))
  end
  local embeddings, pooled = parts.text(WHO, condition, n, config.joint_attention_dim, config.pooled_projection_dim)
  local guidance = condition.guidance
  if config.guidance_embeds then
    parts.want(WHO, "guidance", guidance, n, 1, nil, ("[%d] (the config has guidance_embeds)"):format(n))
  elseif guidance ~= nil then
    arguments.fail("%s: condition.guidance: expected nil (the config has no guidance_embeds), got %s", WHO,
      arguments.describe(guidance))
  end
  local embedded = self.time_text_embed(t, pooled, guidance and guidance * 1000):silu()
  local text, h = self.context_embedder(embeddings), self.x_embedder(tokens)
  local s = text.shape[2]
  -- All of the text is at the place 0.
  local where = ty.concat({ ty.zeros({ s, 3 }, { dtype = at.dtype, device = at.device }), at }, 0)
  local turned = parts.turns(config.axes_dims_rope, 10000, { where:unbind(1) })
  for _, block in ipairs(self.transformer_blocks) do h, text = block(h, text, embedded, turned) end
  local both = ty.concat({ text, h }, 1)
  for _, block in ipairs(self.single_transformer_blocks) do both = block(both, embedded, turned) end
  local normed, scale, shift = self.norm_out(both:narrow(1, s, h.shape[2]), embedded)
  return formed(self.proj_out(nn.modulate(normed, shift, scale)))
end

return Flux
