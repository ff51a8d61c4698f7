--- Functions of a place, learnt by a network that sees it as waves of many frequencies, or as it is. Tancik et al.
-- 2020, "Fourier Features Let Networks Learn High Frequency Functions in Low Dimensional Domains".
--
--     local field = models.FourierField { inputs = 2, outputs = 3, scale = 10 }
--     local colours = field(places)                       -- [n, 2] in [0, 1] to [n, 3]
local ty = require "tycho"
local arguments = require "tycho.arguments"

local nn = ty.nn

---@class FourierField: Module
local FourierField = nn.module "FourierField"

local defaults = { inputs = 2, outputs = 3, waves = 64, scale = 10, width = 128, layers = 3 }
local kinds = { inputs = "an integer >= 1", outputs = "an integer >= 1", waves = "an integer >= 1",
  scale = "a finite number >= 0", width = "an integer >= 1", layers = "an integer >= 1" }

--- options: inputs (2: of a place), outputs (3), waves (64), scale (10: standard deviation of their frequencies, in
-- turns over the side; 0: places as they are, from -1 to 1), width (128), layers (3: hidden ones).
---@param options? table
function FourierField:init(options)
  local o = arguments.read("FourierField", options, defaults, kinds)
  self.config = o
  local width = o.inputs
  if o.scale > 0 then
    width = 2 * o.waves
    self:register_buffer("frequencies", ty.randn(o.inputs, o.waves) * (2 * math.pi * o.scale))
  end
  self.layers = nn.ModuleList {}
  for _ = 1, o.layers do
    self.layers:append(nn.Linear(width, o.width))
    width = o.width
  end
  self.head = nn.Linear(width, o.outputs)
end

--- Places [..., inputs] in [0, 1] to [..., outputs].
---@param x Tensor
---@return Tensor
function FourierField:forward(x)
  arguments.expect("FourierField", "x", x, "a tensor")
  if x.ndim < 1 or x.shape[x.ndim] ~= self.config.inputs then
    arguments.fail("FourierField: x: expected [..., %d], got %s", self.config.inputs, arguments.describe(x))
  end
  if self.frequencies then
    local phase = ty.matmul(x, self.frequencies)
    x = ty.cat({ phase:sin(), phase:cos() }, -1)
  else
    x = 2 * x - 1
  end
  for _, layer in ipairs(self.layers) do x = layer(x):relu() end
  return self.head(x)
end

return FourierField
