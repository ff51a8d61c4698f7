--- The transformer of Z-Image, with the names and the config.json of diffusers' ZImageTransformer2DModel: text and
-- patches are one sequence in which every token goes through the same layers, after a few of their own ("refiners").
-- Norms stand before and after attention and the gated feed-forward network, time scales what goes in and gates what
-- comes out, and places turn queries and keys along three axes: the text along the first, patches along the other two.
-- Z-Image Team 2025, "Z-Image: An Efficient Image Generation Foundation Model with Single-Stream Diffusion
-- Transformer".
local ty = require "tycho"
local arguments = require "tycho.arguments"
local blocks = require "tycho.models.unet_blocks"
local configs = require "tycho.models.config"
local parts = require "tycho.models.dit_blocks"
local Component = require "tycho.models.component"

local nn = ty.nn
local WHO = "ZImageTransformer2DModel"
local MOST = 256     -- the width of what time says

-- ---- blocks ----

local Attention = nn.module "Attention"

function Attention:init(width, heads, norm)
  self.heads = heads
  for _, name in ipairs { "to_q", "to_k", "to_v" } do self[name] = nn.Linear(width, width, { bias = false }) end
  self.to_out = nn.ModuleList { nn.Linear(width, width, { bias = false }) }
  if norm then
    self.norm_q, self.norm_k = nn.RMSNorm(width // heads, { eps = 1e-5 }), nn.RMSNorm(width // heads, { eps = 1e-5 })
  end
end

-- x [n, t, width]; at: cos and sin of the turns; mask: bool [n, 1, 1, t] (true: seen) or nil.
function Attention:forward(x, at, mask)
  local function turned(linear, norm)
    local y = nn.split_heads(linear(x), self.heads)
    return ty.rotary(norm and norm(y) or y, at.cos, at.sin, true)
  end
  local v = nn.split_heads(self.to_v(x), self.heads)
  return self.to_out[1](nn.attention(turned(self.to_q, self.norm_q), turned(self.to_k, self.norm_k), v,
    { mask = mask }))
end

local FeedForward = nn.module "FeedForward"

function FeedForward:init(width)
  local wide = math.floor(width / 3 * 8)
  self.w1, self.w3 = nn.Linear(width, wide, { bias = false }), nn.Linear(width, wide, { bias = false })
  self.w2 = nn.Linear(wide, width, { bias = false })
end

function FeedForward:forward(x) return self.w2(self.w1(x):silu() * self.w3(x)) end

local Block = nn.module "ZImageTransformerBlock"

function Block:init(config, modulated)
  local width, eps = config.dim, { eps = config.norm_eps }
  self.attention = Attention(width, config.n_heads, config.qk_norm)
  self.feed_forward = FeedForward(width)
  for _, name in ipairs { "attention_norm1", "ffn_norm1", "attention_norm2", "ffn_norm2" } do
    self[name] = nn.RMSNorm(width, eps)
  end
  if not modulated then return end
  -- Gates that are 0 at the start: every block begins as the identity.
  self.adaLN_modulation = nn.Sequential(blocks.zero(nn.Linear(math.min(width, MOST), 4 * width)))
end

-- time [n, 256], or [n, k, 256] with `which`, i64 [t]: the one that each token has; nil for blocks without modulation.
function Block:forward(x, at, mask, time, which)
  if not self.adaLN_modulation then
    x = x + self.attention_norm2(self.attention(self.attention_norm1(x), at, mask))
    return x + self.ffn_norm2(self.feed_forward(self.ffn_norm1(x)))
  end
  local modulation = self.adaLN_modulation(time)
  modulation = which and modulation:index_select(1, which) or modulation:unsqueeze(1)
  local scale, gate, scale_ff, gate_ff = modulation:chunk(4, 2)
  local y = self.attention(self.attention_norm1(x) * (scale + 1), at, mask)
  x = x + gate:tanh() * self.attention_norm2(y)
  return x + gate_ff:tanh() * self.ffn_norm2(self.feed_forward(self.ffn_norm1(x) * (scale_ff + 1)))
end

local Time = nn.module "TimestepEmbedder"

function Time:init(width)
  self.sines = nn.Sinusoidal(256)
  self.mlp = nn.Sequential(nn.Linear(256, 1024), nn.SiLU(), nn.Linear(1024, width))
end

function Time:forward(t, dtype) return self.mlp(self.sines(t):to(dtype)) end

local Final = nn.module "FinalLayer"

function Final:init(width, out)
  self.norm_final = nn.LayerNorm(width, { elementwise_affine = false, eps = 1e-6 })
  self.linear = blocks.zero(nn.Linear(width, out))
  self.adaLN_modulation = nn.Sequential(nn.SiLU(), blocks.zero(nn.Linear(math.min(width, MOST), width)))
end

function Final:forward(x, time)
  return self.linear(self.norm_final(x) * (self.adaLN_modulation(time):unsqueeze(1) + 1))
end

-- ---- the network ----

---@class ZImageTransformer2DModel: Component
local ZImage = nn.module(WHO, Component)
ZImage.architecture = WHO

local fields = {
  all_patch_size = { "counts", { 2 } }, all_f_patch_size = { "counts", { 1 } }, in_channels = { "count", 16 },
  dim = { "count", 3840 }, n_layers = { "few", 30 }, n_refiner_layers = { "few", 2 }, n_heads = { "count", 30 },
  n_kv_heads = { "count", configs.none }, norm_eps = { "epsilon", 1e-5 }, qk_norm = { "flag", true },
  cap_feat_dim = { "count", 2560 }, siglip_feat_dim = { "count", configs.none }, rope_theta = { "number", 256.0 },
  t_scale = { "number", 1000.0 }, axes_dims = { "counts", { 32, 48, 48 } },
  axes_lens = { "counts", { 1024, 512, 512 } }, pad_multiple = { "count", 32 },
}

local function read(given)
  local config = configs.read(WHO, given, fields)
  local function fail(key, expected, got)
    error(("%s: config key '%s': expected %s, got %s"):format(WHO, key, expected, got), 0)
  end
  if config.siglip_feat_dim then fail("siglip_feat_dim", "none", config.siglip_feat_dim) end
  local kv = config.n_kv_heads or config.n_heads
  if kv ~= config.n_heads then fail("n_kv_heads", ("as many as n_heads %d"):format(config.n_heads), kv) end
  config.n_kv_heads = kv
  for _, key in ipairs { "all_patch_size", "all_f_patch_size" } do
    if #config[key] ~= 1 then fail(key, "one number", #config[key]) end
  end
  if config.all_f_patch_size[1] ~= 1 then fail("all_f_patch_size", "1", config.all_f_patch_size[1]) end
  if config.dim % config.n_heads ~= 0 then fail("dim", "a multiple of n_heads", config.dim) end
  local sum = 0
  for _, width in ipairs(config.axes_dims) do
    sum = sum + width
    if width % 2 ~= 0 then fail("axes_dims", "even numbers", width) end
  end
  if #config.axes_dims ~= 3 or #config.axes_lens ~= 3 or sum ~= config.dim // config.n_heads then
    fail("axes_dims", ("three numbers with the sum %d, and as many axes_lens"):format(config.dim // config.n_heads),
      table.concat(config.axes_dims, ", "))
  end
  return config
end

--- given: the keys of diffusers' config.json: in_channels (16), all_patch_size ({ 2 }), dim (3840), n_heads (30),
-- n_layers (30), n_refiner_layers (2: of the text and of the patches before they meet), cap_feat_dim (2560: the width
-- of text embeddings), qk_norm (true), norm_eps (1e-5), rope_theta (256), axes_dims ({ 32, 48, 48 }: how much of a head
-- turns with each of the three axes of a place), axes_lens ({ 1024, 512, 512 }: places along each), t_scale (1000); and
-- pad_multiple (32, as published ones have: text and patches are filled up to multiples of it with learned tokens).
-- The variant that sees pictures through SigLIP (siglip_feat_dim) is refused.
function ZImage:init(given)
  local config = read(given)
  local width, patch = config.dim, config.all_patch_size[1]
  local name, values = patch .. "-1", patch * patch * config.in_channels
  self.config, self.patch = config, patch
  self.all_x_embedder = nn.ModuleDict { [name] = nn.Linear(values, width) }
  self.all_final_layer = nn.ModuleDict { [name] = Final(width, values) }
  self.noise_refiner, self.context_refiner, self.layers = nn.ModuleList {}, nn.ModuleList {}, nn.ModuleList {}
  for _ = 1, config.n_refiner_layers do
    self.noise_refiner:append(Block(config, true))
    self.context_refiner:append(Block(config, false))
  end
  for _ = 1, config.n_layers do self.layers:append(Block(config, true)) end
  self.t_embedder = Time(math.min(width, MOST))
  self.cap_embedder = nn.Sequential(nn.RMSNorm(config.cap_feat_dim, { eps = config.norm_eps }),
    nn.Linear(config.cap_feat_dim, width))
  self:parameter("x_pad_token", ty.zeros(1, width):requires_grad_())
  self:parameter("cap_pad_token", ty.zeros(1, width):requires_grad_())
end

-- The least multiple of m that n fits into.
local function filled(n, m) return (n + m - 1) // m * m end

-- Latents [n, c, h, w] as patches [n, rows * columns, patch * patch * c], channels beside each other; and back.
local function pack(x, p)
  local n, c, h, w = table.unpack(x.shape)
  return x:reshape(n, c, h // p, p, w // p, p):permute(0, 2, 4, 3, 5, 1):reshape(n, h * w // (p * p), p * p * c)
end

local function unpack(tokens, rows, columns, p)
  local n, _, values = table.unpack(tokens.shape)
  return tokens:reshape(n, rows, columns, p, p, values // (p * p)):permute(0, 5, 1, 3, 2, 4)
    :reshape(n, values // (p * p), rows * p, columns * p)
end

-- x [n, t, width] filled up with a learned token.
local function fill(x, token, m)
  local n, t, width = table.unpack(x.shape)
  local room = filled(t, m) - t
  return room == 0 and x or ty.concat({ x, token:to(x.dtype):unsqueeze(0):expand(n, room, width) }, 1)
end

-- The text as tokens [n, s, width], filled up; where places along the first axis end for each sample, which
-- patches go on from: a number, or i64 [n]; and the mask [n, s] of what is seen, nil: all.
local function text_tokens(self, embeddings, mask)
  local x, m = self.cap_embedder(embeddings), self.config.pad_multiple
  if not mask then
    x = fill(x, self.cap_pad_token, m)
    return x, x.shape[2], nil
  end
  local n, s, width = table.unpack(x.shape)
  local lengths = mask:to("i64"):sum(1)
  local ends = (lengths + (m - 1)):floor_divide(m) * m
  local wide = filled(s, m)
  if wide > s then x = x:pad { 0, 0, 0, wide - s } end
  local at = ty.arange(wide, { device = x.device }):unsqueeze(0)
  local own = at:lt(lengths:unsqueeze(1)):unsqueeze(2)
  x = ty.where(own, x, self.cap_pad_token:to(x.dtype):unsqueeze(0):expand(n, wide, width))
  return x, ends, at:lt(ends:unsqueeze(1))
end

-- The turns of text [s] and of patches, by sample where their texts have other lengths; frame: how far behind the text
-- the patches are on the first axis.
local function places(config, s, ends, rows, columns, device, frame)
  local function line(count) return ty.arange(count, { device = device }) end
  local function turns(at) return parts.turns(config.axes_dims, config.rope_theta, at) end
  local zeros = ty.zeros(s, { dtype = "i64", device = device })
  local text = turns { line(s) + 1, zeros, zeros }
  local count = rows * columns
  local room = filled(count, config.pad_multiple) - count
  local rest = ty.zeros(room, { dtype = "i64", device = device })
  local function ended(x) return ty.concat({ x, rest }, 0) end -- what fills up is at the place 0
  local row = ended(line(rows):unsqueeze(1):expand(rows, columns):flatten())
  local column = ended(line(columns):unsqueeze(0):expand(rows, columns):flatten())
  local real = ended(ty.ones(count, { dtype = "i64", device = device }))
  if type(ends) == "number" then return text, turns { real * (ends + frame), row, column } end
  local n = ends.shape[1]
  local first = (ends + frame):reshape(n, 1, 1) * real
  return text, turns { first, row:reshape(1, 1, -1):expand(n, 1, count + room),
    column:reshape(1, 1, -1):expand(n, 1, count + room) }
end

local function joined(a, b, n)
  local function both(x, y)
    if x.ndim > y.ndim then y = y:unsqueeze(0):unsqueeze(0):expand(n, 1, y.shape[1], y.shape[2]) end
    return ty.concat({ x, y }, -2)
  end
  return { cos = both(a.cos, b.cos), sin = both(a.sin, b.sin) }
end

--- x [n, in_channels, h, w] with sides that all_patch_size divides, t [n] from 0 (clean) to 1000 (noise): [n,
-- in_channels, h, w], the velocity from clean to noise. diffusers' class counts time the other way and gives the
-- opposite velocity: it is called with 1 - t / 1000 there, and what it says is turned around.
-- condition: text = { embeddings [n, tokens, cap_feat_dim], mask [n, tokens] or nil }: of each text the first tokens
-- that the mask has count, a text and its picture see nothing of what fills up a longer one; picture = [n, in_channels,
-- h, w], a clean one to edit: its patches join the sequence one place behind those of x on the first axis, and have the
-- time of what is clean.
---@param x Tensor
---@param t Tensor
---@param condition { text: table, picture?: Tensor }
---@return Tensor
function ZImage:forward(x, t, condition)
  local config = self.config
  arguments.expect(WHO, "condition", condition, "a table or nil")
  local n = ty.is_tensor(x) and x.ndim == 4 and x.shape[2] == config.in_channels and x.shape[1]
  if not n then
    arguments.fail("%s: x: expected [n, %d, h, w], got %s", WHO, config.in_channels, arguments.describe(x))
  end
  local rows, columns = parts.grid(WHO, x, self.patch)
  if not ty.is_tensor(t) or t.ndim ~= 1 or t.shape[1] ~= n and t.shape[1] ~= 1 then
    arguments.fail("%s: t: expected [%d], got %s", WHO, n, arguments.describe(t))
  end
  local embeddings, _, mask = parts.text(WHO, condition, n, config.cap_feat_dim)
  local picture = condition.picture
  local shape = table.concat(x.shape, ", ")
  if picture ~= nil and (not ty.is_tensor(picture) or table.concat(picture.shape, ", ") ~= shape) then
    arguments.fail("%s: condition.picture: expected [%s] as x, got %s", WHO, shape,
      arguments.describe(picture))
  end
  local longest = { filled(embeddings.shape[2], config.pad_multiple) + (picture and 3 or 2), rows, columns }
  for axis, length in ipairs(config.axes_lens) do
    if longest[axis] > length then
      arguments.fail("%s: %s: expected at most %d places (config key 'axes_lens'), got %d", WHO,
        axis == 1 and "condition.text" or "x", length, longest[axis])
    end
  end
  local time = self.t_embedder((1 - t:to "f32" / 1000) * config.t_scale, embeddings.dtype)
  local name = self.patch .. "-1"
  local text, ends, seen = text_tokens(self, embeddings, mask)
  local text_at, at = places(config, text.shape[2], ends, rows, columns, x.device, 1)
  local function refined(y, y_at, y_time)
    local tokens = fill(self.all_x_embedder[name](pack(y, self.patch)), self.x_pad_token,
      config.pad_multiple)
    for _, block in ipairs(self.noise_refiner) do tokens = block(tokens, y_at, nil, y_time) end
    return tokens
  end
  local h, which = refined(x, at, time), nil
  if picture then
    local clean = self.t_embedder(ty.full({ n }, config.t_scale, { device = x.device }), embeddings.dtype)
    local _, picture_at = places(config, text.shape[2], ends, rows, columns, x.device, 2)
    local source, count = refined(picture, picture_at, clean), h.shape[2]
    -- Tokens of x and of the text have the time of x, those of the picture that of what is clean.
    local first, second = ty.zeros({ count }, { dtype = "i64", device = x.device }),
      ty.ones({ source.shape[2] }, { dtype = "i64", device = x.device })
    which = ty.concat({ first, second, ty.zeros({ text.shape[2] }, { dtype = "i64", device = x.device }) }, 0)
    time = ty.stack({ time:expand(n, time.shape[2]), clean }, 1)
    h, at = ty.concat({ h, source }, 1), joined(at, picture_at, n)
  end
  local text_mask = seen and seen:unsqueeze(1):unsqueeze(1)
  for _, block in ipairs(self.context_refiner) do text = block(text, text_at, text_mask) end
  local all, all_at = ty.concat({ h, text }, 1), joined(at, text_at, n)
  if seen then
    seen = ty.concat({ ty.ones({ n, h.shape[2] }, { dtype = "bool", device = x.device }), seen }, 1):unsqueeze(1)
      :unsqueeze(1)
  end
  for _, block in ipairs(self.layers) do all = block(all, all_at, seen, time, which) end
  local y = self.all_final_layer[name](all:narrow(1, 0, rows * columns), which and time:select(1, 0) or time)
  return -unpack(y, rows, columns, self.patch)
end

return ZImage
