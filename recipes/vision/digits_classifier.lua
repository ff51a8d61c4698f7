-- Handwritten digits, classified
-- claim: a small residual network reads 8 x 8 handwritten digits that it has not seen, at least 97 % of them
-- system: ResNet
-- paper: He et al. 2016, "Deep Residual Learning for Image Recognition"
-- time: half a minute on two CPU cores
local ty = require "tycho"
local vision = require "tycho.vision"

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "steps", 500, "training steps of 64 images", quick = 20 },
    { "width", 32, "channels of the first stage" },
  },
}

local accuracies, lines = {}, {}
for run, seed in ipairs(r.seeds) do -- each with its own split
  ty.manual_seed(seed)
  local training, held_out = ty.data.digits { split = { 0.8, 0.2 }, seed = seed }
  local model = vision.ResNet {
    in_channels = 1, classes = 10, small = true, channels = { r.args.width, 2 * r.args.width }, blocks = { 1, 1 },
    dropout = 0.2,
  }
  model:to(r.device)
  if run == 1 then r:say("%s", model) end
  local losses = vision.fit(model, training, { steps = r.args.steps, seed = seed, title = "seed " .. seed })
  accuracies[run] = vision.accuracy(model, held_out)
  lines[run] = { y = losses, label = "seed " .. seed }
  r:say("seed %d: %.2f %% of %d held-out digits", seed, 100 * accuracies[run], #held_out)
  if run == 1 then model:save(r:path "model.safetensors") end
end

ty.plot.line { series = lines, title = "Cross entropy", x_label = "step", y_label = "loss", log_y = true }
  :save(r:path "loss.svg"):save(r:path "loss.png")

os.exit(r:finish {
  { claim = "held-out accuracy, worst seed", measured = math.min(table.unpack(accuracies)), bar = 0.97 },
  { claim = "held-out accuracy, mean", values = accuracies, bar = 0.97 },
}, true)
