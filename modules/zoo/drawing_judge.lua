--- A judge of drawn scenes: scene-resnet, tuned to say of pictures that a decoder has blurred, or that flicker, the
-- same as of clean ones. As it ships it misses in one of six real pictures, once they went through the autoencoder,
-- what it saw before; so it judged edges and not things. Nothing that a painter drew is trained on, and the scenes are
-- of a seed of their own.
--
--     local judge = zoo.drawing_judge.tune { set = scenes, steps = 1000 }
--     local logits = judge:scores(pictures)       -- [n, statements.count] of datasets.scenes.statements
local ty = require "tycho"
local arguments = require "tycho.arguments"
local datasets = require "tycho.datasets"
local geometry = require "tycho.datasets.scenes.geometry"
local judge = require "tycho.zoo.judge"
local scenes = require "tycho.zoo.scenes"
local shelf = require "tycho.zoo.shelf"

local nn = ty.nn
local statements = datasets.scenes.statements
local M = {}

-- Maps [n, c, h, w] as [n, c, side, side].
local function resized(x, side, mode, antialias)
  return ty.interpolate(x, { side, side }, nil, mode, nil, antialias)
end

--- Pictures as drawing leaves them: blurred down to a third of their size, by a share of its own for each, with waves
-- of noise of three lengths in the latents' places, to a size of its own too. Two in five stay what they are. Frames of
-- a clip are blurred alike, and their noise is each frame's own, as flicker is.
---@param x Tensor  [n, 3, h, h], from -1 to 1, or [n, 3, frames, h, h]
---@return Tensor
function M.disturb(x)
  arguments.expect("drawing_judge.disturb", "x", x, "a tensor")
  if x.ndim ~= 4 and x.ndim ~= 5 or x.shape[x.ndim] ~= x.shape[x.ndim - 1] then
    arguments.fail("drawing_judge.disturb: x: expected [n, 3, h, h] or [n, 3, frames, h, h], got %s",
      arguments.describe(x))
  end
  local n, frames, side, device = x.shape[1], x.ndim == 5 and x.shape[3] or 1, x.shape[x.ndim], x.device
  local flat = x.ndim == 5 and x:transpose(1, 2):reshape(n * frames, 3, side, side) or x
  local function each() -- a number from 0 to 1 for each picture or clip
    return ty.rand({ n, 1 }, { device = device }):expand(n, frames):reshape(n * frames, 1, 1, 1)
  end
  local noise = 0
  for _, cells in ipairs { side // 8, side // 4, side // 2 } do
    local waves = ty.randn({ n * frames, 3, cells, cells }, { device = device })
    noise = noise + resized(waves, side, "bicubic") * each()
  end
  local blurred = resized(resized(flat, side * 5 // 16, "bilinear", true), side, "bicubic")
  local disturbed = flat:lerp(blurred, each()) + noise * each() * 0.3
  disturbed = ty.where(each():lt(0.6), disturbed, flat)
  return x.ndim == 5 and disturbed:reshape(n, frames, 3, side, side):transpose(1, 2) or disturbed
end

-- ---- the judge ----

--- scene-resnet, and what is on top in each place of its last maps.
---@class DrawingJudge: Module
local DrawingJudge = nn.module("DrawingJudge", judge.Student)

-- The bounds of rows and columns of places: halfway between what words name (datasets.scenes.geometry).
local bands = { { 0, 0.39 }, { 0.39, 0.61 }, { 0.61, 1 } }

-- Which share of each cell of a grid lies at each of the nine places, f32 [side * side, 9].
local function cells_of_places(side)
  local function share(at, band) -- of the cells from at / side on
    return math.max(0, math.min((at + 1) / side, band[2]) - math.max(at / side, band[1])) * side
  end
  local rows = {}
  for y = 0, side - 1 do
    for x = 0, side - 1 do
      local row = {}
      for p = 0, #geometry.places - 1 do row[p + 1] = share(y, bands[p // 3 + 1]) * share(x, bands[p % 3 + 1]) end
      rows[#rows + 1] = row
    end
  end
  return ty.tensor(rows)
end

--- Where objects are, by how much of each the cells of square grids show, f32 [n, cells, objects]: for each object the
-- nine places, [n, objects * 9], above 0 where an object is: where at least half as many cells show it as at the
-- place with most of it, and a quarter of a cell.
---@param shown Tensor
---@return Tensor
function M.places(shown)
  arguments.expect("drawing_judge.places", "shown", shown, "a tensor")
  local side = shown.ndim == 3 and math.tointeger(shown.shape[2] ^ 0.5)
  if not side then
    arguments.fail("drawing_judge.places: shown: expected [n, side * side, objects], got %s", arguments.describe(shown))
  end
  local mass = shown:transpose(1, 2):matmul(cells_of_places(side):to { device = shown.device }) -- [n, objects, 9]
  local enough = (mass:amax(2, true) * 0.5):clamp(0.25)
  return (mass:clamp(1e-6) / enough):log():flatten(1)
end

-- What a network makes of pictures [n, 3, 64, 64], in hundreds: fn(logits, cells) of each, one after the other.
local function in_parts(who, network, pictures, fn)
  arguments.expect(who, "pictures", pictures, "a tensor")
  if pictures.ndim ~= 4 or pictures.shape[1] == 0 then
    arguments.fail("%s: pictures: expected [n, 3, 64, 64], n >= 1, got %s", who, arguments.describe(pictures))
  end
  local list = {}
  for start = 0, pictures.shape[1] - 1, 100 do
    list[#list + 1] = ty.no_grad(ty.scope, function()
      local few = pictures:narrow(0, start, math.min(100, pictures.shape[1] - start)):to { device = network:device() }
      return fn(network(few)):to "cpu"
    end)
  end
  return ty.concat(list, 0)
end

--- What it makes of the sentences of datasets.scenes.statements, f32 [n, count]; a sentence is taken for true above 0.
-- Objects and colours are the network's own logits; places are those of the cells, since means over all of a picture,
-- which the network's own sentences about places are read from, hardly tell them.
---@param pictures Tensor  [n, 3, 64, 64], from -1 to 1
---@return Tensor
function DrawingJudge:scores(pictures)
  local objects = #datasets.scenes.objects
  return in_parts("DrawingJudge:scores", self, pictures, function(logits, said)
    local shown = said:narrow(2, 0, objects + 1):softmax(-1):narrow(2, 0, objects) -- [n, cells, objects]
    local at = M.places(shown)
    return ty.concat({ logits:narrow(1, 0, statements.count - at.shape[2]), at }, 1)
  end)
end

--- At which of the nine places (datasets.scenes.geometry, from 0) most of what is not background is: i64 [n].
---@param pictures Tensor  [n, 3, 64, 64], from -1 to 1
---@return Tensor
function DrawingJudge:where(pictures)
  local objects = #datasets.scenes.objects
  return in_parts("DrawingJudge:where", self, pictures, function(_, said)
    local shown = 1 - said:narrow(2, 0, objects + 1):softmax(-1):select(2, objects) -- [n, cells]
    local side = math.tointeger(shown.shape[2] ^ 0.5)
    return shown:matmul(cells_of_places(side):to { device = shown.device }):argmax(1)
  end)
end

--- A judge that is not tuned yet.
---@param options? { device?: string }
---@return DrawingJudge
function M.new(options)
  local o = arguments.read("drawing_judge.new", options, { device = "cpu" })
  local network = shelf.load("scene-resnet", { dtype = "f32", device = o.device })
  return DrawingJudge(network, judge.see_maps, network.fc.weight.shape[2]):to(o.device)
end

--- Tunes a judge. options: set (scenes with the fields image, statements, owner, boxes and scene), steps (1000), batch
-- (48), lr (1e-3), seed (0), device ("cpu"), and others of train.fit.
---@param options table
---@return DrawingJudge
function M.tune(options)
  arguments.expect("drawing_judge.tune", "options", options, "a table")
  arguments.expect("drawing_judge.tune", "options.set", options.set, "a table")
  local o = { steps = 1000, batch = 48, lr = 1e-3, seed = 0, device = "cpu" }
  for key, value in pairs(options) do o[key] = value end
  local loader = ty.data.DataLoader(o.set, { batch_size = o.batch, shuffle = true, seed = o.seed, drop_last = true,
    device = o.device, workers = 1 })
  local fit = { steps = o.steps, lr = o.lr, weight_decay = 0.02, final = 0.02, average = 0.99, quiet = true,
    title = "judge", loss = function(m, batch)
      local logits, cells = m(M.disturb(scenes.pictures(batch.image)))
      local side = math.tointeger(cells.shape[2] ^ 0.5)
      local said = nn.bce_with_logits(logits:narrow(1, 0, statements.count), batch.statements:to "f32")
      return said * (statements.count / 50) + judge.cell_loss(cells, judge.cells(batch, side))
    end }
  for key, value in pairs(options) do
    if key ~= "set" and key ~= "batch" and key ~= "seed" and key ~= "device" then fit[key] = value end
  end
  local _, averaged = ty.train.fit(M.new { device = o.device }, loader, fit)
  return averaged:eval()
end

return M
