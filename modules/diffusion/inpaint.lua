--- Painting a part of a picture anew: parts of a sampler.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local expect, fail, describe = arguments.expect, arguments.fail, arguments.describe
local M = {}

local function check(who, name, x, dims)
  expect(who, name, x, "a tensor")
  if x.ndim ~= dims then fail("%s: %s: expected %d dimensions, got %s", who, name, dims, describe(x)) end
end

--- A part that keeps what the mask leaves: after each step, where the mask is 0 the sample becomes the original with as
-- much of the noise as there is at that point, and at the end the original itself. For any network. As Lugmayr et al.
-- 2022 ("RePaint"), algorithm 1 without going back, with one noise for all steps as diffusers has it.
---@param original Tensor  [n, c, h, w], clean
---@param mask Tensor      [n or 1, 1, h, w]: 1 where something new comes, 0 where the original stays
---@param noise Tensor     like original
---@return table part
function M.keep(original, mask, noise)
  local who = "inpaint.keep"
  check(who, "original", original, 4)
  check(who, "mask", mask, 4)
  check(who, "noise", noise, 4)
  mask = mask:to { device = original.device }:gt(0.5)
  return { advance = function(_, run, next, prediction, to)
    local x = next(prediction, to)
    local last = run.step + 1 == #run.points
    local known = last and original or run.schedule:mix(original, noise, to.alpha, to.sigma)
    return ty.where(mask, x, known:to(x.dtype))
  end }
end

--- A part for networks that were trained to paint parts anew (diffusers' U-Nets with 4 + 1 + 4 channels for latents of
-- 4): they see the mask and what it leaves of the picture beside the sample. Rombach et al. 2022, section 4.5.
---@param mask Tensor   [n or 1, 1, h, w]: 1 where something new comes
---@param masked Tensor [n or 1, c, h, w]: the latents of the picture that is grey under the mask
---@return table part
function M.channels(mask, masked)
  local who = "inpaint.channels"
  check(who, "mask", mask, 4)
  check(who, "masked", masked, 4)
  return { call = function(_, _, next, request)
    local x, n = request.x, request.x.shape[1]
    local function fit(y)
      y = y:to { dtype = x.dtype, device = x.device }
      if y.shape[1] == 1 then return y:expand { n, y.shape[2], y.shape[3], y.shape[4] } end
      local copies = {}
      for i = 1, n // y.shape[1] do copies[i] = y end -- once for each branch
      return ty.concat(copies, 0)
    end
    local seen = {}
    for key, value in pairs(request) do seen[key] = value end
    seen.x = ty.concat({ x, fit(mask), fit(masked) }, 1)
    return next(seen)
  end }
end

return M
