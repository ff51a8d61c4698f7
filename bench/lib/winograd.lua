--- The least work of f32 convolutions with 3x3 kernels on a CPU: that of Winograd's transforms F(4x4, 3x3), where our
-- kernels take them (kernels/cpu/convolution/conv.c, suits_winograd). 144 products of a tile become 36; what the
-- transforms take is counted as instructions of kernels/cpu/convolution/conv_winograd.h, each of which is two
-- operations of the limit's rate, which is that of multiply-add.
local ty = require "tycho"

local winograd = {}

-- Instructions of one direction: six values of the input to six points, six points to four results, four values of
-- the gradient to six points, three taps to six points, six points to three taps.
local INPUT, RESULTS, GRADIENT, KERNEL, TAPS = 13, 13, 13, 10, 12

-- A tile in both directions; inputs overlap, so that their first direction has four columns a tile.
local input, results = 2 * (4 + 6) * INPUT, 2 * (6 + 4) * RESULTS
local gradient, kernel, taps = 2 * (4 + 6) * GRADIENT, 2 * (3 + 6) * KERNEL, 2 * (6 + 3) * TAPS

--- Operations of a 3x3 convolution of stride 1 in one group, from x [n, c, ...] to [n, out, rows, columns]: forward,
-- the gradient of x, that of the weight. Each is the least of the plain products and of the transforms.
---@return number forward, number of_input, number of_weight
function winograd.work(n, c, out, rows, columns)
  local plain = 2 * n * out * rows * columns * c * 9
  local tiles = n * ((rows + 3) // 4) * ((columns + 3) // 4)
  local products, kernels = 2 * 36 * tiles * c * out, kernel * c * out
  local suits = 36 * ((rows + 3) // 4) * ((columns + 3) // 4) < 6.5 * rows * columns
  local function least(channels, transforms)
    return suits and channels >= 12 and math.min(plain, products + transforms) or plain
  end
  return least(c, input * tiles * c + results * tiles * out + kernels),
    least(out, input * tiles * out + results * tiles * c + kernels),
    least(c, input * tiles * c + gradient * tiles * out + taps * c * out)
end

local function is(pair, value)
  if type(pair) == "table" then return pair[1] == value and pair[2] == value end
  return pair == value
end

--- What the transforms save of the plain products in the convolutions of a network, forward and in both gradients:
-- make() makes the network, run(network) calls it once, both on the meta device. Convolutions of pictures, with three
-- channels, have no gradient of x.
---@param make fun(): Module
---@param run fun(network: Module)
---@return number forward, number backward
function winograd.saved(make, run)
  local forward, backward = 0, 0
  local function add(module, outputs, x)
    if not (is(module.kernel_size, 3) and is(module.stride, 1) and is(module.dilation, 1) and module.groups == 1) then
      return
    end
    local n, c, y = x.shape[1], x.shape[2], outputs[1].shape
    local plain = 2 * n * y[2] * y[3] * y[4] * c * 9
    local own, of_input, of_weight = winograd.work(n, c, y[2], y[3], y[4])
    forward = forward + plain - own
    backward = backward + plain - of_weight + (c == 3 and 0 or plain - of_input)
  end
  ty.nn.with_defaults({ device = "meta" }, function()
    local network = make()
    for _, module in network:named_modules() do
      if getmetatable(module) == ty.nn.Conv2d then module:register_forward_hook(add) end
    end
    ty.no_grad(run, network)
  end)
  return forward, backward
end

return winograd
