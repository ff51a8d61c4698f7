--- Decoding pictures of datasets: all of each, or a part of it at one size.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local M = {}

--- Endings of the names of files that are decoded.
M.endings = { png = true, jpg = true, jpeg = true, webp = true }

--- The options of a reader of pictures, with its own ones: defaults and kinds for arguments.read.
---@param own table
---@return table defaults
---@return table kinds
function M.options(own)
  own.channels, own.size, own.crop = 0, arguments.none, "center"
  own.scale, own.ratio = { 0.08, 1 }, { 3 / 4, 4 / 3 }
  return own, { channels = "an integer in [0, 4]", crop = '"center" or "random" or "none"',
    size = "an integer in [1, 65535] or a pair of integers in [1, 65535]", scale = "a pair of numbers in (0, 1]",
    ratio = "a pair of numbers > 0" }
end

-- What of a picture of h x w pixels is decoded.
local function part_of(o, h, w, size)
  if o.crop == "random" then
    return { require("tycho.data.transforms.geometry").random_place(h, w, o.scale, o.ratio) }
  elseif o.crop == "center" then -- the largest part in the middle with the proportions of the size
    local scale = math.min(h / size[1], w / size[2])
    local height, width = math.min(h, size[1] * scale), math.min(w, size[2] * scale)
    return { (h - height) / 2, (w - width) / 2, height, width }
  end
  return nil
end

--- The picture of a file's bytes, u8 [c, h, w], by such options.
---@param bytes string
---@param o table
---@return Tensor
function M.decode(bytes, o)
  if not o.size then return ty.io.decode_image(bytes, { channels = o.channels }) end
  local size = type(o.size) == "number" and { o.size, o.size } or o.size
  local _, h, w = ty.io.image_size(bytes)
  return ty.io.decode_image(bytes, { channels = o.channels, crop = part_of(o, h, w, size), size = size })
end

return M
