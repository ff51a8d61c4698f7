--- Pictures for generators that a recipe trains from nothing: one object of a few kinds on a plain ground, 32 x 32, and
-- how drawn ones are judged, by scene-resnet (which knows scenes of 64 x 64: pictures are made larger for it).
--
--     local single = zoo.single()
--     local training = single:data("training", 2000)     -- image f32 [n, 3, 32, 32] from -1 to 1, label i64 [n]
--     print(single:measure(pictures, labels).recognised)
local ty = require "tycho"
local arguments = require "tycho.arguments"
local datasets = require "tycho.datasets"
local diffusion = require "tycho.diffusion"
local shelf = require "tycho.zoo.shelf"

local expect = arguments.expect

--- Pictures of single objects and their judge.
---@class SingleObjects
---@field kinds string[]  names of the labels, from 0
local Single = {}
Single.__index = Single
Single.__name = "SingleObjects"

--- options: kinds (names of objects of datasets.scenes), real (300: validation pictures that drawn ones are compared
-- with), small (false: without objects that are drawn small), colours ({ "natural" }: looks of the objects).
---@param options? table
---@return SingleObjects
local function new(options)
  local o = arguments.read("zoo.single", options, { kinds = { "apple", "banana", "strawberry", "watermelon", "carrot",
    "fish", "star", "heart" }, real = 300, small = false, colours = { "natural" } }, { kinds = "a list of strings",
    real = "an integer >= 2", small = "a boolean", colours = "a list of strings" })
  local self = setmetatable({ kinds = o.kinds, o = o, number = {} }, Single)
  for i, object in ipairs(datasets.scenes.objects) do self.number[object.name] = i - 1 end
  for _, kind in ipairs(o.kinds) do
    if not self.number[kind] then
      arguments.fail("zoo.single: kinds: expected names of objects of scenes, got '%s'", kind)
    end
  end
  return self
end

--- The first `count` pictures of a split, f32 [n, 3, 32, 32] from -1 to 1, with their kinds, i64 [n], and where the
-- middle of each object is, f32 [n, 2]: x and y, from 0 to 1.
---@param split string
---@param count integer
---@return { image: Tensor, label: Tensor, place: Tensor }
function Single:data(split, count)
  expect("SingleObjects:data", "count", count, "an integer >= 1")
  local set = datasets.load("scenes", { split = split, size = 32, fields = { "image", "scene", "boxes" },
    objects = { 1, 1 }, objects_of = self.kinds, rotation = 0, backgrounds = { "plain" }, colours = self.o.colours })
  local images, labels, places, at, found = {}, {}, {}, 0, 0
  local of_number = {}
  for i, kind in ipairs(self.kinds) do of_number[self.number[kind]] = i - 1 end
  while found < count do
    local batch, rows = set:batch(ty.arange(at, at + 256)), {}
    for r, scene in ipairs(batch.scene) do
      local object = scene.objects[1]
      if found < count and (self.o.small or object.size ~= "small") then
        found, rows[#rows + 1] = found + 1, r - 1
        labels[found] = of_number[object.object]
      end
    end
    local chosen = ty.tensor(rows, { dtype = "i64" })
    local boxes = batch.boxes:select(1, 0):narrow(1, 1, 4):index_select(0, chosen):to "f32"
    images[#images + 1] = batch.image:index_select(0, chosen):to "f32" / 127.5 - 1
    places[#places + 1] = (boxes:narrow(1, 0, 2) + boxes:narrow(1, 2, 2)) / 64
    at = at + 256
  end
  return { image = ty.concat(images, 0), label = ty.tensor(labels, { dtype = "i64" }), place = ty.concat(places, 0) }
end

--- What scene-resnet makes of pictures before it decides, f32 [n, width].
---@param pictures Tensor  [n, 3, 32, 32] from -1 to 1
---@return Tensor
function Single:features(pictures)
  expect("SingleObjects:features", "pictures", pictures, "a tensor")
  self.judge = self.judge or shelf.load "scene-resnet"
  local list, n = {}, pictures.shape[1]
  ty.no_grad(function()
    for first = 0, n - 1, 50 do
      list[#list + 1] = ty.scope(function()
        local x = pictures:narrow(0, first, math.min(50, n - first)):clamp(-1, 1)
        return self.judge:features(x:interpolate({ 64, 64 }, { mode = "bilinear" }))
      end)
    end
  end)
  return ty.concat(list, 0)
end

--- How good drawn pictures are: recognised, the share whose likeliest kind, among those there are, is what was asked
-- for; frechet, their distance to real pictures of the validation part. Both by scene-resnet. The distance depends on
-- the number of pictures: compare equal ones.
---@param pictures Tensor
---@param labels Tensor  i64 [n]
---@return { recognised: number, frechet: number }
function Single:measure(pictures, labels)
  expect("SingleObjects:measure", "labels", labels, "a tensor")
  if not self.real then
    local moments = diffusion.measure.moments(self:features(self:data("validation", self.o.real).image))
    self.real = { mean = ty.keep(moments.mean), cov = ty.keep(moments.cov), count = moments.count }
  end
  local columns, features = {}, self:features(pictures)
  for i, kind in ipairs(self.kinds) do columns[i] = self.number[kind] end
  local scores = ty.no_grad(function() return self.judge.fc(features) end)
  return { recognised = scores:index_select(1, ty.tensor(columns)):argmax(1):eq(labels):to("f64"):mean():item(),
    frechet = diffusion.measure.frechet(features, self.real) }
end

return new
