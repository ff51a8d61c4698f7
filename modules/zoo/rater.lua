--- A small network that rates how complex scenes are, in a few levels: what adaptive encoders ask before they look. It
-- is trained where it is wanted, in seconds, by the scenes' true complexity (datasets.scenes.complexity).
--
--     local rater = zoo.rater.train { levels = 5, seed = 0 }
--     local logits = rater(zoo.rater.pool(pictures))           -- [n, levels]; vlm.icar.complexity makes a number of it
local ty = require "tycho"
local arguments = require "tycho.arguments"
local datasets = require "tycho.datasets"
local models = require "tycho.models"
local scenes = require "tycho.zoo.scenes"
local vision = require "tycho.vision"

local M = {}

local AFTER = 90000 -- training scenes from here on are none that a rater learns from: those before, counted back

--- Pictures [n, 3, h, w] at a quarter of their sides, which is what a rater sees.
---@param pictures Tensor
---@return Tensor
function M.pool(pictures)
  arguments.expect("zoo.rater.pool", "pictures", pictures, "a tensor")
  return ty.avg_pool2d(pictures, 4)
end

--- The levels of numbers, i64 [n]: how many of levels - 1 edges each is above, the edges dividing the numbers in equal
-- parts.
---@param values Tensor  [n]
---@param levels integer
---@return Tensor
function M.levels(values, levels)
  arguments.expect("zoo.rater.levels", "values", values, "a tensor")
  arguments.expect("zoo.rater.levels", "levels", levels, "an integer >= 2")
  local sorted, level = values:sort():tolist(), ty.zeros_like(values)
  for k = 1, levels - 1 do level = level + values:gt(sorted[k * #sorted // levels]):to(values.dtype) end
  return level:to "i64"
end

--- A rater that is trained with a seed, on scenes of its own for each. options: levels (5), scenes (4000), steps (300),
-- lr (5e-3), batch (64), seed (0), device ("cpu").
---@param options? { levels?: integer, scenes?: integer, steps?: integer, lr?: number, batch?: integer, seed?: integer,
---  device?: string }
---@return ResNet
function M.train(options)
  local who = "zoo.rater.train"
  local count = "an integer >= 1"
  local o = arguments.read(who, options, { levels = 5, scenes = 4000, steps = 300, lr = 5e-3, batch = 64, seed = 0,
    device = "cpu" }, { levels = "an integer >= 2", scenes = count, steps = count, lr = "a finite number > 0",
    batch = count, seed = "an integer >= 0" })
  if (o.seed + 1) * o.scenes > AFTER then
    arguments.fail("%s: seed: expected one below %d, with %d scenes each, got %d", who, AFTER // o.scenes, o.scenes,
      o.seed)
  end
  local batch = scenes.set("training", { "image", "scene" }):batch(ty.arange(AFTER - (o.seed + 1) * o.scenes,
    AFTER - o.seed * o.scenes))
  local level = M.levels(ty.tensor(datasets.scenes.complexity(batch.scene)), o.levels)
  ty.manual_seed(o.seed)
  local rater = ty.nn.with_defaults({ device = o.device }, function()
    return models.ResNet { channels = { 8, 16, 32 }, blocks = { 1, 1, 1 }, small = true, classes = o.levels }
  end)
  local set = ty.data.TensorDataset { image = M.pool(scenes.pictures(batch.image)), label = level }
  vision.fit(rater, set, { steps = o.steps, batch_size = math.min(o.batch, o.scenes), lr = o.lr, seed = o.seed,
    quiet = true, device = o.device })
  return rater:eval()
end

return M
