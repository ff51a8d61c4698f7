--- What the modules of convolutions share: defaults, checks of their arguments, the first values of their parameters.
local init = require "tycho.nn.initial"
local options = require "tycho.nn.options"

local positive = options.positive
local M = {}

-- PyTorch's default for weight and bias alike: uniform within +-1 / sqrt(fan_in).
function M.default_init(fan_in)
  local bound = fan_in > 0 and 1 / math.sqrt(fan_in) or 0
  return function(t) init.uniform(t, -bound, bound) end
end

M.defaults = { stride = 1, padding = 0, dilation = 1, groups = 1, bias = true }
-- The modules check sizes themselves.
M.kinds = { stride = false, padding = false, output_padding = false, dilation = false, groups = false }

function M.check_groups(who, inputs, outputs, groups)
  positive(who, "inputs", inputs)
  positive(who, "outputs", outputs)
  positive(who, "groups", groups)
  if inputs % groups ~= 0 or outputs % groups ~= 0 then
    options.fail("%s: groups: expected a divisor of inputs %d and outputs %d, got %d", who, inputs, outputs, groups)
  end
end

function M.describe(self)
  local text = ("%d, %d, %s"):format(self.in_channels, self.out_channels, table.concat(self.kernel_size, "x"))
  for _, name in ipairs { "stride", "padding", "dilation" } do
    local default, values = M.defaults[name], self[name]
    local same = true
    for i = 2, #values do same = same and values[i] == values[1] end
    if not same then
      text = text .. (", %s = %s"):format(name, table.concat(values, "x"))
    elseif values[1] ~= default then
      text = text .. (", %s = %s"):format(name, values[1])
    end
  end
  if self.groups ~= 1 then text = text .. ", groups = " .. self.groups end
  if not self.bias then text = text .. ", bias = false" end
  return text
end

-- padding = "same" keeps the size at stride 1.
function M.read_padding(who, o, kernel)
  if o.padding ~= "same" then return o.padding end
  local result = {}
  for i = 1, #kernel do
    local span = o.dilation[i] * (kernel[i] - 1)
    if span % 2 ~= 0 or o.stride[i] ~= 1 then
      options.fail("%s: padding: \"same\" needs stride 1 and an odd span of the kernel", who)
    end
    result[i] = span // 2
  end
  return result
end

return M
