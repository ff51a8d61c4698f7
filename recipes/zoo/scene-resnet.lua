-- A judge of scenes: a residual network
-- claim: of 90 objects it ranks the scenes that show one before those that do not, at a mean average precision of 0.95
-- system: a ResNet of 1.2 million parameters for 64 x 64 pictures
-- paper: He et al. 2016, "Deep Residual Learning for Image Recognition"
-- time: 2 hours a seed on one CPU core
--
-- It learns what scene-vit learns, from the same scenes: 1,900 sentences that are true or not, and the subgroup of an
-- emoji. What it sees it finds by other means, so it is a second judge where a method works with the first. BatchNorm
-- sees scenes and single emoji in one batch.
local ty = require "tycho"
local models, zoo = require "tycho.models", require "tycho.zoo"

local r = ty.recipe.declare { seeds = 2, recorded_seeds = 2, base = true,
  args = zoo.scenes.arguments({ steps = 10000, batch = 64, lr = 2e-3, every = 1000, quick = 4, quick_count = 40 }, {
    { "channels", { 16, 48, 96, 192 }, "of each stage", quick = { 8, 8, 8, 8 } },
    { "blocks", { 1, 1, 2, 1 }, "of each stage", quick = { 1, 1, 1, 1 } },
  }) }
local labels = zoo.judge.labels()

local channels = r.args.channels

local rows = zoo.judge.rows(r, function()
  local model = models.ResNet { channels = channels, blocks = r.args.blocks, small = true,
    classes = #labels }
  -- Few sentences are true, and no steps are spent to learn that.
  ty.no_grad(function() model.fc.bias:fill_(-5) end)
  return model
end, zoo.judge.see_maps, channels[#channels])
if r.args.publish then zoo.publish(r, rows, function(folder) zoo.scenes.write(r, folder) end) end
os.exit(r:finish(rows), true)
