--- Normalisations.
local ty = require "tycho"
local base = require "tycho.nn.module"
local init = require "tycho.nn.initial"
local options = require "tycho.nn.options"

local define, expect, positive = base.define, options.expect, options.positive
local norms = {}
local kinds = { eps = "a finite number >= 0", momentum = "a number in [0, 1]" }

local function shape_of(who, shape)
  expect(who, "shape", shape, "an integer >= 1 or a list of integers >= 1")
  if type(shape) == "number" then return { shape } end
  if #shape == 0 then options.fail("%s: shape: expected at least one size, got an empty table", who) end
  return shape
end

--- (x - mean) / sqrt(var + eps) over the last dimensions `shape`, times weight plus bias. Ba et al. 2016.
-- options: eps (1e-5), elementwise_affine (true), bias (true).
---@overload fun(shape: integer|integer[], options?: table): Module
local LayerNorm = define "LayerNorm"
norms.LayerNorm = LayerNorm

function LayerNorm:init(shape, given)
  local o = options.read("LayerNorm", given, { eps = 1e-5, elementwise_affine = true, bias = true }, kinds)
  self.normalized_shape, self.eps = shape_of("LayerNorm", shape), o.eps
  if o.elementwise_affine then
    self.weight = options.parameter(self.normalized_shape, init.ones)
    if o.bias then self.bias = options.parameter(self.normalized_shape, init.zeros) end
  end
end

function LayerNorm:forward(x) return ty.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps) end

function LayerNorm:describe() return table.concat(self.normalized_shape, ", ") end

--- x / sqrt(mean(x^2) + eps) over the last dimensions, times weight. Zhang and Sennrich 2019. options: eps (1e-6),
-- elementwise_affine (true).
local RMSNorm = define "RMSNorm"
norms.RMSNorm = RMSNorm

function RMSNorm:init(shape, given)
  local o = options.read("RMSNorm", given, { eps = 1e-6, elementwise_affine = true }, kinds)
  self.normalized_shape, self.eps = shape_of("RMSNorm", shape), o.eps
  if o.elementwise_affine then self.weight = options.parameter(self.normalized_shape, init.ones) end
end

function RMSNorm:forward(x) return ty.rms_norm(x, self.normalized_shape, self.weight, self.eps) end

RMSNorm.describe = LayerNorm.describe

--- Normalised over each of `groups` groups of channels of x [n, channels, ...]. Wu and He 2018.
-- options: eps, affine, activation of the result (none, relu, gelu, gelu_tanh or silu, in the same pass).
local GroupNorm = define "GroupNorm"
norms.GroupNorm = GroupNorm

function GroupNorm:init(groups, channels, given)
  local o = options.read("GroupNorm", given, { eps = 1e-5, affine = true, activation = "none" }, kinds)
  positive("GroupNorm", "groups", groups)
  positive("GroupNorm", "channels", channels)
  if channels % groups ~= 0 then
    options.fail("GroupNorm: groups: expected a divisor of the %d channels, got %d", channels, groups)
  end
  self.num_groups, self.num_channels, self.eps, self.activation = groups, channels, o.eps, o.activation
  if o.affine then
    self.weight = options.parameter({ channels }, init.ones)
    self.bias = options.parameter({ channels }, init.zeros)
  end
end

function GroupNorm:forward(x)
  return ty.group_norm(x, self.num_groups, self.weight, self.bias, self.eps, self.activation)
end

function GroupNorm:describe() return ("%d, %d"):format(self.num_groups, self.num_channels) end

local function define_batch_norm(name, low, high, layout)
  local BatchNorm = define(name)

  function BatchNorm:init(channels, given)
    local o = options.read(name, given, { eps = 1e-5, momentum = 0.1, affine = true, track_running_stats = true },
      kinds)
    positive(name, "channels", channels)
    self.num_features, self.eps, self.momentum = channels, o.eps, o.momentum
    if o.affine then
      self.weight = options.parameter({ channels }, init.ones)
      self.bias = options.parameter({ channels }, init.zeros)
    end
    if o.track_running_stats then
      self:buffer("running_mean", options.full({ channels }, 0))
      self:buffer("running_var", options.full({ channels }, 1))
      self:buffer("num_batches_tracked", options.full({}, 0, "i64"))
    end
  end

  function BatchNorm:forward(x)
    if not ty.is_tensor(x) or x.ndim < low or x.ndim > high then
      options.fail("%s: x: expected a tensor %s, got %s", name, layout, options.describe(x))
    end
    local own_statistics = self.training or not self.running_mean
    if self.training and self.num_batches_tracked then self.num_batches_tracked:add_(1) end
    return ty.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, own_statistics, self.momentum,
      self.eps)
  end

  function BatchNorm:describe() return ("%d"):format(self.num_features) end

  return BatchNorm
end

--- Normalised over the batch (and positions) of x [n, c] or [n, c, w]. Ioffe and Szegedy 2015.
-- options: eps, momentum, affine, track_running_stats.
norms.BatchNorm1d = define_batch_norm("BatchNorm1d", 2, 3, "[n, c] or [n, c, w]")

--- Normalised over the batch and positions of x [n, c, h, w]. Ioffe and Szegedy 2015.
norms.BatchNorm2d = define_batch_norm("BatchNorm2d", 4, 4, "[n, c, h, w]")

--- Normalised over the batch and positions of x [n, c, d, h, w]. Ioffe and Szegedy 2015.
-- options: eps, momentum, affine, track_running_stats.
norms.BatchNorm3d = define_batch_norm("BatchNorm3d", 5, 5, "[n, c, d, h, w]")

return norms
