--- Next-scale prediction over the tokens of models.ScaleTokenizer, with the parameter names of the public VAR
-- checkpoints. Tian et al. 2024, "Visual Autoregressive Modeling: Scalable Image Generation via Next-Scale
-- Prediction"; with attention = "scale" or "window" MVAR, Zhang et al. 2025, "MVAR: Visual Autoregressive Modeling with
-- Scale and Spatial Markovian Conditioning": p(r_1, ..., r_L | c) = p(r_1 | c) prod p(r_l | eta_k(r_{l-1}), c), where
-- r_{l-1} comes as the sum up to it, brought to the size of the next map, and eta_k is a window of k x k places.
--
--     local model = models.VAR { scales = tokenizer.scales, codes = 128, inputs = 16, classes = 10,
--       attention = "window" }
--     local logits = model(tokenizer:inputs(ids), { labels = labels })     -- [n, tokens, codes]
local ty = require "tycho"
local arguments = require "tycho.arguments"
local modulated = require "tycho.models.modulated"

local nn, part = ty.nn, modulated.part

---@class VAR: Module
---@field scales integer[]
---@field length integer      tokens of a picture
---@field markov boolean      whether a scale sees nothing of the others but the sum it is given
---@field null_label integer  the label that means "any class"
local VAR = nn.module "VAR"

local size = "an integer >= 1"

--- options: scales (sides of the maps), codes, inputs (numbers of a token that is given), classes (10), width (64),
-- depth (4), heads (4), mlp_ratio (4), attention ("full": a token sees its scale and all coarser ones; "scale": its own
-- scale; "window": of that, the places around it), window (3: places of its side).
---@param options table
function VAR:init(options)
  local none = arguments.none
  local o = arguments.read("VAR", options, { scales = none, codes = none, inputs = none, classes = 10, width = 64,
    depth = 4, heads = 4, mlp_ratio = 4, attention = "full", window = 3 }, { scales = "a list of integers",
    codes = "an integer >= 2", inputs = size, classes = "an integer >= 0", width = size, depth = size, heads = size,
    mlp_ratio = "a finite number > 0", attention = '"full" or "scale" or "window"', window = size })
  for _, name in ipairs { "scales", "codes", "inputs" } do
    if not o[name] then arguments.fail("VAR: %s: expected what the tokenizer has, got nil", name) end
  end
  if o.width % o.heads ~= 0 then
    arguments.fail("VAR: width: expected a multiple of the %d heads, got %d", o.heads, o.width)
  end
  self.scales, self.window, self.markov = o.scales, o.attention == "window" and o.window or nil, o.attention ~= "full"
  self.first, self.length, self.null_label = {}, 0, o.classes
  for l, side in ipairs(o.scales) do self.first[l], self.length = self.length, self.length + side * side end
  local width = o.width
  local function normal(...) return nn.Parameter(ty.randn { ... } * 0.02) end
  self.class_emb, self.word_embed = nn.Embedding(o.classes + 1, width), nn.Linear(o.inputs, width)
  nn.init.normal(self.class_emb.weight, 0, 0.5)
  self.pos_start, self.pos_1LC = normal(1, o.scales[1] ^ 2 // 1 | 0, width), normal(1, self.length, width)
  self.lvl_embed = nn.Embedding(#o.scales, width)
  nn.init.normal(self.lvl_embed.weight, 0, 0.02)
  self.blocks = nn.ModuleList {}
  for _ = 1, o.depth do self.blocks:append(modulated.Block(width, o.heads, o.mlp_ratio)) end
  self.head_nm, self.head = modulated.Head(width), nn.Linear(width, o.codes)
  nn.init.normal(self.head.weight, 0, 0.02)
  nn.init.zeros(self.head.bias)
end

-- Attention within one scale: of all its places, or of windows of them.
local function within(self, q, k, v, side)
  if not self.window or self.window >= side then return ty.scaled_dot_product_attention(q, k, v) end
  local function grid(x) return x:reshape(x.shape[1], x.shape[2], side, side, -1) end
  return ty.neighbourhood_attention(grid(q), grid(k), grid(v), self.window):flatten(2, 3)
end

-- Which tokens see which, when all scales are there: bool [tokens, tokens].
local function causal_mask(self, device)
  local number = {}
  for l, side in ipairs(self.scales) do
    for _ = 1, side * side do number[#number + 1] = l end
  end
  local level = ty.tensor(number):to { device = device }
  return level:unsqueeze(1):ge(level:unsqueeze(0))
end

-- Tokens of one scale as the blocks take them. input: nil for the first.
local function embedded(self, l, input, c)
  local places = self.scales[l] ^ 2 // 1 | 0
  local x = l == 1 and c:unsqueeze(1) + self.pos_start or self.word_embed(input)
  return x + self.pos_1LC:narrow(1, self.first[l], places) + self.lvl_embed.weight:narrow(0, l - 1, 1):unsqueeze(0)
end

local function condition_of(who, self, condition)
  local labels = type(condition) == "table" and condition.labels
  if not ty.is_tensor(labels) or labels.ndim ~= 1 then
    arguments.fail("%s: condition.labels: expected i64 [n] (%d for any class), got %s", who, self.null_label,
      arguments.describe(labels))
  end
  return self.class_emb(labels)
end

--- Logits of the tokens of one scale, [n, s * s, codes].
-- input: what ScaleTokenizer:input() gives for it, [n, s * s, inputs]; nil at the first. cache: for attention = "full",
-- what the coarser scales left behind (a KVCache), to which this one is added.
---@param l integer
---@param input? Tensor
---@param condition {labels: Tensor}
---@param cache? KVCache
---@return Tensor
function VAR:scale(l, input, condition, cache)
  arguments.expect("VAR:scale", "l", l, ("an integer in [1, %d]"):format(#self.scales))
  local side = self.scales[l]
  if l > 1 and (not ty.is_tensor(input) or input.ndim ~= 3 or input.shape[2] ~= side * side) then
    arguments.fail("VAR:scale: input: expected [n, %d, inputs] at scale %d, got %s", side * side, l,
      arguments.describe(input))
  end
  if not self.markov and not cache then
    arguments.fail("VAR:scale: cache: expected a KVCache, as a scale sees the coarser ones, got nil")
  end
  local c = condition_of("VAR:scale", self, condition)
  local x = part(function() return embedded(self, l, input, c) end)
  for i, block in ipairs(self.blocks) do
    local function attend(q, k, v)
      if self.markov then return within(self, q, k, v, side) end
      k, v = cache:append(i, k, v)
      return ty.scaled_dot_product_attention(q, k, v)
    end
    if ty.is_grad_enabled() then
      x = block(x, c, attend)
    else
      local before <close> = x
      x = ty.scope(function() return block(before, c, attend) end)
    end
  end
  if cache then cache:advance(side * side) end
  return part(function() return self.head(self.head_nm(x, c)) end)
end

--- Logits of all tokens at once, [n, tokens, codes], the coarsest scale first.
---@param inputs Tensor[]  of all scales but the first, as ScaleTokenizer:inputs() gives them
---@param condition {labels: Tensor}
---@return Tensor
function VAR:forward(inputs, condition)
  arguments.expect("VAR", "inputs", inputs, "a list of tensors")
  if #inputs ~= #self.scales - 1 then
    arguments.fail("VAR: inputs: expected one for each scale but the first, %d, got %d", #self.scales - 1, #inputs)
  end
  local c, parts = condition_of("VAR", self, condition), {}
  for l in ipairs(self.scales) do parts[l] = embedded(self, l, inputs[l - 1], c) end
  local x, mask = ty.concat(parts, 1), not self.markov and causal_mask(self, c.device) or nil
  local function attend(q, k, v)
    if mask then return ty.scaled_dot_product_attention(q, k, v, mask) end
    local list = {}
    for l, side in ipairs(self.scales) do
      local function own(t) return t:narrow(2, self.first[l], side * side) end
      list[l] = within(self, own(q), own(k), own(v), side)
    end
    return ty.concat(list, 2)
  end
  for _, block in ipairs(self.blocks) do x = block(x, c, attend) end
  return self.head(self.head_nm(x, c))
end

return VAR
