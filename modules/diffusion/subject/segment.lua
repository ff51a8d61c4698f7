--- Where the thing is in a picture of one thing on an even ground: what differs from the ground, which the border
-- shows. It stands where the paper has segmentation by words.
local ty = require "tycho"
local arguments = require "tycho.arguments"

--- A mask f32 [n, 1, h, w] of pictures u8 or f32 from 0 to 255 [n, 3, h, w]: 1 where the largest difference of a colour
-- from the border's median is above `least` (24), and around it by a pixel.
---@param pictures Tensor
---@param least? number
---@return Tensor
return function(pictures, least)
  local who = "subject.segment"
  arguments.expect(who, "pictures", pictures, "a tensor")
  arguments.expect(who, "least", least, "a finite number or nil")
  if pictures.ndim ~= 4 then
    arguments.fail("%s: pictures: expected [n, 3, h, w], got %s", who, arguments.describe(pictures))
  end
  local x = pictures:to "f32"
  local h, w = x.shape[3], x.shape[4]
  local border = ty.concat({ x:narrow(2, 0, 1):flatten(2), x:narrow(2, h - 1, 1):flatten(2),
    x:narrow(3, 0, 1):flatten(2), x:narrow(3, w - 1, 1):flatten(2) }, 2)
  local ground = border:sort(2):select(2, border.shape[3] // 2):unsqueeze(-1):unsqueeze(-1)
  local mask = (x - ground):abs():amax({ 1 }, true):gt(least or 24):to "f32"
  return (ty.max_pool2d(mask, { 3, 3 }, { stride = { 1, 1 }, padding = { 1, 1 } }))
end
