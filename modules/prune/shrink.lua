--- Layers that are really smaller: fewer rows and columns in place of zeros, in decoders of Llama's shape. The sizes
-- may differ from layer to layer, and queries and keys may be narrower than values. The model stays the object that it
-- was; it runs, generates and is trained as before, and is saved as a folder whose config.json says the sizes.
--
--     local part = shrink.parts("prune.mine", model)[1]
--     shrink.mlp(part, { gate = gate, up = up, down = down })
--     model:save "small"
--     local again = shrink.load "small"
local ty = require "tycho"
local families = require "tycho.models.families"
local hub = require "tycho.hub"
local layers = require "tycho.models.layers"
local sparse = require "tycho.prune.sparse"

local nn = ty.nn
local surgery = nn.surgery
local arguments = require "tycho.arguments"
local M = {}

-- ---- wrappers ----

-- cos or sin [.., t, width / 2] of all pairs for those of each head: [.., heads, t, pairs].
local function of_heads(turns, pairs)
  local shape, picked = turns.shape, turns:index_select(-1, pairs:flatten())
  if #shape == 2 then return picked:reshape(shape[1], pairs.shape[1], -1):transpose(0, 1) end
  return picked:reshape(shape[1], shape[3], pairs.shape[1], -1):transpose(1, 2)
end

-- Attention whose queries and keys have lost rotary pairs, in each head others.
local attention = surgery.wrapper { name = "Shrunk", field = "_shrunk", fields = { "rotary_pairs" },
  forward = function()
    return function(self, x, at)
      local queries, groups, pairs = layers.query_count(at), self.heads // self.kv_heads, self.rotary_pairs
      local q, k, v = self.q_proj(layers.tail(x, 1, queries)), self.k_proj(x), self.v_proj(x)
      q, k, v = nn.split_heads(q, self.heads), nn.split_heads(k, self.kv_heads), nn.split_heads(v, self.kv_heads)
      local cos, sin = of_heads(at.cos, pairs), of_heads(at.sin, pairs)
      k = ty.rotary(k, cos, sin, false)
      if groups > 1 then cos, sin = cos:repeat_interleave(groups, -3), sin:repeat_interleave(groups, -3) end
      q = ty.rotary(q, layers.tail(cos, -2, queries), layers.tail(sin, -2, queries), false)
      local y = layers.attend(q, k, v, at, self.scale, self.window, self.dropout, self.training, self.softcap)
      return self.o_proj(layers.tail(y, 1, at.last))
    end
  end }

-- A linear layer as two: the inputs go through `basis` [rank, inputs] first, and `weight` is [outputs, rank].
local factored = surgery.wrapper { name = "Factored", field = "_factored", fields = { "basis" },
  forward = function(base)
    return function(self, x, residual, activation)
      return base.forward(self, ty.linear(x, self.basis), residual, activation)
    end
  end,
  describe = function(state) return "rank = " .. state.rank end }

-- ---- what can shrink ----

local function check_attention(who, name, a)
  local why
  if a.qkv_proj then why = "one layer for queries, keys and values"
  elseif a.q_norm then why = "norms of queries and keys"
  elseif a.local_positions then why = "positions of its own"
  elseif not (a.q_proj and a.k_proj and a.v_proj and a.o_proj and a.heads) then why = "no projections of Llama" end
  if why then arguments.fail("%s: %s: expected attention of Llama's shape, got %s", who, name, why) end
end

--- The layers of a decoder of Llama's shape (Llama, Mistral, Qwen2): a list of { name, block, attention, mlp, model,
-- index }. Raises for other models.
---@param who string
---@param model LanguageModel
---@return { name: string, block: Module, attention: Module, mlp: Module }[]
function M.parts(who, model)
  arguments.expect(who, "model", model, "a module")
  local list, body = {}, rawget(model, "model")
  if not body or not rawget(body, "layers") or not rawget(model, "config") then
    arguments.fail("%s: model: expected a decoder of Llama's shape, got %s", who, arguments.describe(model))
  end
  if model.interleaved then
    arguments.fail("%s: model: expected queries in halves, got the pairs of a GGUF file", who)
  end
  for i, block in ipairs(body.layers) do
    local name, mlp = ("model.layers.%d"):format(i - 1), rawget(block, "mlp")
    if not mlp or not (mlp.gate_proj and mlp.up_proj and mlp.down_proj) or not rawget(block, "self_attn") then
      arguments.fail("%s: %s: expected self_attn and mlp of Llama's shape, got %s", who, name,
        arguments.describe(block))
    end
    check_attention(who, name, block.self_attn)
    list[i] = { name = name, block = block, attention = block.self_attn, mlp = mlp, model = model, index = i }
  end
  return list
end

--- The sizes of a layer: qk and v, widths of a head, and inner, of the feed-forward network.
---@return { qk: integer, v: integer, inner: integer }
function M.sizes(part)
  local a = part.attention
  local _, qk = surgery.sizes(a.q_proj)
  local _, v = surgery.sizes(a.v_proj)
  local _, inner = surgery.sizes(part.mlp.up_proj)
  return { qk = qk // a.heads, v = v // a.kv_heads, inner = inner }
end

--- Parameters of linear layers in the blocks; those of norms and embeddings stay as they are and do not count.
---@param parts table[]
---@return integer
function M.count(parts)
  local sum = 0
  for _, part in ipairs(parts) do
    for _, layer in ipairs(surgery.find("prune.shrink", part.block)) do
      sum = sum + layer.module.weight:numel()
      if layer.module.basis then sum = sum + layer.module.basis:numel() end
    end
  end
  return sum
end

--- Sizes of all layers, of which each keeps its share of every width (queries and keys by whole pairs). The widths of
-- feed-forward networks are then set so that all together have at most `budget` parameters, and less than one unit
-- less.
---@param parts table[]
---@param shares number[]   of each layer, in (0, 1]
---@param budget number     parameters, as count() has them
---@return { qk: integer, v: integer, inner: integer }[] sizes
function M.plan(parts, shares, budget)
  local list, total, order = {}, 0, {}
  local function rounded(x, most) return math.max(1, math.min(most, math.floor(x + 0.5))) end
  local function unit(i) return 3 * parts[i].model.config.hidden_size end
  for i, part in ipairs(parts) do
    local a, full, hidden = part.attention, M.sizes(part), part.model.config.hidden_size
    local size = { qk = 2 * rounded(shares[i] * full.qk / 2, full.qk // 2), v = rounded(shares[i] * full.v, full.v),
      inner = rounded(shares[i] * full.inner, full.inner), most = full.inner }
    total = total + hidden * (a.heads + a.kv_heads) * (size.qk + size.v) + unit(i) * size.inner
    list[i], order[i] = size, i
  end
  -- The layers that keep most give first, and those that keep least get first.
  table.sort(order, function(x, y)
    if shares[x] ~= shares[y] then return shares[x] > shares[y] end
    return x < y
  end)
  local moved = true
  while moved and total > budget do
    moved = false
    for _, i in ipairs(order) do
      if total > budget and list[i].inner > 1 then
        list[i].inner, total, moved = list[i].inner - 1, total - unit(i), true
      end
    end
  end
  moved = true
  while moved do
    moved = false
    for k = #order, 1, -1 do
      local i = order[k]
      if total + unit(i) <= budget and list[i].inner < list[i].most then
        list[i].inner, total, moved = list[i].inner + 1, total + unit(i), true
      end
    end
  end
  for _, size in ipairs(list) do size.most = nil end
  return list
end

-- ---- shrinking ----

-- Another weight [outputs, inputs] for a linear layer, in its dtype and on its device, and another bias.
local function put(layer, weight, bias)
  local old = layer.weight
  local function like(t)
    t = ty.no_grad(function() return t:detach():to { dtype = old.dtype, device = old.device }:contiguous():clone() end)
    return old.requires_grad and t:requires_grad_() or t
  end
  surgery.exchange(layer, "weight", like(weight))
  if bias then surgery.exchange(layer, "bias", like(bias)) end
  rawset(layer, "in_features", weight.shape[2])
  rawset(layer, "out_features", weight.shape[1])
end

-- Writes into the config what load() needs.
local function note(part)
  local config = part.model.config
  config.shrunk = config.shrunk or {}
  config.shrunk.layers = {}
  for i, each in ipairs(M.parts("prune.shrink", part.model)) do
    local size = M.sizes(each)
    if not attention:state(each.attention) then size.qk = nil end
    config.shrunk.layers[i] = size
  end
end

--- Gives a layer's attention other projections: q [heads * d, hidden], k [kv_heads * d, hidden], pairs i64 [kv_heads,
-- d / 2] (which rotary pairs of the full head those of q and k are; q and k have the first elements of all pairs of a
-- head, then the second ones), v [kv_heads * dv, hidden], o [hidden, heads * dv]. What is left out stays.
---@param part table  of parts()
---@param new { q?: Tensor, k?: Tensor, pairs?: Tensor, v?: Tensor, o?: Tensor, q_bias?: Tensor, k_bias?: Tensor,
---  v_bias?: Tensor }
function M.attention(part, new)
  local a = part.attention
  if new.q then
    if not attention:state(a) then
      if a.scale == 0 then rawset(a, "scale", 1 / math.sqrt(M.sizes(part).qk)) end
      a:buffer("rotary_pairs", new.pairs:to { device = a.q_proj.weight.device })
      attention:wrap(a, {})
    else
      surgery.exchange(a, "rotary_pairs", new.pairs:to { device = a.q_proj.weight.device })
    end
    put(a.q_proj, new.q, new.q_bias)
    put(a.k_proj, new.k, new.k_bias)
  end
  if new.v then
    put(a.v_proj, new.v, new.v_bias)
    put(a.o_proj, new.o)
  end
  note(part)
  ty.core.program.renew()
end

--- Gives a layer's feed-forward network other projections: gate and up [inner, hidden], down [hidden, inner].
---@param part table
---@param new { gate: Tensor, up: Tensor, down: Tensor, gate_bias?: Tensor, up_bias?: Tensor }
function M.mlp(part, new)
  put(part.mlp.gate_proj, new.gate, new.gate_bias)
  put(part.mlp.up_proj, new.up, new.up_bias)
  put(part.mlp.down_proj, new.down)
  note(part)
  ty.core.program.renew()
end

--- Which rows of all rotary pairs those are that are kept, of `heads` heads that share `kv_heads`: i64.
---@param pairs Tensor    i64 [kv_heads, kept]
---@param width integer   of a full head
---@param heads integer
---@return Tensor rows    i64 [heads * 2 * kept]
function M.rotary_rows(pairs, width, heads)
  local all = ty.concat({ pairs, pairs + width // 2 }, 1):repeat_interleave(heads // pairs.shape[1], 0)
  local first = ty.arange(heads, { device = pairs.device }):unsqueeze(1) * width
  return (all + first):flatten()
end

--- Makes a linear layer two: weight is left [outputs, rank], basis right [rank, inputs].
---@param model LanguageModel
---@param name string    of the layer, for config.json
---@param layer Module
---@param left Tensor
---@param right Tensor
function M.factor(model, name, layer, left, right)
  local old = layer.weight
  right = right:detach():to { dtype = old.dtype, device = old.device }:contiguous():clone()
  if factored:state(layer) then factored:unwrap(layer) end
  layer:parameter("basis", old.requires_grad and right:requires_grad_() or right)
  local inputs = right.shape[2]
  put(layer, left)
  rawset(layer, "in_features", inputs)
  factored:wrap(layer, { rank = right.shape[1] })
  local config = model.config
  config.shrunk = config.shrunk or {}
  config.shrunk.ranks = config.shrunk.ranks or {}
  config.shrunk.ranks[name] = right.shape[1]
  ty.core.program.renew()
end

-- ---- files ----

local function whole(value, least, most)
  return math.tointeger(value) and value >= least and value <= most
end

-- Raises unless a config's sizes are some that its layers can have. The file is hostile.
local function check_sizes(path, config, shrunk)
  local function refuse(text, ...) error(("prune.load: %s: " .. text):format(path, ...), 0) end
  if type(shrunk) ~= "table" then refuse("shrunk: expected an object, got %s", type(shrunk)) end
  local list, ranks = shrunk.layers, shrunk.ranks
  if list ~= nil and (type(list) ~= "table" or #list ~= config.num_hidden_layers) then
    refuse("shrunk.layers: expected sizes of %d layers", config.num_hidden_layers)
  end
  for i, size in ipairs(list or {}) do
    local qk = type(size) == "table" and size.qk
    if type(size) ~= "table" or qk ~= nil and (not whole(qk, 2, config.head_dim) or qk % 2 ~= 0)
      or not whole(size.v, 1, config.head_dim) or not whole(size.inner, 1, 2 ^ 31) then
      refuse("shrunk.layers: layer %d: expected qk and v up to %d and inner, integers", i - 1, config.head_dim)
    end
  end
  if ranks ~= nil and type(ranks) ~= "table" then refuse("shrunk.ranks: expected an object") end
end

-- Gives a model without data the sizes of a config.
local function resize(path, model, shrunk)
  local function empty(...) return ty.empty({ ... }, { device = "meta", dtype = model.model.norm.weight.dtype }) end
  for i, part in ipairs(M.parts("prune.load", model)) do
    local size, a, hidden = shrunk.layers and shrunk.layers[i], part.attention, model.config.hidden_size
    if size then
      local function bias(layer, n) return layer.bias and empty(n) or nil end
      local v, new = a.kv_heads * size.v, {}
      if size.qk then
        local q, k = a.heads * size.qk, a.kv_heads * size.qk
        new = { q = empty(q, hidden), k = empty(k, hidden), q_bias = bias(a.q_proj, q), k_bias = bias(a.k_proj, k),
          pairs = ty.empty({ a.kv_heads, size.qk // 2 }, { dtype = "i64", device = "meta" }) }
      end
      new.v, new.v_bias, new.o = empty(v, hidden), bias(a.v_proj, v), empty(hidden, a.heads * size.v)
      M.attention(part, new)
      M.mlp(part, { gate = empty(size.inner, hidden), up = empty(size.inner, hidden), down = empty(hidden, size.inner),
        gate_bias = bias(part.mlp.gate_proj, size.inner), up_bias = bias(part.mlp.up_proj, size.inner) })
    end
  end
  local _, modules = surgery.modules(model)
  local ranks = {}
  for name, rank in pairs(shrunk.ranks or {}) do ranks[name] = rank end
  for name, rank in pairs(ranks) do
    local layer = modules[name]
    local inputs, outputs
    if layer and surgery.kind(layer) == "linear" then inputs, outputs = surgery.sizes(layer) end
    if not inputs or not whole(rank, 1, math.min(inputs, outputs)) then
      error(("prune.load: %s: shrunk.ranks: '%s': expected a linear layer and a rank of it, got %s"):format(path,
        tostring(name), tostring(rank)), 0)
    end
    M.factor(model, name, layer, empty(outputs, rank), empty(rank, inputs))
  end
end

local function load(path, options)
  local who = "prune.load"
  arguments.expect(who, "path", path, "a string")
  local o = arguments.read(who, options, { dtype = arguments.none, device = "cpu" }, { dtype = "a string" })
  if not ty.io.stat(path .. "/config.json") then arguments.fail("%s: %s has no config.json", who, path) end
  local config = ty.io.load_json(path .. "/config.json")
  if type(config) ~= "table" then arguments.fail("%s: %s: config.json is no object", who, path) end
  local class = families.find(config)
  if not class then
    arguments.fail("%s: %s: model_type '%s' is not known", who, path, tostring(config.model_type))
  end
  local state = hub.weights(path)
  local model = nn.with_defaults({ device = "meta" }, function() return class:from_config(config, state) end)
  if config.shrunk ~= nil then
    check_sizes(path, model.config, config.shrunk)
    resize(path, model, config.shrunk)
  end
  local tensors, packed = sparse.unpacked(state, model:state_dict())
  if packed == 0 and config.shrunk == nil then
    arguments.fail("%s: %s: no layer of it is packed or shrunk: hub.load reads it", who, path)
  end
  model.report = hub.assign(model, tensors, { dtype = o.dtype, device = o.device })
  for i, part in ipairs(M.parts(who, model)) do
    local pairs_of = rawget(part.attention, "rotary_pairs")
    if pairs_of and pairs_of:numel() > 0 then
      local low, high = pairs_of:min():item(), pairs_of:max():item()
      if low < 0 or high >= model.config.head_dim // 2 then
        arguments.fail("%s: %s: rotary_pairs of layer %d: expected numbers of [0, %d), got %d to %d", who, path, i - 1,
          model.config.head_dim // 2, low, high)
      end
    end
  end
  return model:eval()
end

--- A model that was shrunk (or whose layers were made two) and saved by model:save() or prune.save(). options: dtype
-- (default: the file's), device. The model comes in evaluation mode.
---@param path string
---@param options? { dtype?: string, device?: string }
---@return LanguageModel
function M.load(path, options) return nn.for_caller(load, path, options) end

return M
