--- Pictures as rows of patches and back: patchify, unpatchify, PatchEmbed.
local base = require "tycho.nn.module"
local init = require "tycho.nn.initial"
local layers = require "tycho.nn.layers"
local options = require "tycho.nn.options"

local M = {}

--- Cuts pictures x [n, channels, rows * patch, columns * patch] into patches, row by row:
-- [n, rows * columns, patch * patch * channels], in a patch line by line with the channels innermost.
---@param x Tensor
---@param patch integer  height and width of a patch
---@return Tensor
function M.patchify(x, patch)
  options.positive("patchify", "patch", patch)
  options.expect("patchify", "x", x, "a tensor")
  local shape = x.shape
  if #shape ~= 4 or shape[3] % patch ~= 0 or shape[4] % patch ~= 0 then
    error(("patchify: x: expected [n, channels, height, width] with sides that patch %d divides, got [%s]"):format(
      patch, table.concat(shape, ", ")), 2)
  end
  local n, c, rows, columns = shape[1], shape[2], shape[3] // patch, shape[4] // patch
  x = x:reshape(n, c, rows, patch, columns, patch):permute(0, 2, 4, 3, 5, 1)
  return x:reshape(n, rows * columns, patch * patch * c)
end

--- Puts patches [n, rows * columns, patch * patch * channels] together: [n, channels, rows * patch, columns * patch],
-- what patchify took apart.
---@param x Tensor
---@param patch integer
---@param rows integer
---@param columns? integer  (rows)
---@return Tensor
function M.unpatchify(x, patch, rows, columns)
  options.expect("unpatchify", "x", x, "a tensor")
  options.positive("unpatchify", "patch", patch)
  options.positive("unpatchify", "rows", rows)
  columns = options.positive("unpatchify", "columns", columns or rows)
  local shape = x.shape
  if #shape ~= 3 or shape[2] ~= rows * columns or shape[3] % (patch * patch) ~= 0 then
    error(("unpatchify: x: expected [n, %d, channels * %d], got [%s]"):format(rows * columns, patch * patch,
      table.concat(shape, ", ")), 2)
  end
  local n, c = shape[1], shape[3] // (patch * patch)
  x = x:reshape(n, rows, columns, patch, patch, c):permute(0, 5, 1, 3, 2, 4)
  return x:reshape(n, c, rows * patch, columns * patch)
end

--- A linear layer on each patch of a picture: [n, channels, h, w] to [n, h / patch * w / patch, width]. Its weight is
-- that of a convolution, as the published vision transformers have it. Dosovitskiy et al. 2021.
---@overload fun(channels: integer, width: integer, patch: integer, options?: {bias?: boolean}): Module
local PatchEmbed = base.define "PatchEmbed"
M.PatchEmbed = PatchEmbed

function PatchEmbed:init(channels, width, patch, given)
  local o = options.read("PatchEmbed", given, { bias = true })
  options.positive("PatchEmbed", "patch", patch)
  self.proj = layers.Conv2d(channels, width, patch, { stride = patch, bias = o.bias })
  if self.proj.weight.device == "meta" then return end
  local bound = math.sqrt(6 / (channels * patch * patch + width)) -- of a linear layer over the flattened patch
  init.uniform(self.proj.weight, -bound, bound)
  if o.bias then init.zeros(self.proj.bias) end
end

function PatchEmbed:forward(x) return self.proj(x):flatten(2):transpose(1, 2) end

return M
