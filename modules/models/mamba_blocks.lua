--- What Mamba and Mamba-2 share: the convolution over the tokens before, the layers, the language model around them.
-- Their memory of the tokens so far has one size, however many came.
local ty = require "tycho"
local States = require "tycho.models.states"
local configs = require "tycho.models.config"
local layers = require "tycho.models.layers"
local LanguageModel = require "tycho.models.model"

local nn = ty.nn
local parameter = require("tycho.nn.options").parameter
local M = {}

--- Keys of config.json that both have. Those of time_step_ are what new weights are drawn by.
M.fields = {
  vocab_size = { "count", 50280 }, hidden_size = { "count", 768 }, state_size = { "count", 16 },
  num_hidden_layers = { "few", 32 }, layer_norm_epsilon = { "epsilon", 1e-5 }, expand = { "number", 2 },
  conv_kernel = { "count", 4 }, use_bias = { "flag", false }, use_conv_bias = { "flag", true },
  hidden_act = { "text", "silu" }, initializer_range = { "number", 0.1 }, residual_in_fp32 = { "flag", true },
  time_step_min = { "number", 0.001 }, time_step_max = { "number", 0.1 }, time_step_floor = { "number", 1e-4 },
  rescale_prenorm_residual = { "flag", false }, tie_word_embeddings = { "flag", true },
  -- These follow from others, or choose between implementations of the same computation.
  intermediate_size = { "count", configs.none }, layer_types = { "texts", configs.none },
  use_mambapy = { "flag", false }, use_associative_scan = { "flag", true },
}

--- The width between the projections of a layer: hidden_size times expand.
function M.inner(who, config)
  local inner = math.tointeger(config.hidden_size * config.expand // 1)
  if inner < 1 then error(("%s: expand %g leaves a layer no width"):format(who, config.expand), 0) end
  return inner
end

--- Biases [count] whose softplus is spread evenly between the logarithms of time_step_min and time_step_max.
function M.step_bias(count, config)
  return parameter({ count }, function(t)
    local low, high = math.log(config.time_step_min), math.log(config.time_step_max)
    local step = (ty.rand(count) * (high - low) + low):exp():clamp(config.time_step_floor)
    t:copy_(step + (-(-step):expm1()):log())
  end)
end

-- Each channel by itself, over as many tokens as the kernel has, of which the last is the token's own.
local Convolution = nn.module "MambaConvolution"
M.Convolution = Convolution

function Convolution:init(channels, size, bias)
  self.size = size
  local bound = size ^ -0.5
  self.weight = parameter({ channels, 1, size }, function(t) nn.init.uniform(t, -bound, bound) end)
  if bias then self.bias = parameter({ channels }, nn.init.zeros) end
end

--- x [b, t, channels], and the tokens before them [b, size - 1, channels] (nil: none). Returns the result, and what the
-- next call gets as the tokens before.
function Convolution:forward(x, before)
  local b, t, channels = table.unpack(x.shape)
  local past = self.size - 1
  if past > 0 then
    x = ty.concat({ before or ty.zeros({ b, past, channels }, { dtype = x.dtype, device = x.device }), x }, 1)
  end
  local y
  for k = 0, past do
    local part = x:narrow(1, k, t) * self.weight:select(2, k):squeeze(1)
    y = y and y + part or part
  end
  if self.bias then y = y + self.bias end
  return y, past > 0 and x:narrow(1, t, past) or nil
end

local Block = nn.module "MambaBlock"

function Block:init(config, Mixer)
  self.norm = nn.RMSNorm(config.hidden_size, { eps = config.layer_norm_epsilon })
  self.mixer = Mixer(config)
end

-- stream, more [b, t, hidden], as layers.DecoderLayer has them; more may be nil.
function Block:forward(stream, more, at)
  local x
  stream, x = layers.add_norm(self.norm, stream, more)
  return layers.tail(stream, 1, at.last), self.mixer(x, at)
end

-- The embeddings, the layers and the last norm, which published files name "backbone".
local Body = nn.module "MambaBody"

function Body:init(config, Mixer)
  self.embeddings = layers.embedding(config.vocab_size, config.hidden_size, config.initializer_range)
  self.layers = nn.ModuleList {}
  for _ = 1, config.num_hidden_layers do self.layers:append(Block(config, Mixer)) end
  self.norm_f = nn.RMSNorm(config.hidden_size, { eps = config.layer_norm_epsilon })
end

--- The tails of the convolution and of the state that a layer has from the call before: two entries of a StateCache.
function M.remembered(at)
  if not at.cache then return nil, nil end
  return at.cache:get(2 * at.layer - 1), at.cache:get(2 * at.layer)
end

--- Keeps them for the next call.
function M.remember(at, tail, state)
  if not at.cache then return end
  if tail then at.cache:put(2 * at.layer - 1, tail) end
  at.cache:put(2 * at.layer, state)
end

--- A family. spec: name, model_type, architecture, fields (besides M.fields), check(config), prepare(given) (keys that
-- are read in another form), Mixer (a layer, called with x [b, t, hidden] and at: padding bool [b, t, 1] or nil, cache,
-- layer and last as layers.through() has them).
function M.define(spec)
  local class = nn.module(spec.name, LanguageModel)
  class.model_type, class.architecture = spec.model_type, spec.architecture
  class.missing_prefixes = { "backbone." } -- of files of the body alone

  --- config: the keys of config.json.
  function class:init(given)
    local fields = {}
    for name, field in pairs(M.fields) do fields[name] = field end
    for name, field in pairs(spec.fields) do fields[name] = field end
    local config = configs.read(spec.name, spec.prepare and spec.prepare(given) or given, fields)
    if not (config.time_step_min > 0 and config.time_step_max >= config.time_step_min) then
      error(("%s: expected 0 < time_step_min <= time_step_max, got %g and %g"):format(spec.name, config.time_step_min,
        config.time_step_max), 0)
    end
    spec.check(config)
    self.config = config
    self.backbone = Body(config, spec.Mixer)
    if config.tie_word_embeddings then
      self.ignored_too = { "^lm_head%.weight$" }
    else
      self.lm_head = layers.linear(config.hidden_size, config.vocab_size, false, config.initializer_range)
    end
  end

  --- Renames one published name to ours: that of the embeddings in the first files.
  function class:rename(name) return (name:gsub("^backbone%.embedding%.", "backbone.embeddings.")) end

  --- A cache for forward(): the last tokens of the convolution and one state for each layer, however many tokens come.
  ---@return StateCache
  function class:cache(options) return States.new(2 * #self.backbone.layers, options) end

  --- Hidden states after the last norm: tokens i64 [n, t] to [n, t, hidden]. options as in forward(), and last and
  -- embeddings as in Decoder:hidden().
  function class:hidden(tokens, options)
    layers.check_tokens(spec.name, tokens, options)
    local last = layers.last(spec.name, options)
    options = options or {}
    for _, name in ipairs { "cu_seqlens", "positions", "places", "taps" } do
      if options[name] then error(("%s: %s is not an option of this family"):format(spec.name, name), 0) end
    end
    local cache, mask = options.cache, options.mask
    local at = { cache = cache }
    if mask then
      if mask.ndim ~= 2 then error(spec.name .. ": mask: expected bool or i64 [n, t]", 0) end
      at.padding = layers.tail(mask, 1, tokens.shape[2]):to("bool"):logical_not():unsqueeze(-1)
    end
    local stream, more = layers.through(self.backbone.layers,
      options.embeddings or self.backbone.embeddings(tokens), at, options.checkpoint, last)
    if cache then cache:advance(tokens.shape[2]) end
    local _, x = layers.add_norm(self.backbone.norm_f, stream, more)
    return x
  end

  --- What the layers get of tokens i64 [n, t]: [n, t, hidden].
  function class:embed(tokens) return self.backbone.embeddings(tokens) end

  function class:tied() return not self.lm_head and self.backbone.embeddings or nil end

  --- Logits of hidden states.
  function class:head(hidden)
    return self.lm_head and self.lm_head(hidden) or ty.linear(hidden, self.backbone.embeddings.weight)
  end

  --- tokens i64 [n, t] to logits [n, t, vocabulary]; there is no limit to t. options: cache (from model:cache(),
  -- without gradients: the tokens follow those of the calls before), mask (bool or i64 [n, t], 0: padding, on the
  -- left), checkpoint (true: the backward pass runs each layer again).
  ---@param tokens Tensor
  ---@param options? {cache?: StateCache, mask?: Tensor, checkpoint?: boolean}
  ---@return Tensor logits
  function class:forward(tokens, options) return self:head(self:hidden(tokens, options)) end

  return class
end

return M
