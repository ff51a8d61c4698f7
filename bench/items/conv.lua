--- conv2d, forward and forward with backward, over the layers of ResNet-18, a UNet and a ConvNeXt, and some in bf16.
local ty = require "tycho"
local calls = require "bench.lib.calls"
local winograd = require "bench.lib.winograd"

-- name, batch, in, size, out, kernel, stride, padding, groups
local layers = {
  { "resnet/stem", 8, 3, 224, 64, 7, 2, 3, 1 },
  { "resnet/64x56", 8, 64, 56, 64, 3, 1, 1, 1 },
  { "resnet/64x56-128", 8, 64, 56, 128, 3, 2, 1, 1 },
  { "resnet/64x56-128-1x1", 8, 64, 56, 128, 1, 2, 0, 1 },
  { "resnet/128x28", 8, 128, 28, 128, 3, 1, 1, 1 },
  { "resnet/128x28-256", 8, 128, 28, 256, 3, 2, 1, 1 },
  { "resnet/128x28-256-1x1", 8, 128, 28, 256, 1, 2, 0, 1 },
  { "resnet/256x14", 8, 256, 14, 256, 3, 1, 1, 1 },
  { "resnet/256x14-512", 8, 256, 14, 512, 3, 2, 1, 1 },
  { "resnet/256x14-512-1x1", 8, 256, 14, 512, 1, 2, 0, 1 },
  { "resnet/512x7", 8, 512, 7, 512, 3, 1, 1, 1 },
  { "unet/3x32-64", 16, 3, 32, 64, 3, 1, 1, 1 },
  { "unet/64x32", 16, 64, 32, 64, 3, 1, 1, 1 },
  { "unet/64x32-down", 16, 64, 32, 64, 3, 2, 1, 1 },
  { "unet/64x16-128", 16, 64, 16, 128, 3, 1, 1, 1 },
  { "unet/128x16", 16, 128, 16, 128, 3, 1, 1, 1 },
  { "unet/128x8", 16, 128, 8, 128, 3, 1, 1, 1 },
  { "unet/256x8-128", 16, 256, 8, 128, 3, 1, 1, 1 },
  { "unet/256x16-128", 16, 256, 16, 128, 3, 1, 1, 1 },
  { "unet/128x32-up", 16, 128, 32, 128, 3, 1, 1, 1 },
  { "unet/192x32-64", 16, 192, 32, 64, 3, 1, 1, 1 },
  { "unet/192x32-64-1x1", 16, 192, 32, 64, 1, 1, 0, 1 },
  { "unet/64x32-3", 16, 64, 32, 3, 3, 1, 1, 1 },
  { "convnext/stem", 4, 3, 224, 96, 4, 4, 0, 1 },
  { "convnext/depthwise-96x56", 4, 96, 56, 96, 7, 1, 3, 96 },
  { "convnext/depthwise-192x28", 4, 192, 28, 192, 7, 1, 3, 192 },
  { "convnext/depthwise-384x14", 4, 384, 14, 384, 7, 1, 3, 384 },
  { "convnext/depthwise-768x7", 4, 768, 7, 768, 7, 1, 3, 768 },
  { "convnext/96x56-192-2x2", 4, 96, 56, 192, 2, 2, 0, 1 },
}

local items = { means = { forward = 1.2, ["forward and backward"] = 1.2 } }

for _, layer in ipairs(layers) do
  local name, n, c, size, out, kernel, stride, padding, groups = table.unpack(layer)
  local rows = (size + 2 * padding - kernel) // stride + 1
  local flops = 2 * n * out * rows * rows * (c // groups) * kernel * kernel
  local depthwise, image = groups > 1, c == 3
  local forward, of_input, of_weight = flops, flops, flops
  if kernel == 3 and stride == 1 and groups == 1 then
    forward, of_input, of_weight = winograd.work(n, c, out, rows, rows)
  end
  local function tensors() return ty.randn(n, c, size, size), ty.randn(out, c // groups, kernel, kernel) end
  local arguments = { n = n, c = c, size = size, out = out, kernel = kernel, stride = stride, padding = padding,
    groups = groups }
  local limit = kernel == 3 and c >= 64 and out >= 64 and 0.85 or nil
  items[#items + 1] = { name = name .. "/fwd", mean = "forward", work = { f32 = forward },
    peer = { "forward", arguments }, bars = { peer = 1, limit = limit }, setup = function()
      local x, w = tensors()
      return function() ty.conv2d(x, w, nil, stride, padding, 1, groups):free() end
    end }
  items[#items + 1] = { name = name .. "/fwd+bwd", mean = "forward and backward",
    work = { f32 = forward + of_weight + (image and 0 or of_input) }, peer = { "both", arguments },
    bars = { peer = depthwise and 3 or 1, limit = limit }, setup = function()
      local x, w = tensors()
      -- Nobody wants the gradient of an image.
      return calls.both(image and { w } or { x, w }, ty.randn(n, out, rows, rows), function()
        return ty.conv2d(x, w, nil, stride, padding, 1, groups)
      end)
    end }
end

-- In bf16, of which the limit is the products as they are: transforms that spare some would have to be of f32.
local in_halves = { ["resnet/64x56"] = true, ["resnet/64x56-128"] = true, ["resnet/256x14"] = true,
  ["resnet/256x14-512-1x1"] = true, ["unet/128x16"] = true, ["unet/192x32-64-1x1"] = true }

for _, layer in ipairs(layers) do
  local name, n, c, size, out, kernel, stride, padding = table.unpack(layer)
  local rows = (size + 2 * padding - kernel) // stride + 1
  local flops = 2 * n * out * rows * rows * c * kernel * kernel
  local function tensors()
    return ty.randn(n, c, size, size):to "bf16", ty.randn(out, c, kernel, kernel):to "bf16"
  end
  local arguments = { n = n, c = c, size = size, out = out, kernel = kernel, stride = stride, padding = padding,
    groups = 1, dtype = "bf16" }
  if in_halves[name] then
    items[#items + 1] = { name = name .. "/bf16/fwd", mean = "forward", work = { bf16 = flops }, bars = { peer = 1 },
      peer = { "forward", arguments }, setup = function()
        local x, w = tensors()
        return function() ty.conv2d(x, w, nil, stride, padding):free() end
      end }
    items[#items + 1] = { name = name .. "/bf16/fwd+bwd", mean = "forward and backward", work = { bf16 = 3 * flops },
      bars = { peer = 1 }, peer = { "both", arguments }, setup = function()
        local x, w = tensors()
        return calls.both({ x, w }, ty.randn(n, out, rows, rows):to "bf16", function()
          return ty.conv2d(x, w, nil, stride, padding)
        end)
      end }
  end
end

return items
