--- What recipes of sampling measure with: a network of the zoo that draws scenes, captions of a split with fixed noise,
-- and how near drawn pictures come to real ones of the same split, by the features of scene-clip's picture tower, of
-- scene-resnet as a second network that nothing is chosen by, and by whether captions are found in them.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local datasets = require "tycho.datasets"
local diffusion = require "tycho.diffusion"
local hub = require "tycho.hub"
local scenes = require "tycho.zoo.scenes"
local shelf = require "tycho.zoo.shelf"
local vision = require "tycho.vision"
local vlm = require "tycho.vlm"

local measure, statements = diffusion.measure, datasets.scenes.statements

--- What recipes of sampling measure with.
---@class Yardstick
---@field painter TextToImage
---@field real table   moments of real pictures' features, or these, by split and network
local Yardstick = {}
Yardstick.__index = Yardstick
Yardstick.__name = "Yardstick"

--- Captions of a split with the noise that is drawn from for each.
---@class YardstickPrompts
---@field split string
---@field captions string[]
---@field asked table[]     what each asks for, as statements.score takes it
---@field seeds integer[]
---@field condition table

local BATCH = 32

local networks = {
  ["scene-clip"] = function(model, x) return model:image_features(x) end,
  ["scene-resnet"] = function(model, x) return model:features(x) end,
}

--- options: model ("scene-dit": one of the zoo, the path of a folder of diffusers, or a TextToImage), device ("cpu"),
-- scenes (what networks of the zoo draw: options of the data set), real (256: real pictures of a split that drawn ones
-- are compared with), size (64: their side in pixels).
---@param options? table
---@return Yardstick
local function new(options)
  local who = "zoo.yardstick"
  local o = ty.nn.options(who, options, { model = "scene-dit", device = "cpu", scenes = scenes.drawn,
    real = 256, size = 64 }, { model = "a string or a table", scenes = "a table", real = "an integer >= 2",
    size = "64 or 128" })
  local self = setmetatable({ judges = {}, real = {}, count = o.real, scenes = o.scenes, size = o.size,
    device = o.device }, Yardstick)
  if type(o.model) == "table" then
    if type(o.model.null) ~= "function" or type(o.model.paint) ~= "function" then
      arguments.fail("%s: model: expected a name or a TextToImage, got %s", who, arguments.describe(o.model))
    end
    self.painter = o.model
  else
    local load = o.model:find "/" and hub.pipeline or shelf.load
    self.painter = diffusion.TextToImage(load(o.model, { device = o.device, dtype = "f32" }))
  end
  self.null = ty.keep(self.painter:null "")
  return self
end

function Yardstick:judge(name)
  self.judges[name] = self.judges[name] or shelf.load(name, { device = self.device })
  return self.judges[name]
end

function Yardstick:set(split, fields)
  local options = { size = self.size }
  for key, value in pairs(self.scenes) do options[key] = value end
  return scenes.set(split, fields, options)
end

--- Captions number first, first + 1, ... (from 0) of a split, each with noise of its own that `seed` changes.
---@param split string
---@param first integer
---@param count integer
---@param seed integer
---@return YardstickPrompts
function Yardstick:prompts(split, first, count, seed)
  local batch = self:set(split, { "caption", "asked" }):batch(ty.arange(first, first + count))
  local seeds = {}
  for i = 1, count do seeds[i] = seed * 1000003 + first + i end
  local rows = {}
  for i = 1, count, BATCH do
    rows[#rows + 1] = self.painter:condition(table.move(batch.caption, i, math.min(i + BATCH - 1, count), 1, {}))
  end
  return { split = split, captions = batch.caption, asked = batch.asked, seeds = seeds,
    condition = ty.keep(diffusion.condition.concat(rows)) }
end

--- Latents that a sampler draws for prompts, and the run of the last batch.
---@param sampler Sampler
---@param prompts YardstickPrompts
---@param options? { network?: Module|function, side?: integer, points?: Point[], batch?: integer, fresh?: function }
---@return Tensor latents
---@return Run run
function Yardstick:draw(sampler, prompts, options)
  local o = ty.nn.options("Yardstick:draw", options, { network = self.painter.network, side = self.size // 4,
    points = ty.nn.none, batch = BATCH }, { network = false, points = "a list of tables" })
  local list, last = {}, nil
  for start = 1, #prompts.seeds, o.batch do
    local count = math.min(o.batch, #prompts.seeds - start + 1)
    local condition = diffusion.condition.narrow(prompts.condition, start - 1, count)
    local x, run = sampler:sample(o.network, { count, 4, o.side, o.side }, { condition = condition, null = self.null,
      points = o.points, seeds = table.move(prompts.seeds, start, start + count - 1, 1, {}) })
    list[#list + 1], last = x, run
  end
  return #list == 1 and list[1] or ty.concat(list, 0), last
end

--- Pictures u8 [n, 3, h, w] of latents.
---@param latents Tensor
---@return Tensor
function Yardstick:decode(latents)
  return ty.nn.in_parts(latents, BATCH, function(x) return self.painter:decode(x) end)
end

--- Features of pictures [n, 3, h, w] of bytes by one of the networks, f32 [n, width]; pictures of other sides than 64
-- are brought to that.
---@param pictures Tensor
---@param by string  "scene-clip" or "scene-resnet"
---@return Tensor
function Yardstick:features(pictures, by)
  local see, model = networks[by], self:judge(by)
  return ty.no_grad(function()
    return ty.nn.in_parts(pictures:to { device = self.device }, BATCH, function(x)
      x = scenes.pictures(x)
      if x.shape[3] > 64 then x = x:avg_pool2d(x.shape[3] // 64) end
      return see(model, x)
    end)
  end)
end

-- Features of real pictures, each as fn makes of it what is looked at.
local function features_of(self, split, by, fn)
  local set = self:set(split, { "image" })
  -- From behind: no captions are taken from there.
  return self:features(fn(set:batch(ty.arange(#set - self.count, #set)).image), by)
end

-- The distance of pictures to real ones.
local function frechet_of(self, pictures, split, by, fn, how)
  local key = split .. "/" .. by .. how
  if not self.real[key] then
    local moments = measure.moments(features_of(self, split, by, fn))
    self.real[key] = { mean = ty.keep(moments.mean), cov = ty.keep(moments.cov), count = moments.count }
  end
  return measure.frechet(self:features(fn(pictures), by), self.real[key])
end

local function same(x) return x end

--- The Fréchet distance of pictures to real ones of a split, in a network's features.
---@param pictures Tensor
---@param split string
---@param by? string  ("scene-clip")
---@return number
function Yardstick:frechet(pictures, split, by)
  return frechet_of(self, pictures, split, by or "scene-clip", same, "")
end

--- The kernel distance of pictures to real ones of a split, in a network's features (measure.kernel): unbiased, so that
-- it tells few pictures apart, where what the Fréchet distance has of their number hides the rest.
---@param pictures Tensor
---@param split string
---@param by? string  ("scene-clip")
---@return number
function Yardstick:kernel(pictures, split, by)
  by = by or "scene-clip"
  local key = split .. "/" .. by .. "/features"
  self.real[key] = self.real[key] or ty.keep(features_of(self, split, by, same))
  return (measure.kernel(self:features(pictures, by), self.real[key]))
end

local function squares(x) return x:rearrange("n c (r h) (s w) -> (n r s) c h w", { h = 64, w = 64 }) end

--- The Fréchet distance of squares of 64 x 64 pixels that larger pictures are cut into to those of real ones, in a
-- network's features: it sees fine parts, which the whole, brought to that size, does not show.
---@param pictures Tensor
---@param split string
---@param by? string  ("scene-clip")
---@return number
function Yardstick:detail(pictures, split, by)
  return frechet_of(self, pictures, split, by or "scene-clip", squares, "/squares")
end

--- Shares of what captions ask for that is in the pictures: object, colour and place as scene-resnet sees it, and
-- `caption`, the share of pictures whose caption scene-clip finds among all of them (at most a hundred).
---@param pictures Tensor
---@param prompts YardstickPrompts
---@return table<string, number>
function Yardstick:asked(pictures, prompts)
  local x = scenes.pictures(pictures)
  if x.shape[3] > 64 then x = x:avg_pool2d(x.shape[3] // 64) end
  local logits = vision.scores(self:judge "scene-resnet", x):narrow(1, 0, statements.count)
  local shares = statements.score(logits, prompts.asked)
  local tokens = scenes.tokens(shelf.tokenizer "scene-clip", prompts.captions, 32)
  shares.caption = vlm.retrieval(self:judge "scene-clip", x, tokens, { among = math.min(100, #prompts.captions) })
    .captions
  return shares
end

-- ---- samplers beside a full one ----

-- The layers of scene-resnet for the perceptual distance, which is the mean over them: about as large as LPIPS.
local seen_by = { "layer1", "layer2", "layer3" }

--- Samplers beside a full one, for prompts of a split and noise of each seed: diffusion.compare with pictures decoded,
-- the perceptual distance in the features of scene-resnet, and as judges the Fréchet distance to real pictures by
-- scene-resnet (of larger pictures than 64 x 64 that of squares as well) and the share of captions that are found by
-- scene-clip. options: split ("validation"), first (0), count
-- (32: prompts), seeds ({ 0 }), rounds (1: of timing), fewer (true: the full sampler with fewer steps beside each; or
-- names of those).
---@param full Sampler
---@param samplers table<string, Sampler>
---@param options? table
---@return Comparison[] list  one for each seed
function Yardstick:compare(full, samplers, options)
  local o = ty.nn.options("Yardstick:compare", options, { split = "validation", first = 0, count = 32, seeds = { 0 },
    rounds = 1, fewer = true }, { seeds = "a list of integers", fewer = "a boolean or a list of strings" })
  local side, list = self.size // 4, {}
  local inside = measure.features(self:judge "scene-resnet", seen_by)
  local judges = { frechet = function(x) return self:frechet(x, o.split, "scene-resnet") end }
  if self.size > 64 then judges.detail = function(x) return self:detail(x, o.split, "scene-resnet") end end
  for i, seed in ipairs(o.seeds) do
    local prompts = self:prompts(o.split, o.first, o.count, seed)
    judges.captions = function(x) return self:asked(x, prompts).caption end
    list[i] = diffusion.compare(self.painter.network, { o.count, 4, side, side }, full, samplers, {
      condition = prompts.condition, null = self.null, seeds = prompts.seeds, range = 255, rounds = o.rounds,
      fewer = o.fewer, decode = function(x) return self:decode(x) end,
      features = function(x) return inside(scenes.pictures(x)) end,
      judges = judges })
    for _, row in ipairs(list[i].list) do row.perceptual = row.perceptual and row.perceptual / #seen_by end
  end
  return list
end

--- Rows of a recipe's table of what several comparisons of the same samplers gave: as of Comparison:rows, with a value
-- for each comparison.
---@param list Comparison[]
---@param name string
---@param bars table<string, number>
---@param beats? string[]
---@return RecipeRow[]
function Yardstick.rows(list, name, bars, beats)
  local rows
  for i, comparison in ipairs(list) do
    local own = comparison:rows(name, bars, beats)
    rows = rows or own
    for j, row in ipairs(own) do
      rows[j].values = rows[j].values or {}
      rows[j].values[i] = row.measured
      if row.baseline then
        rows[j].baselines = rows[j].baselines or {}
        rows[j].baselines[i] = row.baseline
      end
    end
  end
  for _, row in ipairs(rows) do row.measured, row.baseline, row.baselines = nil, row.baselines, nil end
  return rows
end

return new
