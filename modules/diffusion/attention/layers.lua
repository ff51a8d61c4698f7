--- The self-attention of a network of diffusion, computed by a function of one's own and put back again. No file of a
-- network knows of it. Layers that attend to a context alone (text) stay as they are; where patches and text attend to
-- each other (SD3Transformer2DModel), the function gets the text's keys besides, and the text's own queries see all.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local nn = ty.nn
local expect, fail = arguments.expect, arguments.fail
local M = {}

-- Queries, keys and values [b, heads, t, d] of tokens [b, t, width]; for_q, for_k: what queries and keys are made of
-- instead.
local function project(layer, tokens, for_q, for_k)
  for_q, for_k = for_q or tokens, for_k or tokens
  if rawget(layer, "qkv") then
    local weight, bias = layer.qkv.weight, layer.qkv.bias
    local width = weight.shape[1] // 3
    local function one(x, i)
      local own = bias and bias:narrow(0, i * width, width)
      return nn.split_heads(ty.linear(x, weight:narrow(0, i * width, width), own), layer.heads)
    end
    if not rawequal(for_q, tokens) or not rawequal(for_k, tokens) then
      return one(for_q, 0), one(for_k, 1), one(tokens, 2)
    end
    local b, t = tokens.shape[1], tokens.shape[2]
    local all = layer.qkv(tokens):reshape(b, t, 3, layer.heads, -1):permute(2, 0, 3, 1, 4)
    return all:select(0, 0), all:select(0, 1), all:select(0, 2)
  end
  local function one(x, linear, norm)
    x = nn.split_heads(linear(x), layer.heads)
    return norm and norm(x) or x
  end
  return one(for_q, layer.to_q, rawget(layer, "norm_q")), one(for_k, layer.to_k, rawget(layer, "norm_k")),
    one(tokens, layer.to_v)
end

local function finish(layer, y)
  y = nn.join_heads(y)
  return rawget(layer, "proj") and layer.proj(y) or layer.to_out[1](y)
end

--- What a layer does with maps [b, c, h, w] or tokens [b, t, width] around attend(q, k, v), which gives [b, heads, t,
-- d]. before: what queries and keys are made of, a function of the tokens; nil: the tokens.
---@param layer Module
---@param x Tensor
---@param attend fun(q: Tensor, k: Tensor, v: Tensor): Tensor
---@param before? fun(tokens: Tensor): Tensor, Tensor
---@return Tensor
function M.run(layer, x, attend, before)
  expect("layers.run", "layer", layer, "a module")
  expect("layers.run", "x", x, "a tensor")
  expect("layers.run", "attend", attend, "a function")
  expect("layers.run", "before", before, "a function or nil")
  local function all(tokens)
    if not before then return attend(project(layer, tokens)) end
    return attend(project(layer, tokens, before(tokens)))
  end
  if x.ndim == 3 then return finish(layer, all(x)) end
  local norm = rawget(layer, "group_norm")
  local tokens = (norm and norm(x) or x):flatten(2):transpose(1, 2)
  return x + finish(layer, all(tokens)):transpose(1, 2):reshape(x.shape)
end

local function is_self_attention(module)
  if math.type(rawget(module, "heads")) ~= "integer" then return false end
  local function has(name) return nn.is_module(rawget(module, name)) end
  if has "qkv" and has "proj" then return true end
  if not (has "to_q" and has "to_k" and has "to_v" and has "to_out") then return false end
  return (nn.surgery.sizes(module.to_q)) == (nn.surgery.sizes(module.to_k))
end

--- Parts over keys that are counted apart, { y [b, h, t, d], lse [b, h, t], weight (1: of each key) }, as one softmax:
-- the result and its log-sum-exp. Every query sees something in one of them.
---@param parts { y: Tensor, lse: Tensor, weight?: number }[]
---@return Tensor y
---@return Tensor lse
function M.join(parts)
  expect("layers.join", "parts", parts, "a list of tables")
  local list = {}
  for i, part in ipairs(parts) do
    expect("layers.join", ("parts[%d].y"):format(i), part.y, "a tensor")
    list[i] = expect("layers.join", ("parts[%d].lse"):format(i), part.lse, "a tensor") + math.log(part.weight or 1)
  end
  if #list == 0 then fail "layers.join: parts: expected at least one, got none" end
  if #list == 1 then return parts[1].y, list[1] end
  local top = list[1]:detach()
  for i = 2, #list do top = top:maximum(list[i]:detach()) end
  local weights, sum, y = {}, nil, nil
  for i, lse in ipairs(list) do
    weights[i] = (lse - top):exp()
    sum = sum and sum + weights[i] or weights[i]
  end
  for i, part in ipairs(parts) do
    local more = part.y * (weights[i] / sum):unsqueeze(-1)
    y = y and y + more or more
  end
  return y, top + sum:log()
end

--- { y, lse } as join() takes it, of what ty.block_sparse_attention gives.
---@param y Tensor
---@param lse Tensor
---@return { y: Tensor, lse: Tensor }
function M.part(y, lse)
  return { y = expect("layers.part", "y", y, "a tensor"), lse = expect("layers.part", "lse", lse, "a tensor") }
end

--- Dense attention of q, k, v [b, h, t, d] with its log-sum-exp [b, h, t].
---@param q Tensor
---@param k Tensor
---@param v Tensor
---@return Tensor y
---@return Tensor lse
function M.dense(q, k, v)
  for name, x in pairs { q = q or false, k = k or false, v = v or false } do
    if not ty.is_tensor(x) or x.ndim ~= 4 then
      fail("layers.dense: %s: expected a tensor [b, h, t, d], got %s", name, arguments.describe(x))
    end
  end
  local rows = math.max(1, math.min(128, q.shape[3]))
  local all = ty.zeros({ 1, 1, (q.shape[3] + rows - 1) // rows, 1 }, { dtype = "i64", device = q.device })
  return ty.block_sparse_attention(q, k, v, all, rows, math.max(1, k.shape[3]))
end

-- Attention to the few keys of a text, which all queries see: a part for join().
local function text_part(q, k, v, mask)
  local scores = q:matmul(k:transpose(-2, -1)) * q.shape[4] ^ -0.5
  if mask then scores = scores:masked_fill(mask:logical_not(), -1e30) end
  return { y = scores:softmax(-1):matmul(v), lse = scores:logsumexp(-1) }
end

-- A layer in which patches and text attend to each other: what both become.
local function run_joint(site, layer, x, text, mask)
  local q, k, v = project(layer, x)
  local function one(linear, norm)
    local y = nn.split_heads(linear(text), layer.heads)
    return norm and norm(y) or y
  end
  local tk, tv = one(layer.add_k_proj, rawget(layer, "norm_added_k")), one(layer.add_v_proj)
  local part = text_part(q, tk, tv, mask and mask:narrow(-1, k.shape[3], tk.shape[3]))
  local y = finish(layer, site.compute(site, q, k, v, part))
  if not rawget(layer, "to_add_out") then return y end
  local tq = one(layer.add_q_proj, rawget(layer, "norm_added_q"))
  local text_y = nn.attention(tq, ty.concat({ k, tk }, 2), ty.concat({ v, tv }, 2), { mask = mask })
  return y, layer.to_add_out(text_y)
end

--- The layers of self-attention in a network: { name, module } each, in order. They have queries, keys and values of
-- one input: `qkv` and `proj` (DiT) or `to_q`, `to_k`, `to_v`, `to_out` (diffusers), and `heads`.
---@param who string  in front of errors
---@param model Module
---@return { name: string, module: Module }[]
function M.find(who, model)
  expect("layers.find", "who", who, "a string")
  expect(who, "model", model, "a module")
  local names, modules = nn.surgery.modules(model)
  local list = {}
  for _, name in ipairs(names) do
    local module = modules[name]
    -- The second attention of diffusers' blocks is that to the text.
    if not name:find "attn2$" and is_self_attention(module) then list[#list + 1] = { name = name, module = module } end
  end
  if #list == 0 then
    fail("%s: model: expected a network with self-attention, got %s", who, arguments.describe(model))
  end
  return list
end

local wrapper = nn.surgery.wrapper { name = "Replaced", field = "_attention_by", forward = function(base)
  return function(self, x, context, ...)
    local site = self._attention_by
    if context ~= nil and rawget(self, "add_k_proj") then return run_joint(site, self, x, context, ...) end
    if context ~= nil and not rawequal(context, x) then return base.forward(self, x, context, ...) end
    return M.run(self, x, function(q, k, v) return site.compute(site, q, k, v) end)
  end
end }

--- A network whose self-attention is computed by a function.
---@class ReplacedAttention
---@field sites { name: string, module: Module, index: integer }[]
local Replaced = {}
Replaced.__index = Replaced
Replaced.__name = "ReplacedAttention"

--- The network as it was.
function Replaced:remove()
  for _, site in ipairs(self.sites) do wrapper:unwrap(site.module) end
  self.sites = {}
end

--- Has compute(site, q, k, v, text) in the place of softmax(q k') v in every layer of self-attention: q, k, v [b,
-- heads, t, d] to [b, heads, t, d]; site: name, module and index (from 1) of the layer; text: nil, or { y, lse }, what
-- the queries get of a text that they see besides, to be joined by layers.join.
---@param model Module
---@param compute fun(site: table, q: Tensor, k: Tensor, v: Tensor, text?: table): Tensor
---@return ReplacedAttention
function M.replace(model, compute)
  local who = "attention.replace"
  expect(who, "model", model, "a module")
  expect(who, "compute", compute, "a function")
  local sites = M.find(who, model)
  for i, site in ipairs(sites) do
    if wrapper:state(site.module) then
      fail("%s: model: expected one whose attention is its own, got one where it was replaced: remove() that first",
        who)
    end
    site.index, site.compute = i, compute
  end
  for _, site in ipairs(sites) do wrapper:wrap(site.module, site) end
  return setmetatable({ sites = sites }, Replaced)
end

return M
