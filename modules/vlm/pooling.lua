--- Fewer tokens of a picture: its features are averaged over a coarser grid before the projector takes them to the
-- language model. Pre-training on captions can do with few of them, where questions want all. Wang et al. 2025,
-- "Open-Qwen2VL: Compute-Efficient Pre-Training of Fully-Open Multimodal LLMs on Academic Resources" (arXiv
-- 2504.00595), which pools 729 to 144.
--
--     local seen = vlm.pooling.seen(llava, pictures)                 -- once, where the tower stays as it is
--     local few = vlm.pooling.features(llava, seen, 4)               -- 16 of each picture
--     llava:loss(tokens, targets, { features = few })
local ty = require "tycho"
local arguments = require "tycho.arguments"

local M = {}

local function check(who, seen)
  local side = ty.is_tensor(seen) and seen.ndim == 3 and math.tointeger(seen.shape[2] ^ 0.5)
  if not side or side < 1 then
    arguments.fail("%s: seen: expected a tensor [n, side * side, width], got %s", who, arguments.describe(seen))
  end
  return side
end

--- What a model's tower gives of pictures [n, channels, height, width], without the class and before the projector:
-- [n, places, width].
---@param model Llava
---@param pictures Tensor
---@return Tensor seen
function M.seen(model, pictures)
  local who = "vlm.pooling.seen"
  arguments.expect(who, "model", model, "a module")
  arguments.expect(who, "pictures", pictures, "a tensor")
  if not model.vision_tower or not model.multi_modal_projector then
    arguments.fail("%s: model: expected a model that sees, got %s", who, arguments.describe(model))
  end
  local x = model.vision_tower:hidden(pictures, { layer = model.config.vision_feature_layer })
  if type(x) == "table" then x = ty.concat(x, 2) end
  return x:narrow(1, 1, x.shape[2] - 1)
end

--- Features [n, places, width] of a square of places, row by row, averaged over a grid of side * side:
-- [n, side * side, width]. With the side that they have they are what they were.
---@param seen Tensor
---@param side integer
---@return Tensor
function M.pool(seen, side)
  local who = "vlm.pooling.pool"
  local own = check(who, seen)
  arguments.expect(who, "side", side, "an integer > 0")
  if side > own then arguments.fail("%s: side: expected at most the %d of the features, got %d", who, own, side) end
  if side == own then return seen end
  local n, width = seen.shape[1], seen.shape[3]
  local maps = seen:transpose(1, 2):reshape(n, width, own, own)
  return ty.adaptive_avg_pool2d(maps, { side, side }):flatten(2):transpose(1, 2)
end

--- What the language model gets of features that seen() gave: pooled to side * side, then through the projector,
-- [n, side * side, hidden]. Without a side all of them.
---@param model Llava
---@param seen Tensor
---@param side? integer
---@return Tensor features
function M.features(model, seen, side)
  local who = "vlm.pooling.features"
  arguments.expect(who, "model", model, "a module")
  local own = check(who, seen)
  if not model.multi_modal_projector then
    arguments.fail("%s: model: expected a model that sees, got %s", who, arguments.describe(model))
  end
  return model.multi_modal_projector(M.pool(seen, side or own))
end

return M
