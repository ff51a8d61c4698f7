--- A transformer over a row of vectors of bits: it says how likely each bit is 1, of noised vectors at a time (the
-- network of tokens.bits) or, with causal attention, of the vector that follows those there are. Wang et al. 2025,
-- "Instella-T2I: Pushing the Limits of 1D Discrete Latent Space Image Generation", section 4; with codes in the place
-- of bits it speaks of one-hot tokens.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local modulated = require "tycho.models.modulated"

local nn = ty.nn
local WHO = "BitTransformer"

---@class BitTransformer: Module
---@field tokens integer
---@field width integer        bits of a token
---@field codes? integer       numbers of codes in the place of bits
---@field causal boolean
---@field null_label integer   the label that means "any class"
local BitTransformer = nn.module(WHO)

local whole = "an integer >= 1"

--- options: tokens, bits (of a token), codes (nil; a number: tokens are those of so many codes), classes (10), hidden
-- (96), depth (4), heads (4), causal (false).
---@param options table
function BitTransformer:init(options)
  local none = arguments.none
  local o = arguments.read(WHO, options, { tokens = none, bits = none, codes = none, classes = 10, hidden = 96,
    depth = 4, heads = 4, causal = false }, { tokens = whole, bits = whole, codes = "an integer >= 2",
    classes = "an integer >= 0", hidden = whole, depth = whole, heads = whole, causal = "a boolean" })
  if not o.tokens or not (o.bits or o.codes) then
    arguments.fail("%s: tokens, bits: expected what the tokenizer has, got %s and %s", WHO, tostring(o.tokens),
      tostring(o.bits))
  end
  local h = o.hidden
  self.tokens, self.width, self.codes, self.causal, self.null_label = o.tokens, o.bits, o.codes, o.causal, o.classes
  self.input = o.codes and nn.Embedding(o.codes, h) or nn.Linear(o.bits, h)
  self.start, self.places = nn.Parameter(ty.randn(1, 1, h) * 0.02), nn.Parameter(ty.randn(1, o.tokens, h) * 0.02)
  self.labels = nn.Embedding(o.classes + 1, h)
  nn.init.normal(self.labels.weight, 0, 0.5)
  if not o.causal then
    self.frequencies = nn.Sinusoidal(h)
    self.time = nn.Sequential(nn.Linear(h, h), nn.SiLU(), nn.Linear(h, h))
  end
  self.blocks = nn.ModuleList {}
  for _ = 1, o.depth do self.blocks:append(modulated.Block(h, o.heads, 4)) end
  self.head_nm, self.head = modulated.Head(h), nn.Linear(h, o.codes or o.bits)
  nn.init.normal(self.head.weight, 0, 0.02)
  nn.init.zeros(self.head.bias)
end

--- Logits that bits are 1, [n, tokens, bits] (of codes: [n, tokens, codes]). x: bits of 0 and 1 [n, tokens, bits] or
-- codes i64 [n, tokens]. t: [n] from 0 to 1000, of networks that are not causal. A causal one takes the first few
-- tokens (none: nil) and says of each place what comes there: [n, given + 1 at most, ...]. cache: as VAR's, so that x
-- is only what is new.
---@param x? Tensor
---@param t? Tensor
---@param condition {labels: Tensor}
---@param cache? KVCache
---@return Tensor
function BitTransformer:forward(x, t, condition, cache)
  local labels = type(condition) == "table" and condition.labels
  if not ty.is_tensor(labels) then
    arguments.fail("%s: condition.labels: expected i64 [n] (%d for any class), got %s", WHO, self.null_label,
      arguments.describe(labels))
  end
  local c, n = self.labels(labels), labels.shape[1]
  local h = x and self.input(self.codes and x or x * 2 - 1)
  local past = cache and cache.past or 0
  if not self.causal then
    arguments.expect(WHO, "t", t, "a tensor")
    c = c + self.time(self.frequencies(t):to(c.dtype))
  elseif past == 0 then
    local start = self.start:expand(n, 1, -1)
    h = h and ty.concat({ start, h }, 1) or start
  end
  if past + h.shape[2] > self.tokens then h = h:narrow(1, 0, self.tokens - past) end
  h = h + self.places:narrow(1, past, h.shape[2])
  for i, block in ipairs(self.blocks) do
    h = block(h, c, function(q, k, v)
      if cache then k, v = cache:append(i, k, v) end
      return ty.scaled_dot_product_attention(q, k, v, { causal = self.causal })
    end)
  end
  if cache then cache:advance(h.shape[2]) end
  return self.head(self.head_nm(h, c))
end

return BitTransformer
