-- What models that answer questions about clips are made of: features of frames, attention, tuning on clips.
local here = (arg and arg[0]:match ".*/" or "tests/modules/zoo/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local vlm, zoo = require "tycho.vlm", require "tycho.zoo"
local answerer, watcher = zoo.answerer, zoo.watcher

local model, tokenizer = zoo.load "scene-vlm", zoo.tokenizer "scene-vlm"
local dialogue = answerer.dialogue(tokenizer)
local clips = watcher.clips("training", 6, { questions = 3, seed = 5 })
local pool = watcher.featured(model, clips, true)

check.test("a frame's features are those of the picture, keys are what its place does not change", function()
  check.equal({ #clips, clips[1].video.shape }, { 1, { 6, 8, 3, 64, 64 } })
  local batch = pool[1]
  check.equal({ batch.features.shape, batch.keys.shape, batch.attention.shape },
    { { 6, 8, 64, 128 }, { 6, 8, 64, 192 }, { 6, 8, 64 } })
  local picture = zoo.scenes.pictures(clips[1].video:select(0, 2):narrow(0, 5, 1))
  local want = ty.no_grad(function() return model:picture_features(picture) end)
  check.ok((batch.features:select(0, 2):narrow(0, 5, 1) - want):abs():max():item() < 1e-4)
  check.ok((batch.attention:sum { -1 } - 1):abs():max():item() < 1e-5)
  local hidden = ty.no_grad(function() return model.vision_tower:hidden(picture) end):narrow(1, 1, 64)
  local key = (hidden - model.vision_tower.position_embedding.weight:detach()):select(0, 0)
  check.ok((batch.keys:select(0, 2):select(0, 5) - key):abs():max():item() < 1e-4)
  local lean = watcher.featured(model, clips)[1]
  check.equal({ lean.keys == nil, lean.video == nil }, { true, true })
end)

check.test("things are attended to more than what is behind them", function()
  local few = watcher.clips("training", 8, { seed = 6, backgrounds = { "plain" },
    fields = { "video", "questions", "scene", "owner" } })
  local attention = watcher.featured(model, few)[1].attention
  local shown = few[1].owner:ge(0):to("f32"):reshape(64, 1, 64, 64)
  shown = ty.avg_pool2d(shown, 8):reshape(8, 8, 64):gt(0.4):to "f32"
  local on = (attention * shown):sum():item() / shown:sum():item()
  local off = (attention * (1 - shown)):sum():item() / (1 - shown):sum():item()
  check.ok(on > 2 * off, ("%g on things, %g behind them"):format(on, off))
end)

check.test("a decoder is tuned on clips, and its embedding of frames with it", function()
  local features, places = vlm.frames.all(pool[1].features)
  local all = { { questions = pool[1].questions, features = features, places = places } }
  local first
  local last = watcher.tune(model, dialogue, pool, { steps = 14, batch = 6, lr = 2e-3, fine = 0.25,
    watch = function(_, loss) first = first or loss end })
  check.ok(last < 0.6 * first, ("%g after %g"):format(last, first))
  check.ok(model.language_model.frames.weight:abs():max():item() > 1e-3)
  check.ok(vlm.answers.shares(vlm.frames.ask(model, dialogue, all)).all > 0.4)
end)

check.finish()
