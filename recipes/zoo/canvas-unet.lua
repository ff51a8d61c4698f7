-- A small U-Net that draws canvases from words
-- claim: of what captions ask for a judge finds nine tenths of styles, kinds and grounds
-- system: a UNet2DConditionModel with words by cross-attention, in the shape of Stable Diffusion's, of pixels
-- paper: Rombach et al. 2022, "High-Resolution Image Synthesis with Latent Diffusion Models"
-- time: 18 minutes on one CPU core
--
-- There is no autoencoder: 4 x 4 pixels are folded into channels. Words are attended to at 4 x 4 places alone; what a
-- style does to pixels the convolutions make of that. It learns to say the clean picture, with Muon: 48 numbers of
-- noise at each place are nearly as many as it has channels, and a network that had to say velocities still drew noise
-- after as many steps. Half of the things that it sees are dyed and marked; a sixth of kind, colour and marks together
-- it never sees, and six kinds of things.
local ty = require "tycho"
local datasets, diffusion = require "tycho.datasets", require "tycho.diffusion"
local hub, zoo = require "tycho.hub", require "tycho.zoo"

local r = ty.recipe.declare { seeds = 1, recorded_seeds = 2, base = true, args = {
  { "steps", 6000, "training steps", quick = 2 },
  { "batch", 32, "pictures of a step", quick = 4 },
  { "lr", 0.03, "peak learning rate of matrices" },
  { "guidance", 2.0, "scale of classifier-free guidance in drawing" },
  { "drawing_steps", 12, "steps of drawing", quick = 2 },
  { "count", 192, "pictures to measure with", quick = 6 },
  { "every", 800, "steps between looks" },
  { "resume", false, "go on from the checkpoints in the results folder", place = true },
  { "publish", false, "write the first seed's model to zoo/", place = true },
} }
local args = r.args
local judge

-- Captions of a split drawn by a painter, and shares of what they ask for that the judge sees.
local function measure(painter, split, dyed, count, styles)
  judge = judge or zoo.canvas.judge()
  local batch = datasets.load("canvas", { split = split, dyed = dyed, styles = styles }):batch(ty.arange(count))
  local pictures = painter:paint(batch.caption, { steps = args.drawing_steps, guidance = args.guidance, seed = 7 })
  local labels = zoo.canvas.labels(batch)
  return judge:shares(pictures, labels), judge:shares(batch.image, labels), pictures
end

local found = {}
local function note(i, name, shares)
  for key, value in pairs(shares) do
    local list = name .. "/" .. key
    found[list] = found[list] or {}
    found[list][i] = value
  end
end

-- Trains a painter of canvases.
local function train(seed)
  local painter = zoo.canvas.painter { widths = r.quick and { 8, 8 } or nil, text = r.quick and 16 or 64,
    device = r.device }
  r:say("seed %d: %d parameters", seed,
    painter.network:count_parameters() + painter.text_encoder:count_parameters())
  local folder = r:path("seed" .. seed)
  zoo.canvas.train(painter, { steps = args.steps, batch = args.batch, lr = args.lr, seed = seed,
    average = r.quick and 0 or 0.997, every = args.every, folder = folder .. "/checkpoint", log = folder,
    resume = args.resume and "auto" or false, evaluate = function(step, m)
      local now = zoo.painter.use(diffusion.TextToImage(painter.pipeline), m.unet, m.text_encoder)
      local grid = zoo.canvas.grid(step % 4)
      local pictures = now:paint(grid.prompts, { steps = args.drawing_steps, guidance = args.guidance, seed = 7 })
      ty.plot.grid(pictures, { columns = 12, scale = 2 }):save(r:path(("seed%d-%d.png"):format(seed, step)))
      return {}
    end })
  hub.save_pipeline(folder .. "/model", painter.pipeline)
  return painter
end

for i, seed in ipairs(r.seeds) do
  ty.manual_seed(seed)
  local shipped = zoo.scenes.shipped(r, seed, hub.pipeline)
  local painter = shipped and diffusion.TextToImage(shipped) or train(seed)
  local shares, real, pictures = measure(painter, "validation", 0, args.count)
  note(i, "drawn", shares)
  note(i, "real", real)
  shares, real = measure(painter, "held_out", 1, args.count // 2, { "plain", "hatched" })
  note(i, "dyed", shares)
  note(i, "dyed real", real)
  if i == 1 then
    ty.plot.grid(pictures:narrow(0, 0, math.min(48, args.count)), { columns = 12, scale = 2 })
      :save(r:picture "canvas-unet.png")
  end
end

local rows = {}
for _, row in ipairs { { "style", "styles that captions ask for, share that the judge sees", 0.9 },
  { "kind", "kinds of things", 0.9 }, { "ground", "grounds", 0.9 } } do
  rows[#rows + 1] = { claim = row[2], values = found["drawn/" .. row[1]], baseline = found["real/" .. row[1]],
    bar = row[3] }
end
for _, name in ipairs { "kind", "colour", "mark" } do
  rows[#rows + 1] = { claim = name .. "s of things dyed as none before, in plain and hatched pictures",
    values = found["dyed/" .. name], baseline = found["dyed real/" .. name], judged = false }
end
if args.publish then
  zoo.publish(r, rows, function(folder)
    hub.save_pipeline(folder, hub.pipeline(r:path("seed" .. r.seeds[1]) .. "/model", { dtype = "f16" }))
  end)
end
os.exit(r:finish(rows), true)
