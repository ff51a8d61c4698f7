--- Clips in a model that learnt on pictures: the features of all frames stand one after the other where those of one
-- picture stood. A feature keeps the rotary position of its place in the picture, which the model knows, and an
-- embedding of its frame's number, zero at first, is added, so that before any tuning a clip is seen as its frames laid
-- over each other. After Bertasius et al. 2021, "Is Space-Time Attention All You Need for Video Understanding?" (learnt
-- embeddings of time beside those of space).
--
-- Tokens of a clip are features [n, k, hidden] with their places i64 [n, k]: frame * places of a picture + place. All
-- of them, or those that a method keeps (tycho.vlm.flashvid, tycho.vlm.fewer).
local ty = require "tycho"
local arguments = require "tycho.arguments"
local Dialogue = require "tycho.vlm.dialogue"
local picked = require "tycho.vlm.picked"

local nn = ty.nn
local M = {}

--- Gives a model the embedding of frames: `count` of them, of pictures of so many places (64). It is a part of the
-- decoder, as nn.Embedding `frames`, and learns with it.
---@param model Llava
---@param count integer
---@param places? integer
function M.attach(model, count, places)
  local who = "vlm.frames.attach"
  arguments.expect(who, "model", model, "a module")
  arguments.expect(who, "count", count, "an integer > 0")
  local decoder = picked.decoder(who, model)
  local like = decoder.model.embed_tokens.weight
  local frames = nn.Embedding(count, like.shape[2])
  nn.init.zeros(frames.weight)
  decoder.frames = frames:to { device = like.device, dtype = like.dtype }
  decoder.frames.places = arguments.expect(who, "places", places or 64, "an integer > 0")
end

--- Takes it off again.
---@param model Llava
function M.remove(model)
  local decoder = picked.decoder("vlm.frames.remove", model)
  if decoder.frames then nn.surgery.remove(decoder, "frames") end
end

--- All tokens of clips: features [n, frames, places, hidden] as [n, k, hidden], and their places. side: how many places
-- of a row and of a column are averaged into one (1; LLaVA-Video pools its frames so), which stays at the first of
-- them.
---@param features Tensor
---@param side? integer
---@return Tensor features
---@return Tensor places  i64 [n, k]
function M.all(features, side)
  local who = "vlm.frames.all"
  if not ty.is_tensor(features) or features.ndim ~= 4 then
    arguments.fail("%s: features: expected [n, frames, places, hidden], got %s", who, arguments.describe(features))
  end
  side = arguments.expect(who, "side", side or 1, "an integer > 0")
  local n, f, p, d = table.unpack(features.shape)
  local places = ty.arange(f * p, { device = features.device })
  if side > 1 then
    local edge = math.tointeger(p ^ 0.5)
    if not edge or edge % side ~= 0 then
      arguments.fail("%s: side: expected a divisor of the side of a square of %d places, got %d", who, p, side)
    end
    features = features:reshape(n * f, edge, edge, d):permute { 0, 3, 1, 2 }
    features = ty.avg_pool2d(features, side):permute { 0, 2, 3, 1 }:reshape(n, -1, d)
    places = places:reshape(f, edge // side, side, edge // side, side):select(4, 0):select(2, 0):flatten()
  else
    features = features:reshape(n, f * p, d)
  end
  return features, places:unsqueeze(0):expand(n, places.shape[1])
end

--- Questions about clips as rows: batch as of Dialogue:packed(), and the options of the model's forward() that go with
-- it. questions: of each clip a list of { question, answer }; apart: every question is a row of its own, with its
-- clip's tokens, as methods need it that choose among them by the question.
---@param model Llava     with attach()
---@param dialogue Dialogue
---@param questions table[][]
---@param features Tensor  [n, k, hidden]
---@param places Tensor    i64 [n, k]
---@param apart? boolean
---@return table batch
---@return table options
function M.packed(model, dialogue, questions, features, places, apart)
  local who = "vlm.frames.packed"
  arguments.expect(who, "model", model, "a module")
  arguments.expect(who, "dialogue", dialogue, "a table")
  arguments.expect(who, "questions", questions, "a list of lists")
  local frames = model.language_model and model.language_model.frames
  if not frames then arguments.fail("%s: model: expected one with vlm.frames.attach(), got one without", who) end
  if not ty.is_tensor(features) or features.ndim ~= 3 or features.shape[1] ~= #questions then
    arguments.fail("%s: features: expected [%d, k, hidden], got %s", who, #questions, arguments.describe(features))
  end
  if not ty.is_tensor(places) or places.ndim ~= 2 or places.shape[1] ~= #questions
    or places.shape[2] ~= features.shape[2] then
    arguments.fail("%s: places: expected i64 [%d, %d], got %s", who, #questions, features.shape[2],
      arguments.describe(places))
  end
  local device = model:device()
  features, places = features:to { device = device }, places:to { device = device }
  if apart then
    local rows, of = {}, {}
    for i, turns in ipairs(questions) do
      for _, turn in ipairs(turns) do rows[#rows + 1], of[#of + 1] = { turn }, i - 1 end
    end
    local index = ty.tensor(of, { dtype = "i64" }):to { device = device }
    questions, features, places = rows, features:index_select(0, index), places:index_select(0, index)
  end
  local k, here = features.shape[2], frames.places
  local batch = dialogue:about(k):packed(questions)
  local own = batch.options.positions:to { device = device }
  local text = (own:narrow(1, k, own.shape[2] - k) - k + here):clamp(0)
  local positions = ty.concat({ places % here, text }, 1)
  batch.options.positions = positions
  local of_frame = ((places - places % here) / here):to "i64"
  return batch, { features = features + frames(of_frame), positions = positions }
end

--- Asks a model all questions about clips, as vlm.answers.ask() does about pictures: which are right, in their order.
-- clips: batches { questions, features [n, k, hidden], places }; apart: see packed(); before(batch): called before the
-- model is, with what packed() gave.
---@param model Llava
---@param dialogue Dialogue
---@param clips table[]
---@param options? { apart?: boolean, before?: fun(batch: table) }
---@return { kind: string, right: boolean }[]
function M.ask(model, dialogue, clips, options)
  local who = "vlm.frames.ask"
  arguments.expect(who, "model", model, "a module")
  arguments.expect(who, "dialogue", dialogue, "a table")
  arguments.expect(who, "clips", clips, "a list of tables")
  local o = arguments.read(who, options, { apart = false, before = arguments.none }, { before = "a function" })
  local found, training = {}, model.training
  model:eval()
  for _, clip in ipairs(clips) do
    local right = ty.scope(ty.no_grad, function()
      local batch, with = M.packed(model, dialogue, clip.questions, clip.features, clip.places, o.apart)
      if o.before then o.before(batch) end
      return Dialogue.right(model, batch, with)
    end)
    local row = 0
    for i, questions in ipairs(clip.questions) do
      for k, question in ipairs(questions) do
        row = row + 1
        local hit = right[o.apart and row or i][o.apart and 1 or k]
        found[#found + 1] = { kind = question.kind or "question", right = hit == true }
      end
    end
  end
  model:train(training)
  return found
end

return M
