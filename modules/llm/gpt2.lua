--- GPT-2, with the parameter names of the public checkpoints (wte.weight, h.0.attn.c_attn.weight, ...). Radford et al.
-- 2019, "Language Models are Unsupervised Multitask Learners".
local ty = require "tycho"

local nn = ty.nn
local parameter = require("tycho.nn.options").parameter

-- x [..., inputs] times weight [inputs, outputs] plus bias: the public checkpoints keep these weights untransposed.
local Conv1D = nn.module "Conv1D"

function Conv1D:init(inputs, outputs, std)
  self.weight = parameter({ inputs, outputs }, function(t) nn.init.normal(t, 0, std) end)
  self.bias = parameter({ outputs }, nn.init.zeros)
end

function Conv1D:forward(x) return ty.linear(x, self.weight:transpose(0, 1), self.bias) end

function Conv1D:describe()
  local shape = self.weight.shape
  return ("%d, %d"):format(shape[1], shape[2])
end

local Attention = nn.module "Attention"

function Attention:init(o)
  self.heads, self.width = o.heads, o.width
  self.c_attn = Conv1D(o.width, 3 * o.width, 0.02)
  self.c_proj = Conv1D(o.width, o.width, 0.02 / math.sqrt(2 * o.layers))
  self.dropout = nn.Dropout(o.dropout)
end

-- cache: { k, v [n, heads, room, width / heads] }, of which `past` positions are filled; this call fills its own.
function Attention:forward(x, cache, past)
  local shape = x.shape
  local n, t = shape[1], shape[2]
  local qkv = self.c_attn(x):reshape(n, t, 3, self.heads, self.width // self.heads):permute(2, 0, 3, 1, 4)
  local q, k, v = qkv:select(0, 0), qkv:select(0, 1), qkv:select(0, 2)
  if cache then
    cache.k:narrow(2, past, t):copy_(k)
    cache.v:narrow(2, past, t):copy_(v)
    k, v = cache.k:narrow(2, 0, past + t), cache.v:narrow(2, 0, past + t)
  end
  local y = ty.scaled_dot_product_attention(q, k, v, nil, t > 1)
  return self.dropout(self.c_proj(y:transpose(1, 2):reshape(n, t, self.width)))
end

local Mlp = nn.module "Mlp"

function Mlp:init(o)
  self.c_fc = Conv1D(o.width, 4 * o.width, 0.02)
  self.c_proj = Conv1D(4 * o.width, o.width, 0.02 / math.sqrt(2 * o.layers))
  self.dropout = nn.Dropout(o.dropout)
end

function Mlp:forward(x) return self.dropout(self.c_proj(ty.gelu(self.c_fc(x), "tanh"))) end

local Block = nn.module "GPT2Block"

function Block:init(o)
  self.ln_1 = nn.LayerNorm(o.width)
  self.attn = Attention(o)
  self.ln_2 = nn.LayerNorm(o.width)
  self.mlp = Mlp(o)
end

function Block:forward(x, cache, past)
  x = x + self.attn(self.ln_1(x), cache, past)
  return x + self.mlp(self.ln_2(x))
end

local function embedding(count, width, std)
  local layer = nn.Embedding(count, width)
  nn.init.normal(layer.weight, 0, std)
  return layer
end

---@class GPT2: Module
local GPT2 = nn.module "GPT2"

--- options: vocabulary (50257), context (1024), width (768), layers (12), heads (12), dropout (0). The defaults are the
-- smallest published size, 124M parameters. The head is the token embedding.
function GPT2:init(options)
  local o = nn.options("GPT2", options, { vocabulary = 50257, context = 1024, width = 768, layers = 12, heads = 12,
    dropout = 0 })
  if o.width % o.heads ~= 0 then error(("GPT2: heads %d must divide width %d"):format(o.heads, o.width), 3) end
  self.context, self.heads, self.width = o.context, o.heads, o.width
  self.wte = embedding(o.vocabulary, o.width, 0.02)
  self.wpe = embedding(o.context, o.width, 0.01)
  self.drop = nn.Dropout(o.dropout)
  self.h = nn.ModuleList {}
  for _ = 1, o.layers do self.h:append(Block(o)) end
  self.ln_f = nn.LayerNorm(o.width)
end

--- Room for the keys and values of `batch` sequences of up to `room` tokens (default: the context).
---@return table cache  for forward(); cache.past counts the tokens in it
function GPT2:cache(batch, room)
  room = room or self.context
  if room > self.context then
    error(("GPT2.cache: room for %d tokens, but the context is %d"):format(room, self.context), 2)
  end
  local weight = self.wte.weight
  local function zeros()
    return ty.keep(ty.zeros({ batch, self.heads, room, self.width // self.heads },
      { dtype = weight.dtype, device = weight.device }))
  end
  local cache = { past = 0, room = room }
  for i = 1, #self.h do cache[i] = { k = zeros(), v = zeros() } end
  return cache
end

--- Hidden states after the last norm: tokens i64 [n, t] to [n, t, width].
function GPT2:hidden(tokens, cache)
  local past, t = cache and cache.past or 0, tokens.shape[2]
  local room = cache and cache.room or self.context
  if past + t > room then error(("GPT2: %d tokens, but there is room for %d"):format(past + t, room), 3) end
  local x = self.drop(self.wte(tokens) + self.wpe.weight:narrow(0, past, t))
  for i, block in ipairs(self.h) do x = block(x, cache and cache[i], past) end
  if cache then cache.past = past + t end
  return self.ln_f(x)
end

--- tokens i64 [n, t] to logits [n, t, vocabulary]. With a cache (and without gradients) the tokens follow those of the
-- calls before.
---@param tokens Tensor
---@param cache? table  from model:cache()
---@return Tensor logits
function GPT2:forward(tokens, cache) return ty.linear(self:hidden(tokens, cache), self.wte.weight) end

--- Mean cross entropy, in nats, of the token after each one: tokens and targets i64 [n, t].
---@return Tensor loss
function GPT2:loss(tokens, targets)
  return nn.cross_entropy(self:forward(tokens):flatten(0, 1), targets:flatten())
end

--- Continues tokens i64 [n, t] by `count` more. options: temperature (1; 0 takes the most likely), top_k (0: all).
---@return Tensor tokens  [n, t + count]
function GPT2:generate(tokens, count, options)
  local o = nn.options("GPT2.generate", options, { temperature = 1, top_k = 0 })
  return ty.no_grad(function()
    local n, t = tokens.shape[1], tokens.shape[2]
    local cache = self:cache(n, t + count)
    local parts, next_input = { tokens }, tokens
    for _ = 1, count do
      next_input = ty.scope(function()
        -- Only the last position asks the head.
        local logits = ty.linear(self:hidden(next_input, cache):select(1, -1), self.wte.weight)
        if o.temperature == 0 then return logits:argmax(-1, true) end
        logits = logits:to "f32" / o.temperature
        if o.top_k > 0 then
          local best = logits:topk(math.min(o.top_k, logits.shape[2]))
          logits = logits:masked_fill(logits:lt(best:narrow(1, best.shape[2] - 1, 1)), -math.huge)
        end
        return ty.multinomial(logits:softmax(-1), 1)
      end)
      parts[#parts + 1] = next_input
    end
    return ty.concat(parts, 1)
  end)
end

return GPT2
