--- A tokenizer of pictures without a grid: a few vectors of bits. Wang et al. 2025, "Instella-T2I: Pushing the Limits
-- of 1D Discrete Latent Space Image Generation", section 3: patches and learnt latent tokens attend to each other,
-- patches are merged 2 x 2 between the stages and dropped at the end; the decoder does the reverse from mask tokens.
--
--     local tokenizer = models.BitTokenizer { tokens = 32, bits = 8 }
--     local bits = tokenizer:encode(pictures)       -- [n, 32, 8] of 0 and 1
--     local pictures = tokenizer:decode(bits)
--
-- kind = "codes" has one of 2^bits learnt codes in the place of a vector of bits (van den Oord et al. 2017), "plain"
-- numbers from -1 to 1 that nothing quantizes, grid = true the merged patches themselves in the place of latent tokens:
-- what it is compared with.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local Codebook = require "tycho.models.codebook"

local nn = ty.nn
local WHO = "BitTokenizer"

---@class BitTokenizer: Module
---@field tokens integer
---@field width integer        bits of a token
---@field bits integer         of a picture
---@field temperature number   of the draw of bits in training; 0: the likelier
local BitTokenizer = nn.module(WHO)

local whole = "an integer >= 1"

local function stage(depth, width, heads)
  local list = nn.ModuleList {}
  for _ = 1, depth do
    list:append(nn.TransformerEncoderLayer(width, heads, { feedforward = 4 * width, dropout = 0, activation = "gelu",
      norm_first = true }))
  end
  return list
end

local function through(list, x)
  for _, layer in ipairs(list) do x = layer(x) end
  return x
end

--- options: size (32: side of pictures), channels (3), patch (4), tokens (32), bits (8: of a token), hidden (64),
-- heads (4), depth (2: layers of each of the two stages of encoder and decoder), kind ("bits", "codes", "plain"), grid
-- (false), entropy (0.01: weight of the term by which bits become sure and are used), commitment (0.25: of codes).
---@param options? table
function BitTokenizer:init(options)
  local o = arguments.read(WHO, options, { size = 32, channels = 3, patch = 4, tokens = 32, bits = 8, hidden = 64,
    heads = 4, depth = 2, kind = "bits", grid = false, entropy = 0.01, commitment = 0.25 }, { size = whole,
    channels = whole, patch = whole, tokens = whole, bits = "an integer in [1, 62]", hidden = whole, heads = whole,
    depth = whole, kind = '"bits" or "codes" or "plain"', grid = "a boolean", entropy = "a finite number >= 0",
    commitment = "a finite number >= 0" })
  if o.size % (2 * o.patch) ~= 0 then
    arguments.fail("%s: size: expected a multiple of 2 * patch, %d, got %d", WHO, 2 * o.patch, o.size)
  end
  local side, h = o.size // o.patch, o.hidden
  local merged = side * side // 4
  self.o, self.side, self.tokens, self.width, self.temperature = o, side, o.grid and merged or o.tokens, o.bits, 1
  self.bits = self.tokens * o.bits
  local function normal(n) return nn.Parameter(ty.randn(1, n, h) * 0.5) end
  local places = nn.sinusoidal_2d(h, side):unsqueeze(0)
  self.embed = nn.PatchEmbed(o.channels, h, o.patch)
  self.patches, self.raised = nn.Parameter(places:clone()), nn.Parameter(places:clone())
  self.mask = nn.Parameter(nn.sinusoidal_2d(h, side // 2):unsqueeze(0))
  if not o.grid then self.latents, self.numbered = normal(o.tokens), normal(o.tokens) end
  self.fine, self.coarse = stage(o.depth, h, o.heads), stage(o.depth, h, o.heads)
  self.down, self.up = nn.Linear(4 * h, h), nn.Linear(h, 4 * h)
  self.norm, self.last = nn.LayerNorm(h), nn.LayerNorm(h)
  self.reducer = nn.Linear(h, o.bits)
  if o.kind == "codes" then self.codebook = Codebook(1 << o.bits, o.bits) end
  self.expander = nn.Linear(o.bits, h)
  self.back_coarse, self.back_fine = stage(o.depth, h, o.heads), stage(o.depth, h, o.heads)
  self.pixels = nn.Linear(h, o.patch * o.patch * o.channels)
end

-- Patches [n, side * side, h] merged 2 x 2, and the way back.
local function merge(self, x)
  local n, s, h = x.shape[1], self.side, x.shape[3]
  return self.down(x:reshape(n, s // 2, 2, s // 2, 2, h):permute(0, 1, 3, 2, 4, 5):reshape(n, s * s // 4, 4 * h))
end
local function split(self, x)
  local n, s, h = x.shape[1], self.side, x.shape[3]
  return self.up(x):reshape(n, s // 2, s // 2, 2, 2, h):permute(0, 1, 3, 2, 4, 5):reshape(n, s * s, h)
end

--- What the tokens of pictures are made of, [n, tokens, bits]: logits of bits, or what codes are near to.
---@param pictures Tensor  [n, channels, size, size]
---@return Tensor
function BitTokenizer:logits(pictures)
  local o = self.o
  arguments.expect(WHO, "pictures", pictures, "a tensor")
  if pictures.ndim ~= 4 or table.concat(pictures.shape, ",", 2) ~= ("%d,%d,%d"):format(o.channels, o.size, o.size) then
    arguments.fail("%s: pictures: expected [n, %d, %d, %d], got %s", WHO, o.channels, o.size, o.size,
      arguments.describe(pictures))
  end
  local n, x = pictures.shape[1], self.embed(pictures) + self.patches
  local k = o.grid and 0 or o.tokens
  if k > 0 then x = ty.concat({ self.latents:expand(n, -1, -1), x }, 1) end
  x = through(self.fine, x)
  local merged = merge(self, x:narrow(1, k, self.side * self.side))
  x = through(self.coarse, k > 0 and ty.concat({ x:narrow(1, 0, k), merged }, 1) or merged)
  return self.reducer(self.norm(k > 0 and x:narrow(1, 0, k) or x))
end

-- Pictures of what stands for tokens, [n, tokens, bits], -1 and 1 or a code.
local function pictures_of(self, values)
  local o, n = self.o, values.shape[1]
  local x, k = self.expander(values), o.grid and 0 or o.tokens
  if k > 0 then
    x = ty.concat({ x + self.numbered, self.mask:expand(n, -1, -1) }, 1)
  else
    x = x + self.mask
  end
  x = through(self.back_coarse, x)
  local raised = split(self, x:narrow(1, k, self.side * self.side // 4)) + self.raised
  x = through(self.back_fine, k > 0 and ty.concat({ x:narrow(1, 0, k), raised }, 1) or raised)
  return nn.unpatchify(self.pixels(self.last(x:narrow(1, k, self.side * self.side))), o.patch, self.side)
end

--- Bits of logits, 0 or 1, with the gradient of their probabilities: b + p - stop(p), where p = sigmoid(logits /
-- temperature) and b is drawn from Bernoulli(p) (Bengio et al. 2013); at temperature 0, without gradient, the likelier.
---@param logits Tensor
---@param temperature number
---@return Tensor
function BitTokenizer.draw(logits, temperature)
  arguments.expect(WHO .. ".draw", "logits", logits, "a tensor")
  arguments.expect(WHO .. ".draw", "temperature", temperature, "a finite number >= 0")
  if temperature == 0 then return logits:gt(0):to(logits.dtype) end
  local p = (logits / temperature):sigmoid()
  return p + (p:detach():bernoulli() - p):detach()
end

--- Tokens of pictures from -1 to 1: bits [n, tokens, bits], 0 and 1, or numbers of codes i64 [n, tokens].
---@param pictures Tensor
---@return Tensor
function BitTokenizer:encode(pictures)
  return ty.no_grad(function()
    local logits = self:logits(pictures)
    if self.o.kind == "plain" then return (logits:tanh() + 1) / 2 end
    return self.codebook and self.codebook:nearest(logits) or self.draw(logits, 0)
  end)
end

--- Pictures of tokens.
---@param tokens Tensor
---@return Tensor
function BitTokenizer:decode(tokens)
  arguments.expect(WHO .. ":decode", "tokens", tokens, "a tensor")
  local shape = tokens.shape
  if shape[2] ~= self.tokens or not self.codebook and shape[3] ~= self.width then
    arguments.fail("%s:decode: tokens: expected [n, %d%s], got %s", WHO, self.tokens,
      self.codebook and "" or ", " .. self.width, arguments.describe(tokens))
  end
  return pictures_of(self, self.codebook and self.codebook:embed(tokens) or tokens * 2 - 1)
end

-- -p log p - (1 - p) log(1 - p)
local function entropy(p)
  p = p:clamp(1e-6, 1 - 1e-6)
  return -(p * p:log() + (1 - p) * (1 - p):log())
end

--- Pictures as they come back, with gradients (straight-through), and in training what is to be added to the loss.
---@param pictures Tensor
---@return Tensor pictures
---@return Tensor? extra
function BitTokenizer:forward(pictures)
  local logits = self:logits(pictures)
  if self.o.kind == "plain" then return pictures_of(self, logits:tanh()) end
  if self.codebook then
    local ids = self.codebook:nearest(logits)
    local code, extra = self.codebook:embed(ids), nil
    if self.training then
      extra = nn.mse_loss(logits, code) * self.o.commitment
      self.codebook:follow(logits:reshape(-1, self.width), ids:flatten())
    end
    return pictures_of(self, logits + (code - logits):detach()), extra
  end
  local back = pictures_of(self, self.draw(logits, self.training and self.temperature or 0) * 2 - 1)
  if not self.training then return back end
  -- Each bit sure of itself, and used: low entropy of each, high entropy of their mean over pictures.
  local p = logits:sigmoid()
  return back, (entropy(p):mean() - entropy(p:mean(0)):mean()) * self.o.entropy
end

return BitTokenizer
