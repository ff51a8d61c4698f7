--- A factory of pairs for learning to draw things that are shown, without tuning on any of them: for a thing in a
-- picture the painter draws a rough picture of what words say, the generator, which is told the thing's features,
-- restores the thing in it (the refiner) or draws another view; a mask is made of what was drawn; pairs in which the
-- thing is not like itself, or the words are not found, are left out. Zhou et al. 2024, "Toffee", section 3.2.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local segment = require "tycho.diffusion.subject.segment"

---@class SubjectPair
---@field picture Tensor  u8 [3, h, w], of the thing
---@field mask Tensor     [1, h, w], where it is there
---@field target Tensor   u8 [3, h, w]
---@field target_mask Tensor
---@field prompt string
---@field identity number
---@field text number

--- A factory of pairs: a thing, and what it is to look like elsewhere.
---@class SubjectFactory
local Factory = {}
Factory.__index = Factory

--- options: painter, features, generator (a SubjectPainter), text (a function of pictures and what was asked of them,
-- asked[i], that gives a list of scores from 0 to 1: how far the words are found), steps (8, of drawing), strength
-- (0.7: of refinement), guidance (2), views (0.5: the share of pairs that the view generator makes, from noise).
---@param options table
---@return SubjectFactory
local function new(options)
  local o = arguments.read("subject.factory", options, { painter = false, features = false, generator = false,
    text = arguments.none, steps = 8, strength = 0.7, guidance = 2.0, views = 0.5 }, { painter = "a table",
    features = "a table", generator = "a table", text = "a function", strength = "a number in (0, 1]",
    views = "a number in [0, 1]", steps = "an integer >= 1" })
  return setmetatable(o, Factory)
end

--- Pairs of things: { picture, mask, rough (prompt for the painter, which names what kind of thing it is), prompt (for
-- the pair) and asked (for `text`) } each. Returns all pairs, with their scores.
---@param things table[]
---@param seed integer
---@return SubjectPair[]
---@return Tensor rough
---@return Tensor refined
function Factory:make(things, seed)
  local who = "subject.factory.make"
  arguments.expect(who, "things", things, "a list of tables")
  arguments.expect(who, "seed", seed, "an integer")
  local pictures, masks, rough, prompts, asked = {}, {}, {}, {}, {}
  for i, thing in ipairs(things) do
    pictures[i], masks[i], rough[i], prompts[i], asked[i] = thing.picture, thing.mask, thing.rough, thing.prompt,
      thing.asked
  end
  pictures, masks = ty.stack(pictures, 0), ty.stack(masks, 0):to "f32"
  local tokens = self.features:tokens(pictures, masks)
  local first = self.painter:paint(rough, { steps = self.steps, guidance = self.guidance, seed = seed, batch = 64 })
  local split = math.floor(#things * (1 - self.views) + 0.5) -- refined ones, then views
  local list = {}
  for k, range in ipairs { { 0, split }, { split, #things - split } } do
    if range[2] > 0 then
      list[#list + 1] = self.generator:paint(table.move(prompts, range[1] + 1, range[1] + range[2], 1, {}),
        tokens:narrow(0, range[1], range[2]), { steps = self.steps, guidance = self.guidance, strength = self.strength,
          seed = seed + 1 + range[1], image = k == 1 and first:narrow(0, 0, split) or nil })
    end
  end
  local refined = ty.concat(list, 0)
  local target_masks = segment(refined)
  local alike = self.features:alike(pictures, masks, refined, target_masks):tolist()
  local found, made = self.text and self.text(refined, asked), {}
  for i, thing in ipairs(things) do
    made[i] = { picture = thing.picture, mask = thing.mask, target = refined:select(0, i - 1),
      target_mask = target_masks:select(0, i - 1), prompt = thing.prompt, identity = alike[i],
      text = found and found[i] or 1 }
  end
  return made, first, refined
end

--- The pairs whose scores are at least these.
---@param pairs_ SubjectPair[]
---@param identity number
---@param text number
---@return SubjectPair[]
function Factory.filter(pairs_, identity, text)
  local who = "subject.factory.filter"
  arguments.expect(who, "pairs", pairs_, "a list of tables")
  arguments.expect(who, "identity", identity, "a finite number")
  arguments.expect(who, "text", text, "a finite number")
  local kept = {}
  for _, pair in ipairs(pairs_) do
    if pair.identity >= identity and pair.text >= text then kept[#kept + 1] = pair end
  end
  return kept
end

--- Pairs by tuning on each thing, which the factory does without: tune(thing) gives a painter that knows the thing, of
-- which the target is drawn. Things are taken as long as the seconds last. Returns the pairs and the seconds.
---@param things table[]   as of make()
---@param tune fun(thing: table): TextToImage
---@param options { seconds: number, steps: integer, guidance: number, seed: integer }
---@return SubjectPair[]
---@return number
function Factory.tuned(things, tune, options)
  local o = arguments.read("subject.factory.tuned", options, { seconds = 1.0, steps = 8, guidance = 2.0, seed = 0 }, {
    seconds = "a finite number >= 0", steps = "an integer >= 1", seed = "an integer" })
  local made, began = {}, ty.system.clock()
  for i, thing in ipairs(things) do
    local target = tune(thing):paint({ thing.prompt }, { steps = o.steps, guidance = o.guidance, seed = o.seed + i })
    made[i] = { picture = thing.picture, mask = thing.mask, prompt = thing.prompt, target = target:select(0, 0),
      target_mask = segment(target):select(0, 0), identity = 1, text = 1 }
    if ty.system.clock() - began > o.seconds then break end
  end
  return made, ty.system.clock() - began
end

--- A function that gives batches of pairs for SubjectPainter:train: targets with the features of the pairs' pictures;
-- a share `edits` of the batches are edits, with the target around the thing given.
---@param features SubjectFeatures
---@param pairs_ SubjectPair[]
---@param batch integer
---@param edits number
---@return fun(): table
function Factory.batches(features, pairs_, batch, edits)
  local pictures, masks, targets, target_masks, prompts = {}, {}, {}, {}, {}
  for i, pair in ipairs(pairs_) do
    pictures[i], masks[i], targets[i], target_masks[i], prompts[i] = pair.picture, pair.mask, pair.target,
      pair.target_mask, pair.prompt
  end
  local tokens = ty.keep(features:tokens(ty.stack(pictures, 0), ty.stack(masks, 0)))
  local there = { device = tokens.device }
  targets = ty.keep(ty.stack(targets, 0):to(there))
  target_masks = ty.keep(ty.stack(target_masks, 0):to { dtype = "f32", device = there.device })
  return function()
    local at, some = ty.randint(0, #prompts, { batch }, there), {}
    for i, k in ipairs(at:tolist()) do some[i] = prompts[k + 1] end
    return { image = targets:index_select(0, at), prompts = some, tokens = tokens:index_select(0, at),
      mask = ty.rand({}):item() < edits and target_masks:index_select(0, at) or nil }
  end
end

return setmetatable({ filter = Factory.filter, tuned = Factory.tuned, batches = Factory.batches }, {
  __call = function(_, options) return new(options) end })
