--- Normalisations by channel: of each instance, and across neighbouring channels.
local ty = require "tycho"
local base = require "tycho.nn.module"
local init = require "tycho.nn.initial"
local options = require "tycho.nn.options"

local M = {}
local kinds = { eps = "a finite number >= 0", momentum = "a number in [0, 1]", alpha = "a finite number",
  beta = "a finite number", k = "a finite number" }

local function define(name, dims, layout)
  local InstanceNorm = base.define(name)

  function InstanceNorm:init(channels, given)
    local o = options.read(name, given, { eps = 1e-5, momentum = 0.1, affine = false, track_running_stats = false },
      kinds)
    options.positive(name, "channels", channels)
    self.num_features, self.eps, self.momentum = channels, o.eps, o.momentum
    if o.affine then
      self.weight = options.parameter({ channels }, init.ones)
      self.bias = options.parameter({ channels }, init.zeros)
    end
    if o.track_running_stats then
      self:buffer("running_mean", options.full({ channels }, 0))
      self:buffer("running_var", options.full({ channels }, 1))
      -- PyTorch has it, and never counts
      self:buffer("num_batches_tracked", options.full({}, 0, "i64"))
    end
  end

  -- The means over the batch of the statistics of each instance.
  local function track(self, x)
    ty.no_grad(function()
      local over, n = {}, 1
      for d = 2, x.ndim - 1 do
        over[d - 1] = d
        n = n * x:size(d)
      end
      x = x:detach()
      local mean, var = x:mean(over):mean { 0 }, x:var(over, n > 1 and 1 or 0):mean { 0 }
      for buffer, now in pairs { [self.running_mean] = mean, [self.running_var] = var } do
        buffer:copy_(buffer:lerp(now:to(buffer.dtype), self.momentum))
      end
    end)
  end

  function InstanceNorm:forward(x)
    if not ty.is_tensor(x) or x.ndim ~= dims + 2 or x:size(1) ~= self.num_features then
      options.fail("%s: x: expected a tensor %s with %d channels, got %s", name, layout, self.num_features,
        options.describe(x))
    end
    if self.running_mean and not self.training then
      return ty.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, false, self.momentum,
        self.eps)
    end
    if self.running_mean then track(self, x) end
    return ty.group_norm(x, self.num_features, self.weight, self.bias, self.eps)
  end

  function InstanceNorm:describe() return ("%d"):format(self.num_features) end

  return InstanceNorm
end

--- Each channel of each sample of x [n, channels, w] normalised over its positions. Ulyanov et al. 2016.
-- options: eps (1e-5), momentum (0.1), affine (false), track_running_stats (false: eval() normalises as training does).
M.InstanceNorm1d = define("InstanceNorm1d", 1, "[n, channels, w]")

--- Each channel of each sample of x [n, channels, h, w] normalised over its positions. Options as InstanceNorm1d's.
M.InstanceNorm2d = define("InstanceNorm2d", 2, "[n, channels, h, w]")

--- Each channel of each sample of x [n, channels, d, h, w] normalised over its positions. Options as InstanceNorm1d's.
M.InstanceNorm3d = define("InstanceNorm3d", 3, "[n, channels, d, h, w]")

--- x / (k + alpha mean(x^2))^beta, the mean over `size` neighbouring channels of x [n, channels, ...] with zeros beyond
-- the ends. Krizhevsky et al. 2012. options: alpha (1e-4), beta (0.75), k (1).
local LocalResponseNorm = base.define "LocalResponseNorm"
M.LocalResponseNorm = LocalResponseNorm

function LocalResponseNorm:init(size, given)
  local o = options.read("LocalResponseNorm", given, { alpha = 1e-4, beta = 0.75, k = 1 }, kinds)
  self.size = options.positive("LocalResponseNorm", "size", size)
  self.alpha, self.beta, self.k = o.alpha, o.beta, o.k
end

function LocalResponseNorm:forward(x)
  if not ty.is_tensor(x) or x.ndim < 3 then
    options.fail("LocalResponseNorm: x: expected a tensor [n, channels, ...], got %s", options.describe(x))
  end
  local channels, square, sum = x:size(1), x:square(), nil
  for offset = -(self.size // 2), (self.size - 1) // 2 do
    local kept = channels - math.abs(offset)
    if kept > 0 then
      local part, pads = square:narrow(1, math.max(0, offset), kept), {}
      for i = 1, 2 * (x.ndim - 1) do pads[i] = 0 end
      pads[#pads - (offset < 0 and 1 or 0)] = math.abs(offset)
      part = offset == 0 and part or part:pad(pads)
      sum = sum and sum + part or part
    end
  end
  return x / (sum * (self.alpha / self.size) + self.k):pow(self.beta)
end

function LocalResponseNorm:describe() return ("%d"):format(self.size) end

return M
