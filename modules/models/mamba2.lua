--- Mamba-2: each head has a matrix that decays by one number, which the token decides, so that a sequence is products
-- of matrices (state-space duality). Dao and Gu 2024, "Transformers are SSMs: Generalized Models and Efficient
-- Algorithms Through Structured State Space Duality". Config keys and parameter names are those of transformers'
-- Mamba2ForCausalLM.
--
--     local model = models.Mamba2 { vocab_size = 1000, hidden_size = 128, head_dim = 32, num_heads = 8,
--       state_size = 32, n_groups = 1, num_hidden_layers = 4 }
local ty = require "tycho"
local blocks = require "tycho.models.mamba_blocks"
local configs = require "tycho.models.config"
local layers = require "tycho.models.layers"
local LanguageModel = require "tycho.models.model"

local nn = ty.nn
local parameter = require("tycho.nn.options").parameter

-- Norm of y silu(gate), group by group.
local GatedNorm = nn.module "Mamba2GatedNorm"

function GatedNorm:init(width, groups, eps)
  self.groups, self.eps = groups, eps
  self.weight = parameter({ width }, nn.init.ones)
end

function GatedNorm:forward(y, gate)
  local x = ty.glu(y, gate, "silu")
  local b, t, width = table.unpack(x.shape)
  if self.groups > 1 then
    local group = width // self.groups
    x = ty.rms_norm(x:reshape(b, t, self.groups, group), { group }, nil, self.eps)
    return x:reshape(b, t, width) * self.weight
  end
  return ty.rms_norm(x, { width }, self.weight, self.eps)
end

local Mixer = nn.module "Mamba2Mixer"

function Mixer:init(config)
  local inner, heads, groups, n = blocks.inner("Mamba2", config), config.num_heads, config.n_groups, config.state_size
  self.inner, self.heads, self.groups, self.states = inner, heads, groups, n
  self.width, self.least, self.most = config.head_dim, config.time_step_limit[1], config.time_step_limit[2]
  self.activation = configs.activation("Mamba2", config.hidden_act, "hidden_act")
  self.channels = inner + 2 * groups * n
  self.in_proj = layers.linear(config.hidden_size, inner + self.channels + heads, config.use_bias)
  self.conv1d = blocks.Convolution(self.channels, config.conv_kernel, config.use_conv_bias)
  self.dt_bias = blocks.step_bias(heads, config)
  self.A_log = parameter({ heads }, function(t) t:copy_((ty.arange(heads):to "f32" + 1):log()) end)
  self.D = parameter({ heads }, nn.init.ones)
  self.norm = GatedNorm(inner, groups, config.layer_norm_epsilon)
  self.out_proj = layers.linear(inner, config.hidden_size, config.use_bias)
end

-- What a group of heads shares, [b, t, groups * n], for each head: [b, heads, t, n].
local function shared(self, x)
  local b, t = x.shape[1], x.shape[2]
  local times = self.heads // self.groups
  x = x:reshape(b, t, self.groups, 1, self.states):permute(0, 2, 3, 1, 4)
  return x:expand(b, self.groups, times, t, self.states):reshape(b, self.heads, t, self.states)
end

function Mixer:forward(x, at)
  if at.padding then x = x:masked_fill(at.padding, 0) end
  local tail, state = blocks.remembered(at)
  local all = self.in_proj(x)
  local gate, u = all:narrow(-1, 0, self.inner), all:narrow(-1, self.inner, self.channels)
  local delta = (all:narrow(-1, self.inner + self.channels, self.heads) + self.dt_bias):softplus()
  if self.least > 0 or self.most < math.huge then delta = delta:clamp(self.least, self.most) end
  u, tail = self.conv1d(u, tail)
  u = ty[self.activation](u)
  if at.padding then u = u:masked_fill(at.padding, 0) end
  local written = self.groups * self.states
  local v = nn.split_heads(u:narrow(-1, 0, self.inner), self.heads)
  local key = shared(self, u:narrow(-1, self.inner, written))
  local query = shared(self, u:narrow(-1, self.inner + written, written))
  delta = delta:transpose(1, 2):unsqueeze(-1) -- [b, heads, t, 1]
  local decay = delta * -self.A_log:exp():reshape(-1, 1, 1)
  local y
  y, state = ty.gated_linear_attention(query, key, v * delta, decay, state, 1)
  blocks.remember(at, tail, state)
  y = nn.join_heads(layers.tail(y + v * self.D:reshape(-1, 1, 1), 2, at.last))
  return self.out_proj(self.norm(y, layers.tail(gate, 1, at.last)))
end

--- Mamba-2 as a language model.
---@class Mamba2: LanguageModel
local Mamba2 = blocks.define {
  name = "Mamba2", model_type = "mamba2", architecture = "Mamba2ForCausalLM", Mixer = Mixer,
  fields = { vocab_size = { "count", 32768 }, hidden_size = { "count", 4096 }, state_size = { "count", 128 },
    num_hidden_layers = { "few", 64 }, num_heads = { "count", 128 }, head_dim = { "count", 64 },
    n_groups = { "count", 8 }, tie_word_embeddings = { "flag", false }, time_step_rank = { "rank", "auto" },
    time_step_limit = { "range", { 0, math.huge } }, chunk_size = { "count", 256 } },
  prepare = function(given)
    -- JSON has no infinity, which transformers writes as an object.
    local limit = type(given) == "table" and given.time_step_limit
    local most = type(limit) == "table" and limit[2]
    if type(most) ~= "table" or most.__float__ ~= "Infinity" then return given end
    local config = {}
    for key, value in pairs(given) do config[key] = value end
    config.time_step_limit = { limit[1], math.huge }
    return config
  end,
  check = function(config)
    local inner = blocks.inner("Mamba2", config)
    if inner ~= config.num_heads * config.head_dim then
      error(("Mamba2: num_heads %d times head_dim %d must be hidden_size %d times expand %g"):format(config.num_heads,
        config.head_dim, config.hidden_size, config.expand), 0)
    end
    configs.divides("Mamba2", config, "n_groups", "num_heads")
  end,
}

--- The keys of config.json. It has no infinity: a limit without an end is left out, as it is the default.
function Mamba2:published_config()
  local config = LanguageModel.published_config(self)
  if config.time_step_limit and config.time_step_limit[2] == math.huge then config.time_step_limit = nil end
  return config
end

return Mamba2
