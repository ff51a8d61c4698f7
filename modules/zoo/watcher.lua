--- Models that answer questions about clips: scene-vlm's decoder, tuned on clips whose features are computed once. What
-- recipes on video models share: clips, how the model begins, how it is tuned.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local answerer = require "tycho.zoo.answerer"
local datasets = require "tycho.datasets"
local scenes = require "tycho.zoo.scenes"
local vlm = require "tycho.vlm"

local frames = vlm.frames
local M = {}

--- Clips of a split with their questions, in batches { video u8 [n, frames, 3, 64, 64], questions, scene }. more:
-- options of the set, of which frames (8), cuts (0.4), still (0.3) and questions (8) have values of their own here.
---@param split string
---@param count integer
---@param more? table
---@return table[]
function M.clips(split, count, more)
  arguments.expect("watcher.clips", "count", count, "an integer > 0")
  local o = { split = split, frames = 8, size = 64, cuts = 0.4, still = 0.3, questions = 8,
    fields = { "video", "questions", "scene" } }
  for key, value in pairs(more or {}) do o[key] = value end
  o.length = count
  local set, batches = datasets.load("clips", o), {}
  for from = 0, count - 1, 20 do batches[#batches + 1] = set:batch(ty.arange(from, math.min(from + 20, count))) end
  return batches
end

--- Adds what a model sees to such batches: features f32 [n, frames, places, hidden], what its decoder gets of each
-- frame, and attention [n, frames, places], shares that sum to 1. A residual network has no class that attends: in its
-- place stands a softmax over the places of how active the tower is there, the mean square over channels (Zagoruyko and
-- Komodakis 2017, "Paying More Attention to Attention") in standard deviations of the frame. The tower and the
-- projector stay as they are. whole: videos stay, and there are keys [n, frames, places, width], what the tower sees
-- before it adds where that is.
---@param model Llava
---@param batches table[]
---@param whole? boolean
---@return table[]
function M.featured(model, batches, whole)
  local who = "watcher.featured"
  arguments.expect(who, "model", model, "a module")
  arguments.expect(who, "batches", batches, "a list of tables")
  local tower, list = model.vision_tower, {}
  if not tower or not tower.resnet then
    arguments.fail("%s: model: expected one whose tower is a residual network, got %s", who, arguments.describe(model))
  end
  for i, batch in ipairs(batches) do
    local n = batch.video.shape[1]
    local parts = { {}, {}, {} }
    for row = 0, n - 1 do -- clip by clip: the maps of some frames stay in the processor's cache, those of many do not
      local seen, given, active = ty.no_grad(ty.scope, function()
        local pictures = scenes.pictures(batch.video:select(0, row):to { device = model:device() })
        local hidden = tower:hidden(pictures, { layer = -1 })
        hidden = hidden:narrow(1, 1, hidden.shape[2] - 1)
        local own = hidden - tower.position_embedding.weight
        local energy = own:square():mean { -1 }
        energy = (energy - energy:mean({ 1 }, true)) / energy:std(1):unsqueeze(1):clamp(1e-6)
        return own, model.multi_modal_projector(hidden), energy:softmax(-1)
      end)
      for k, x in ipairs { given, active, whole and seen } do parts[k][row + 1] = x end
    end
    local features, attention, keys = ty.stack(parts[1]), ty.stack(parts[2]), whole and ty.stack(parts[3])
    list[i] = { features = ty.keep(features), attention = ty.keep(attention), questions = batch.questions,
      scene = batch.scene, keys = keys and ty.keep(keys), video = whole and batch.video or nil }
  end
  return list
end

--- Teaches a model that learnt on pictures to see clips: gives it the embedding of frames and tunes its decoder on
-- questions about them. pool: of featured(). options: steps (100), batch (16 clips), lr (1e-3), seed, fine (0.4: the
-- share of the steps, the last ones, in which it sees every place; before, frames are averaged over squares of two by
-- two places, which takes a third of the time), times (10: the rate of the embedding of frames, which begins at zero,
-- over that of the rest), watch(step, loss). Returns the mean loss of the last tenth of the steps.
---@param model Llava
---@param dialogue Dialogue
---@param pool table[]
---@param options? table
---@return number
function M.tune(model, dialogue, pool, options)
  local who = "watcher.tune"
  local o = arguments.read(who, options, { steps = 100, batch = 16, lr = 1e-3, seed = 0, fine = 0.4, times = 10.0,
    watch = arguments.none }, { steps = "an integer > 0", batch = "an integer > 0", fine = "a number in [0, 1]",
    times = "a number > 0", watch = "a function" })
  arguments.expect(who, "pool", pool, "a list of tables")
  local shape = pool[1].features.shape
  frames.attach(model, shape[2], shape[3])
  local coarse = math.floor(o.steps * (1 - o.fine) + 0.5)
  return answerer.tune(model, dialogue, pool, { steps = o.steps, batch = o.batch, lr = o.lr, seed = o.seed,
    fast = "^frames%.", times = o.times, watch = o.watch, loss = function(m, questions, features, step)
      local seen, places = frames.all(features, step <= coarse and 2 or 1)
      local batch, with = frames.packed(m, dialogue, questions, seen, places)
      return vlm.Dialogue.loss(m, batch, with)
    end })
end

return M
