--- Prompt tuning and prefix tuning: trained vectors in front of the text, the model as it is.
--
--     peft.prompt(model, { tokens = 20 })            -- embeddings that stand before those of the text
--     peft.prefix(model, { tokens = 20 })            -- keys and values of each layer that all tokens see
--     local opt = optim.AdamW(peft.parameters(model), { lr = 0.3 })
--
-- Lester et al. 2021, "The Power of Scale for Parameter-Efficient Prompt Tuning"; Li and Liang 2021, "Prefix-Tuning:
-- Optimizing Continuous Prompts for Generation", whose network that makes the prefix while it is trained is the option
-- `projection`. Files are PEFT's. Positions of the text are counted behind the virtual tokens, and what the model
-- returns is of the text's tokens alone.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local adapter = require "tycho.peft.adapter"
local Cache = require "tycho.models.cache"

local nn = ty.nn
local parameter = require("tycho.nn.options").parameter
local fail, none = arguments.fail, arguments.none
local M = {}

local types = { prompt = "PROMPT_TUNING", prefix = "PREFIX_TUNING" }

-- ---- the model with virtual tokens ----

-- The keys and values [2 layers, 1, heads, n, width] of a prefix: of each layer its keys, then its values.
local function keys_and_values(self)
  local p = self._prompt
  local flat = self.prompt_embeddings
  if self.prompt_transform then flat = self.prompt_transform(flat) end
  return flat:reshape(1, p.tokens, 2 * p.layers, p.heads, p.width):permute(2, 0, 3, 1, 4)
end

-- In the place of a cache: what every layer sees before the text. Gradients flow into it.
local Seen = setmetatable({}, { __index = Cache })
Seen.__index = Seen

function Seen:append(layer, k, v)
  local shape = k.shape
  local function with(i, x)
    local before = self.values:select(0, i):to(x.dtype):expand(shape[1], shape[2], self.prefix, shape[4])
    return ty.concat({ before, x }, 2)
  end
  return with(2 * layer - 2, k), with(2 * layer - 1, v)
end

local function seen(self)
  local p = self._prompt
  local cache = setmetatable({ past = p.tokens, prefix = p.tokens, layers = p.layers, values = keys_and_values(self) },
    Seen)
  for i = 1, p.layers do cache[i] = { skipped = 0 } end
  return cache
end

-- Puts the prefix into a cache with nothing in it.
local function begin_cache(self, cache, tokens)
  local p, b = self._prompt, tokens.shape[1]
  local values = keys_and_values(self)
  if type(cache.append) ~= "function" then
    fail("%s: cache: expected one that layers append to, got another kind", types[p.kind])
  end
  cache:see(ty.zeros({ b, p.tokens }, { dtype = "i64", device = tokens.device }))
  local dtype = self:parameters()[1].dtype
  for i = 1, p.layers do
    local function part(at) return values:select(0, at):to(dtype):expand(b, p.heads, p.tokens, p.width):contiguous() end
    cache:append(i, part(2 * i - 2), part(2 * i - 1))
  end
  cache:advance(p.tokens)
end

-- The model's own hidden() with embeddings of virtual tokens in front, of which nothing is returned.
local function hidden_with_prompt(self, plain, tokens, o)
  local p, shape = self._prompt, tokens.shape
  local b, n = shape[1], p.tokens
  local before = ty.zeros({ b, n }, { dtype = tokens.dtype, device = tokens.device })
  if o.mask then
    o.mask = ty.concat({ ty.ones({ b, n }, { dtype = o.mask.dtype, device = tokens.device }), o.mask }, 1)
  end
  o.last = math.min(o.last or shape[2], shape[2])
  local remove = self:get(p.embedding):register_forward_hook(function(_, outputs)
    local own = outputs[1]
    return ty.concat({ self.prompt_embeddings:to(own.dtype):unsqueeze(0):expand(b, n, p.width),
      own:narrow(1, n, shape[2]) }, 1)
  end)
  local ok, result = pcall(plain, self, ty.concat({ before, tokens }, 1), o)
  remove()
  if not ok then error(result, 0) end
  return result
end

-- hidden() of a model with virtual tokens; the class has the plain one.
local function hidden(self, tokens, options)
  local plain, p, o = getmetatable(self).hidden, self._prompt, {}
  for key, value in pairs(options or {}) do o[key] = value end
  local cache = o.cache
  if p.off or cache and cache.past > 0 then return plain(self, tokens, options) end
  local who = "peft." .. p.kind
  for _, key in ipairs { "cu_seqlens", "places", "embeddings" } do
    if o[key] then fail("%s: %s: expected no such option with virtual tokens, got %s", who, key,
      arguments.describe(o[key])) end
  end
  if o.mask and o.mask.ndim ~= 2 then
    fail("%s: mask: expected [n, t] with virtual tokens, got %s", who, arguments.describe(o.mask))
  end
  if p.kind == "prompt" then return hidden_with_prompt(self, plain, tokens, o) end
  if cache then begin_cache(self, cache, tokens) else o.cache = seen(self) end
  return plain(self, tokens, o)
end

-- ---- giving it to a model ----

-- What files say of a model's sizes; raises for models that are no decoders with a cache.
local function sizes(who, model)
  arguments.expect(who, "model", model, "a module")
  if type(model.hidden) ~= "function" or type(model.cache) ~= "function" or type(model.config) ~= "table" then
    fail("%s: model: expected a language model that decodes with a cache, got a module %s", who,
      tostring(getmetatable(model).__name))
  end
  local c = model.config
  local heads = c.num_attention_heads or c.n_head
  local width = c.hidden_size or c.n_embd
  local layers, found = model:cache().layers, nn.surgery.find(who, model, { kinds = { "embedding" } })
  if not (heads and width and layers) or #found == 0 then
    fail("%s: model: expected a config with heads and widths, got another of %s", who,
      tostring(getmetatable(model).__name))
  end
  return { layers = layers, heads = c.num_key_value_heads or heads, hidden = width, all_heads = heads,
    width = c.head_dim or width // heads, embedding = found[1].name }
end

-- Freezes the model and puts the vectors [n, columns] in front of it.
local function attach(who, model, kind, size, tokens, make, dtype, transform)
  local record = adapter.begin(who, model, { kind = types[kind] })
  local p = { kind = kind, tokens = tokens, layers = size.layers, heads = size.heads, embedding = size.embedding,
    width = kind == "prompt" and size.hidden or size.width, hidden = size.hidden, all_heads = size.all_heads }
  nn.with_defaults({ dtype = dtype, device = model:device() }, function()
    rawset(model, "_prompt", p)
    model.prompt_embeddings = parameter({ tokens, make.columns }, make.init)
    if transform then model.prompt_transform = transform() end
  end)
  model.hidden = hidden
  record.prompt = p
  record.added = {
    parameters = function(m)
      local list = { m.prompt_embeddings }
      if m.prompt_transform then
        local more = m.prompt_transform:parameters()
        table.move(more, 1, #more, 2, list)
      end
      return list
    end,
    switch = function(off, m) m._prompt.off = off end,
    remove = function(m)
      nn.surgery.remove(m, "prompt_embeddings")
      if m.prompt_transform then nn.surgery.remove(m, "prompt_transform") end
      rawset(m, "_prompt", nil)
      rawset(m, "hidden", nil)
    end,
  }
  ty.core.program.renew()
  return model, adapter.report(model)
end

local defaults = { tokens = 20, dtype = "f32" }
local words = { tokens = "an integer >= 1" }

local function read(who, options, more, more_words)
  local all, kinds = {}, {}
  for _, pair in ipairs { { defaults, all }, { more, all }, { words, kinds }, { more_words, kinds } } do
    for key, value in pairs(pair[1]) do pair[2][key] = value end
  end
  local o = arguments.read(who, options, all, kinds)
  adapter.check_dtype(who, o.dtype)
  return o
end

--- Gives a model `tokens` (20) trained embeddings that stand before those of its text, and freezes everything else.
-- options: tokens, init ("vocabulary": those of tokens drawn at random; "normal": standard normal numbers, as PEFT has
-- them), ids (i64: those of these tokens, over and over until there are enough), dtype ("f32"). Works on decoders;
-- peft.parameters, disable, remove, save and load as for other adapters, there is nothing to merge. Returns the model
-- and a report, as of peft.lora.
---@param model LanguageModel
---@param options? {tokens?: integer, init?: string, ids?: Tensor, dtype?: string}
---@return LanguageModel model
function M.prompt(model, options)
  local who = "peft.prompt"
  local o = read(who, options, { init = "vocabulary", ids = none },
    { init = '"vocabulary" or "normal"', ids = "a tensor" })
  local size = sizes(who, model)
  local weight = model:get(size.embedding).weight
  local ids, most = o.ids, weight.shape[1]
  if ids and (ids.dtype ~= "i64" or ids:numel() == 0 or ids:min():item() < 0 or ids:max():item() >= most) then
    fail("%s: ids: expected i64 within the vocabulary of %d, got %s", who, most, arguments.describe(ids))
  end
  return attach(who, model, "prompt", size, o.tokens, { columns = size.hidden, init = function(t)
    if not ids and o.init == "normal" then return nn.init.normal(t, 0, 1) end
    local at = ids and ids:flatten()[ty.arange(o.tokens) % ids:numel()] or ty.randint(0, most, { o.tokens })
    ty.no_grad(function() t:copy_(ty.embedding(weight:detach(), at:to { device = weight.device })) end)
  end }, o.dtype)
end

--- Gives each layer of a model keys and values of `tokens` (20) virtual tokens, which all tokens see, and freezes
-- everything else. options: tokens, init ("normal": standard normal numbers, as PEFT has them; "zeros"), projection
-- (the inner width of a network that makes the prefix of embeddings while it is trained, which is Li and Liang's way;
-- files hold what it makes), dtype ("f32"). Works on decoders with a cache. Returns the model.
---@param model LanguageModel
---@param options? {tokens?: integer, init?: string, projection?: integer, dtype?: string}
---@return LanguageModel model
function M.prefix(model, options)
  local who = "peft.prefix"
  local o = read(who, options, { init = "normal", projection = none },
    { init = '"normal" or "zeros"', projection = "an integer >= 1" })
  local size = sizes(who, model)
  local inner, columns = size.heads * size.width, 2 * size.layers * size.heads * size.width
  local function start(t)
    if o.init == "zeros" then nn.init.zeros(t) else nn.init.normal(t, 0, 1) end
  end
  return attach(who, model, "prefix", size, o.tokens,
    { columns = o.projection and inner or columns, init = start }, o.dtype, o.projection and function()
      local network = nn.Sequential(nn.Linear(inner, o.projection), nn.Tanh(), nn.Linear(o.projection, columns))
      if o.init == "zeros" then nn.init.zeros(network[3].weight) end
      return network
    end)
end

-- ---- files ----

--- What PEFT's files hold: adapter_config.json as a table, and the tensors.
function M.published(model, record, base)
  local p = record.prompt
  local inner = p.kind == "prompt" and p.hidden or p.heads * p.width
  local config = { peft_type = types[p.kind], task_type = record.task_type or "CAUSAL_LM", inference_mode = true,
    base_model_name_or_path = base or record.base, num_virtual_tokens = p.tokens, token_dim = inner,
    num_transformer_submodules = 1, num_attention_heads = p.kind == "prompt" and p.all_heads or p.heads,
    num_layers = p.layers }
  local embeddings = model.prompt_embeddings
  if p.kind == "prompt" then
    config.prompt_tuning_init = "RANDOM"
  else
    config.encoder_hidden_size, config.prefix_projection = inner, model.prompt_transform ~= nil
    if model.prompt_transform then embeddings = ty.no_grad(model.prompt_transform.forward, model.prompt_transform,
      embeddings) end
  end
  return config, { prompt_embeddings = embeddings:detach():contiguous() }
end

--- The kind of virtual tokens that a config is of, or nil.
---@return string?
function M.kind_of(config)
  for kind, name in pairs(types) do
    if config.peft_type == name then return kind end
  end
end

--- Gives a model what a file of PEFT holds; raises where that does not fit it.
function M.load(model, config, state, o)
  local kind, who = M.kind_of(config), "peft.load"
  local size = sizes(who, model)
  local columns = kind == "prompt" and size.hidden or 2 * size.layers * size.heads * size.width
  local t = state.prompt_embeddings
  for key in pairs(state) do
    if key ~= "prompt_embeddings" then error(key .. ": expected prompt_embeddings alone", 0) end
  end
  if not ty.is_tensor(t) then error("prompt_embeddings is not there", 0) end
  local n = t.shape[1] or 0
  if t.ndim ~= 2 or t.shape[2] ~= columns or n < 1 or not t:is_floating_point() then
    error(("prompt_embeddings: expected floats [tokens, %d], got %s [%s]"):format(columns, t.dtype,
      table.concat(t.shape, ", ")), 0)
  end
  for key, wanted in pairs { num_virtual_tokens = n, num_layers = size.layers,
    token_dim = kind == "prompt" and size.hidden or size.heads * size.width, num_transformer_submodules = 1 } do
    local given = config[key]
    if given ~= nil and given ~= ty.io.null and given ~= wanted then
      error(("adapter_config.json: %s: expected %d, got %s"):format(key, wanted, arguments.describe(given)), 0)
    end
  end
  attach(who, model, kind, size, n, { columns = columns, init = function(p)
    ty.no_grad(p.copy_, p, t)
  end }, o.dtype)
  local record = adapter.of(who, model)
  record.task_type = type(config.task_type) == "string" and config.task_type or nil
  record.base = type(config.base_model_name_or_path) == "string" and config.base_model_name_or_path or nil
  if not o.train then model.prompt_embeddings:requires_grad_(false) end
end

return M
