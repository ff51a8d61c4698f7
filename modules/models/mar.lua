--- Masked autoregression over continuous tokens. Li et al. 2024, "Autoregressive Image Generation without Vector
-- Quantization": an encoder sees a text and the tokens that are there, a decoder gives a vector for each place, and a
-- small network, the head, denoises a place's token under its vector. In LightGen (Wu et al. 2025, "LightGen: Efficient
-- Image Generation through Knowledge Distillation and Direct Preference Optimization") it is what a teacher's pictures
-- are distilled into.
--
--     local model = models.MAR { tokens = 16, channels = 12, text = 16 }
--     local z = model(x, visible, { text = { embeddings = text } })       -- [n, 16, width]
--     local noise = model.head(noisy, t, { z = z })                       -- noisy [n * places, 12]
local ty = require "tycho"
local arguments = require "tycho.arguments"
local modulated = require "tycho.models.modulated"

local nn = ty.nn
local WHO = "MAR"
local whole = "an integer >= 1"

-- A residual block of the head, modulated by time and vector.
local HeadBlock = nn.module "MARHeadBlock"

function HeadBlock:init(width)
  self.in_ln = nn.LayerNorm(width, { eps = 1e-6 })
  self.mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
  self.adaLN_modulation = nn.Modulation(width, 3)
end

function HeadBlock:forward(x, c)
  local shift, scale, gate = self.adaLN_modulation(c)
  return x + gate * self.mlp(nn.modulate(self.in_ln(x), shift, scale))
end

--- The head of MAR, a network of diffusion over single tokens: x [m, channels], t [m] from 0 to 1000, condition { z =
-- [m, width] }.
local Head = nn.module "MARHead"

function Head:init(channels, z, width, depth)
  self.input_proj, self.cond_embed = nn.Linear(channels, width), nn.Linear(z, width)
  self.frequencies = nn.Sinusoidal(width)
  self.time_embed = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
  self.res_blocks = nn.ModuleList {}
  for _ = 1, depth do self.res_blocks:append(HeadBlock(width)) end
  self.norm_final = nn.LayerNorm(width, { elementwise_affine = false, eps = 1e-6 })
  self.adaLN_modulation, self.linear = nn.Modulation(width, 2), nn.Linear(width, channels)
  nn.init.zeros(self.linear.weight)
  nn.init.zeros(self.linear.bias)
end

function Head:forward(x, t, condition)
  local c = self.time_embed(self.frequencies(t):to(x.dtype)) + self.cond_embed(condition.z)
  x = self.input_proj(x)
  for _, block in ipairs(self.res_blocks) do x = block(x, c) end
  local shift, scale = self.adaLN_modulation(c)
  return self.linear(nn.modulate(self.norm_final(x), shift, scale))
end

---@class MAR: Module
---@field tokens integer
---@field channels integer
---@field head Module       the network of diffusion over single tokens
local MAR = nn.module(WHO)

--- options: tokens (of a picture, the square of a number), channels (numbers of a token), text (width of embeddings of
-- words), width (64), encoder (2: blocks), decoder (2), heads (4), head_width (96), head_depth (2).
---@param options table
function MAR:init(options)
  local none = arguments.none
  local o = arguments.read(WHO, options, { tokens = none, channels = none, text = none, width = 64, encoder = 2,
    decoder = 2, heads = 4, head_width = 96, head_depth = 2 }, { tokens = whole, channels = whole, text = whole,
    width = whole, encoder = whole, decoder = whole, heads = whole, head_width = whole, head_depth = whole })
  for _, name in ipairs { "tokens", "channels", "text" } do
    if not o[name] then arguments.fail("%s: %s: expected an integer >= 1, got nil", WHO, name) end
  end
  local side = math.tointeger(o.tokens ^ 0.5)
  if not side then arguments.fail("%s: tokens: expected the square of a number, got %d", WHO, o.tokens) end
  local w = o.width
  self.tokens, self.channels, self.width = o.tokens, o.channels, w
  self.z_proj, self.text_proj = nn.Linear(o.channels, w), nn.Linear(o.text, w)
  self.encoder_pos_embed_learned = nn.Parameter(nn.sinusoidal_2d(w, side):unsqueeze(0))
  self.decoder_pos_embed_learned = nn.Parameter(nn.sinusoidal_2d(w, side):unsqueeze(0))
  self.mask_token = nn.Parameter(ty.randn(1, 1, w) * 0.02)
  self.encoder_blocks, self.decoder_blocks = nn.ModuleList {}, nn.ModuleList {}
  local function block()
    return nn.TransformerEncoderLayer(w, o.heads, { feedforward = 4 * w, dropout = 0, activation = "gelu",
      norm_first = true })
  end
  for _ = 1, o.encoder do self.encoder_blocks:append(block()) end
  for _ = 1, o.decoder do self.decoder_blocks:append(block()) end
  self.encoder_norm, self.decoder_norm = nn.LayerNorm(w), nn.LayerNorm(w)
  self.head = Head(o.channels, w, o.head_width, o.head_depth)
end

-- Rows [n, k] of x [n, tokens, width].
local function rows(x, places)
  return x:gather(1, places:unsqueeze(2):expand(-1, -1, x.shape[3]))
end

--- A vector for each place, [n, tokens, width], from the tokens at the places that are there.
-- x: [n, tokens, channels], of which only the places `visible`, i64 [n, k], are looked at.
---@param x Tensor
---@param visible Tensor
---@param condition { text: { embeddings: Tensor } }  [n, words, text]
---@return Tensor
function MAR:forward(x, visible, condition)
  arguments.expect(WHO, "x", x, "a tensor")
  arguments.expect(WHO, "visible", visible, "a tensor")
  if x.ndim ~= 3 or x.shape[2] ~= self.tokens or x.shape[3] ~= self.channels then
    arguments.fail("%s: x: expected [n, %d, %d], got %s", WHO, self.tokens, self.channels, arguments.describe(x))
  end
  local text = type(condition) == "table" and condition.text and condition.text.embeddings
  if not ty.is_tensor(text) or text.ndim ~= 3 or text.shape[1] ~= x.shape[1] then
    arguments.fail("%s: condition.text.embeddings: expected [%d, words, width], got %s", WHO, x.shape[1],
      arguments.describe(text))
  end
  local n, words, seen = x.shape[1], text.shape[2], visible.shape[2]
  local h = modulated.part(function()
    local y = self.text_proj(text)
    if seen > 0 then
      y = ty.concat({ y, rows(self.z_proj(x) + self.encoder_pos_embed_learned, visible) }, 1)
    end
    for _, block in ipairs(self.encoder_blocks) do y = block(y) end
    return self.encoder_norm(y)
  end)
  local all = self.mask_token:expand(n, self.tokens, -1)
  if seen > 0 then
    all = all:scatter(1, visible:unsqueeze(2):expand(-1, -1, self.width), h:narrow(1, words, seen))
  end
  local y = ty.concat({ h:narrow(1, 0, words), all + self.decoder_pos_embed_learned }, 1)
  for _, block in ipairs(self.decoder_blocks) do y = block(y) end
  return self.decoder_norm(y:narrow(1, words, self.tokens)) + self.decoder_pos_embed_learned
end

return MAR
