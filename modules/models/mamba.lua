--- Mamba: layers whose memory is a state of fixed size for each channel, which decays and is written to as the token
-- decides. Gu and Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces". Config keys and
-- parameter names are those of transformers' MambaForCausalLM.
--
--     local model = models.Mamba { vocab_size = 1000, hidden_size = 128, num_hidden_layers = 4 }
local ty = require "tycho"
local blocks = require "tycho.models.mamba_blocks"
local configs = require "tycho.models.config"
local layers = require "tycho.models.layers"

local nn = ty.nn
local parameter = require("tycho.nn.options").parameter

local Mixer = nn.module "MambaMixer"

function Mixer:init(config)
  local inner, n, rank = blocks.inner("Mamba", config), config.state_size, config.time_step_rank
  self.inner, self.states, self.rank = inner, n, rank
  self.activation = configs.activation("Mamba", config.hidden_act, "hidden_act")
  self.in_proj = layers.linear(config.hidden_size, 2 * inner, config.use_bias)
  self.conv1d = blocks.Convolution(inner, config.conv_kernel, config.use_conv_bias)
  self.x_proj = layers.linear(inner, rank + 2 * n)
  self.dt_proj = nn.Linear(rank, inner)
  local bound = rank ^ -0.5 * config.time_step_scale
  if self.dt_proj.weight.device ~= "meta" then
    if config.time_step_init_scheme == "constant" then
      nn.init.constant(self.dt_proj.weight, bound)
    else
      nn.init.uniform(self.dt_proj.weight, -bound, bound)
    end
  end
  self.dt_proj.bias = blocks.step_bias(inner, config)
  -- The real part of S4D: states that decay as 1, 2, 3 ...
  self.A_log = parameter({ inner, n }, function(t) t:copy_((ty.arange(n):to "f32" + 1):log():expand(inner, n)) end)
  self.D = parameter({ inner }, nn.init.ones)
  self.out_proj = layers.linear(inner, config.hidden_size, config.use_bias)
end

function Mixer:forward(x, at)
  if at.padding then x = x:masked_fill(at.padding, 0) end
  local tail, state = blocks.remembered(at)
  local both = self.in_proj(x)
  local u, gate = both:narrow(-1, 0, self.inner), both:narrow(-1, self.inner, self.inner)
  u, tail = self.conv1d(u, tail)
  u = ty[self.activation](u)
  if at.padding then u = u:masked_fill(at.padding, 0) end
  local read = self.x_proj(u)
  local delta = self.dt_proj(read:narrow(-1, 0, self.rank)):softplus()
  local y
  y, state = ty.selective_scan(u, delta, -self.A_log:exp(), read:narrow(-1, self.rank, self.states),
    read:narrow(-1, self.rank + self.states, self.states), state)
  blocks.remember(at, tail, state)
  y, u, gate = layers.tail(y, 1, at.last), layers.tail(u, 1, at.last), layers.tail(gate, 1, at.last)
  return self.out_proj(ty.glu(y + u * self.D, gate, "silu"))
end

--- Mamba as a language model.
---@class Mamba: LanguageModel
local Mamba = blocks.define {
  name = "Mamba", model_type = "mamba", architecture = "MambaForCausalLM", Mixer = Mixer,
  fields = { time_step_rank = { "rank", "auto" }, time_step_scale = { "number", 1 },
    time_step_init_scheme = { "text", "random" } },
  check = function(config)
    if config.time_step_rank == "auto" then config.time_step_rank = (config.hidden_size + 15) // 16 end
    configs.only("Mamba", config, { time_step_init_scheme = { "random", "constant" } })
  end,
}

return Mamba
