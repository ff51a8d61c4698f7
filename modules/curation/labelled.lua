--- The images and labels of a set as methods of this module take them, or an error that names what came.
local arguments = require "tycho.arguments"

--- set: { image = Tensor [n, ...], label = i64 [n] } with n > 0; where `soft` allows it, label may be shares of each
-- class of each sample, floats [n, classes].
---@param who string
---@param what string  the argument's name
---@param set table
---@param soft? boolean
---@return Tensor image
---@return Tensor label
---@return integer n
return function(who, what, set, soft)
  arguments.expect(who, what, set, "a table")
  local image, label = set.image, set.label
  arguments.expect(who, what .. ".image", image, "a tensor")
  arguments.expect(who, what .. ".label", label, "a tensor")
  local hard = label.ndim == 1 and label.dtype == "i64"
  local shares = soft and label.ndim == 2 and label:is_floating_point()
  if not (hard or shares) or label.shape[1] < 1 or image.ndim < 2 or image.shape[1] ~= label.shape[1] then
    arguments.fail("%s: %s: expected images [n, ...] and labels i64 [n]%s with n > 0, got %s and %s", who, what,
      soft and " or shares [n, classes]" or "", arguments.describe(image), arguments.describe(label))
  end
  return image, label, label.shape[1]
end
