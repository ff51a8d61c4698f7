--- Training on pictures with captions, as recipes on models that see share it: scenes with captions of which some are
-- another's, judges of these, and a new model behind a tower that is there. The words are those of
-- tycho.zoo.answerer.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local answerer = require "tycho.zoo.answerer"
local datasets = require "tycho.datasets"
local models = require "tycho.models"
local scenes = require "tycho.zoo.scenes"
local shelf = require "tycho.zoo.shelf"
local vlm = require "tycho.vlm"

local expect = arguments.expect
local M = {}

local function expect_dialogue(who, dialogue)
  if type(dialogue) ~= "table" or not dialogue.described then
    arguments.fail("%s: dialogue: expected a Dialogue, got %s", who, arguments.describe(dialogue))
  end
end

--- Scenes that networks of this size learn in a minute: one or two objects of eight kinds, in their own colours or one
-- of five, on a plain background.
M.scenes = { objects = { 1, 2 }, rotation = 0, backgrounds = { "plain" }, colours = { "natural", "red", "blue", "green",
  "yellow", "purple" }, objects_of = { "dog", "fish", "apple", "car", "house", "star", "heart", "umbrella" } }

--- The options of such scenes, and more.
---@param more? table
---@return table
function M.options(more)
  expect("captioner.options", "more", more, "a table or nil")
  local options = {}
  for key, value in pairs(M.scenes) do options[key] = value end
  for key, value in pairs(more or {}) do options[key] = value end
  return options
end
local options_of = M.options

--- A model that begins: a new projector between a language model, new or a copy of one, and a tower that stays as it
-- is: that of the zoo's scene-vlm, or one around a given residual network, for pictures of so many pixels a side, of
-- which the network stays and the layers behind it are trained.
---@param tokenizer Tokenizer
---@param o { width: integer, layers: integer, heads: integer, inner: integer, side?: integer }
---@param language? LanguageModel
---@param resnet? ResNet
---@return Llava
function M.begin(tokenizer, o, language, resnet)
  local who = "captioner.begin"
  if not ty.tokenizer.fields(tokenizer) then
    arguments.fail("%s: tokenizer: expected a tokenizer, got %s", who, arguments.describe(tokenizer))
  end
  expect(who, "o", o, "a table")
  for _, name in ipairs { "width", "layers", "heads", "inner" } do expect(who, name, o[name], "an integer > 0") end
  expect(who, "language", language, "a module or nil")
  expect(who, "resnet", resnet, "a module or nil")
  local tower = resnet and models.ResNetVisionModel.around(resnet, o.side or 64)
    or shelf.load "scene-vlm".vision_tower
  local model = models.Llava { model_type = "llava", text_config = answerer.text_config(tokenizer, o),
    vision_config = tower:published_config(), image_token_index = 1, vision_feature_layer = -1,
    tie_word_embeddings = true, eos_token_id = 0 }
  model.vision_tower:load_state_dict(tower:state_dict())
  local still = resnet and model.vision_tower.resnet or model.vision_tower
  still:requires_grad_(false)
  answerer.spread(model)
  if language then model.language_model:load_state_dict(language:state_dict()) end
  return model
end

--- Scenes of a split with captions. more: options of the scenes beside M.scenes; label_noise is the
-- share of captions that are those of other scenes. Returns a table with
--   image     u8 [n, 3, side, side]
--   captions  and wrong, [n], 1 where a caption is another's
--   names     of the first object of each scene, behind its tint if it has one; objects and looks, i64 [n], are the
--             numbers of the object and of the tint, 0 for its own look
---@param split string
---@param count integer
---@param more? table
---@return table
function M.pairs(split, count, more)
  expect("captioner.pairs", "split", split, "a string")
  expect("captioner.pairs", "count", count, "an integer > 0")
  local set = scenes.set(split, { "image", "caption", "swapped", "scene" }, options_of(more))
  local batch, names, numbers, looks = set:batch(ty.arange(count)), {}, {}, {}
  for i, scene in ipairs(batch.scene) do
    local object = scene.objects[1]
    numbers[i], looks[i] = object.object, object.colour and datasets.scenes.tints[object.colour] or 0
    local name = datasets.scenes.objects[object.object + 1].name
    names[i] = object.colour and object.colour .. " " .. name or name
  end
  return { image = batch.image, captions = batch.caption, wrong = batch.swapped, names = names,
    objects = ty.tensor(numbers, { dtype = "i64" }), looks = ty.tensor(looks, { dtype = "i64" }) }
end

--- Features of pictures u8 [n, 3, 64, 64], fifty at a time, by fn(pictures as networks take them).
---@param image Tensor
---@param fn fun(pictures: Tensor): Tensor
---@param device? string
---@return Tensor
function M.features(image, fn, device)
  expect("captioner.features", "image", image, "a tensor")
  expect("captioner.features", "fn", fn, "a function")
  expect("captioner.features", "device", device, "a string or nil")
  if image.ndim ~= 4 or image.shape[1] == 0 then
    arguments.fail("captioner.features: image: expected u8 [n, channels, height, width], got %s",
      arguments.describe(image))
  end
  local parts = {}
  for start = 0, image.shape[1] - 1, 50 do
    parts[#parts + 1] = ty.scope(ty.no_grad, function()
      local x = image:narrow(0, start, math.min(50, image.shape[1] - start))
      return fn(scenes.pictures(x):to { device = device or "cpu" })
    end)
  end
  return ty.keep(ty.concat(parts, 0))
end

--- Scores of a pool of pairs() by two judges: clip, cosines of a CLIP of the zoo's kind, and grade, the evidence that
-- tycho.vlm.grader has of a scene-vlm that writes captions; and seen, what that model's tower gives. The pool gets them
-- as fields.
---@param pool table
---@param judges { clip: CLIPModel, words: Tokenizer, grader: Llava, dialogue: Dialogue }
function M.judge(pool, judges)
  local who = "captioner.judge"
  expect(who, "pool", pool, "a table")
  expect(who, "judges", judges, "a table")
  expect(who, "judges.clip", judges.clip, "a module")
  expect(who, "judges.grader", judges.grader, "a module")
  expect_dialogue(who, judges.dialogue)
  local device = judges.grader:device()
  pool.seen = M.features(pool.image, function(x) return vlm.pooling.seen(judges.grader, x) end, device)
  local image = M.features(pool.image, function(x) return judges.clip:image_features(x) end, device)
  ty.no_grad(function()
    local tokens = scenes.tokens(judges.words, pool.captions, 48)
    local text = judges.clip:text_features(tokens:to { device = device })
    pool.clip = ty.keep((ty.nn.normalize(image) * ty.nn.normalize(text)):sum(-1))
    pool.grade = ty.keep(vlm.grader.evidence(judges.grader, judges.dialogue,
      vlm.pooling.features(judges.grader, pool.seen), pool.captions))
  end)
end

--- Sequences of text alone: captions, and questions with their answers, of training scenes. What a language model
-- reads before it sees anything.
---@param dialogue Dialogue  without pictures
---@param count integer      scenes
---@param more? table        options of the scenes
---@return table[]
function M.texts(dialogue, count, more)
  expect_dialogue("captioner.texts", dialogue)
  expect("captioner.texts", "count", count, "an integer > 0")
  local set, list = scenes.set("training", { "caption", "questions" }, options_of(more)), {}
  local batch = set:batch(ty.arange(count))
  for i, caption in ipairs(batch.caption) do
    list[#list + 1] = dialogue:described(caption)
    for _, turn in ipairs(batch.questions[i]) do
      list[#list + 1] = dialogue:described(turn.question .. dialogue.between .. dialogue.lead .. turn.answer)
    end
  end
  return list
end

--- Sequences of verses of the King James Bible, so many of a split ("training" or "held_out") from all over it, which
-- are shorter than `longest` tokens; and how many bytes they have.
---@param dialogue Dialogue  without pictures
---@param split string
---@param count integer
---@param longest? integer   (120)
---@return table[]
---@return integer bytes
function M.verses(dialogue, split, count, longest)
  local who = "captioner.verses"
  expect_dialogue(who, dialogue)
  expect(who, "split", split, "a string")
  expect(who, "count", count, "an integer > 0")
  expect(who, "longest", longest, "an integer > 0 or nil")
  local set, list, bytes = datasets.load("kjv", { split = split }), {}, 0
  local chapter, chapters = 0, #set
  while #list < count and chapter < 4 * count do
    local verses = set:get(chapter * 7919 % chapters).verses
    local verse = verses[chapter // chapters % #verses + 1]
    local one = dialogue:described(verse)
    if #one.ids <= (longest or 120) then list[#list + 1], bytes = one, bytes + #verse end
    chapter = chapter + 1
  end
  return list, bytes
end

--- Sequences with as many of others behind them as have a share of all tokens; those are taken again where they are too
-- few.
---@param sequences table[]
---@param others table[]
---@param share number
---@return table[]
function M.mixed(sequences, others, share)
  local who = "captioner.mixed"
  expect(who, "sequences", sequences, "a list of tables")
  expect(who, "others", others, "a list of tables")
  expect(who, "share", share, "a number in [0, 1)")
  if #others == 0 then arguments.fail("%s: others: expected at least one, got none", who) end
  local list, sum, k = table.move(sequences, 1, #sequences, 1, {}), 0, 0
  for _, one in ipairs(sequences) do sum = sum + #one.ids end
  local wanted, got = sum * share / (1 - share), 0
  while got < wanted do
    k = k % #others + 1
    list[#list + 1], got = others[k], got + #others[k].ids
  end
  return list
end

--- Sequences of captions, each with its picture's row, from 0, as `picture`. chosen: positions, from 0, of those that
-- are wanted (all).
---@param dialogue Dialogue
---@param captions string[]
---@param chosen? integer[]
---@return table[]
function M.described(dialogue, captions, chosen)
  local who = "captioner.described"
  expect_dialogue(who, dialogue)
  expect(who, "captions", captions, "a list of strings")
  expect(who, "chosen", chosen, "a list of integers or nil")
  local list = {}
  for k = 1, chosen and #chosen or #captions do
    local place = chosen and chosen[k] or k - 1
    if not captions[place + 1] then
      arguments.fail("%s: chosen: expected integers in [0, %d], got %d", who, #captions - 1, place)
    end
    list[k] = dialogue:described(captions[place + 1])
    list[k].picture = place
  end
  return list
end

--- Mean cross entropy of a batch of tycho.vlm.packing's loader. seen: what is known of the pictures, by row; a sequence
-- with a picture has its row, from 0, as `picture`. project: a function of the model and some rows that gives features.
---@param model LanguageModel
---@param loader PackedLoader
---@param batch table
---@param seen? Tensor
---@param project? fun(model: LanguageModel, seen: Tensor): Tensor
---@return Tensor
function M.loss(model, loader, batch, seen, project)
  local who = "captioner.loss"
  expect(who, "model", model, "a module")
  expect(who, "loader", loader, "a table")
  expect(who, "batch", batch, "a table")
  expect(who, "batch.sequences", batch.sequences, "a tensor")
  expect(who, "loader.sequences", loader.sequences, "a list of tables")
  local rows = {}
  for _, place in ipairs(batch.sequences:tolist()) do rows[#rows + 1] = loader.sequences[place + 1].picture end
  if #rows == 0 then return vlm.Dialogue.loss(model, batch) end
  expect(who, "seen", seen, "a tensor")
  expect(who, "project", project, "a function")
  local some = seen:index_select(0, ty.tensor(rows, { dtype = "i64" }):to { device = seen.device })
  return vlm.Dialogue.loss(model, batch, { features = project(model, some) })
end

--- Trains what is not frozen of a model on sequences. options: steps, lr (2e-3), room (1024: tokens of a packed row) or
-- batch (sequences of a padded one), seen and project (see loss()), warmup (10), decreasing (true: as of
-- vlm.packing.loader()). Returns the loader, which knows how much of it was padding, and the mean loss of the last ten
-- steps.
---@param model LanguageModel
---@param sequences table[]
---@param options table
---@return PackedLoader
---@return number
function M.fit(model, sequences, options)
  expect("captioner.fit", "model", model, "a module")
  local o = arguments.read("captioner.fit", options, { steps = 1, lr = 2e-3, room = 1024, batch = arguments.none,
    seen = arguments.none, project = arguments.none, warmup = 10, decreasing = true },
    { steps = "an integer > 0", room = "an integer > 0", batch = "an integer > 0", seen = "a tensor",
      project = "a function", warmup = "an integer >= 0" })
  local loader = vlm.packing.loader(sequences, { room = not o.batch and o.room or nil, batch = o.batch,
    decreasing = o.decreasing })
  local losses = ty.train.fit(model, loader, { steps = o.steps, lr = o.lr, weight_decay = 0.0, warmup = o.warmup,
    quiet = true, loss = function(m, batch) return M.loss(m, loader, batch, o.seen, o.project) end })
  model:eval()
  return loader, ty.stats.mean(table.move(losses, math.max(1, #losses - 9), #losses, 1, {}))
end

--- What a training step takes by several ways, which are timed in turn: ways are { loader, seen } by name. Returns
-- seconds of a step, and tokens of samples a second, without what fills rows up, by the same names.
---@param r Recipe
---@param model LanguageModel
---@param ways table<string, table>
---@param project fun(model: LanguageModel, seen: Tensor): Tensor
---@param rounds integer
---@return table<string, number> seconds
---@return table<string, number> rates
function M.speeds(r, model, ways, project, rounds)
  local who = "captioner.speeds"
  expect(who, "r", r, "a table")
  expect(who, "model", model, "a module")
  expect(who, "ways", ways, "a table")
  expect(who, "rounds", rounds, "an integer > 0")
  local steps, rates = {}, {}
  for name, way in pairs(ways) do
    expect(who, "ways." .. tostring(name), way, "a table")
    steps[name] = function()
      M.loss(model, way[1], way[1]:next(), way[2], project):backward()
      model:zero_grad()
    end
  end
  local seconds = r:time(steps, { rounds = rounds })
  for name, way in pairs(ways) do rates[name] = way[1].used / (rounds + 1) / seconds[name] end -- one more warms up
  return seconds, rates
end

--- Shares of the questions of batches of answerer.seen() that a model answers, by kind, and `all`: see
-- tycho.vlm.answers. project: as of loss().
---@param model LanguageModel
---@param dialogue Dialogue
---@param batches table[]
---@param project fun(model: LanguageModel, seen: Tensor): Tensor
---@return table<string, number>
function M.score(model, dialogue, batches, project)
  local who = "captioner.score"
  expect(who, "model", model, "a module")
  expect_dialogue(who, dialogue)
  expect(who, "batches", batches, "a list of tables")
  expect(who, "project", project, "a function")
  local list = {}
  for i, batch in ipairs(batches) do
    expect(who, ("batch %d"):format(i), batch, "a table")
    local features = dialogue.features > 0 and ty.no_grad(project, model, batch.seen) or nil
    list[i] = { questions = batch.questions, features = features }
  end
  return vlm.answers.shares(vlm.answers.ask(model, dialogue, list))
end

--- Bits per byte that a model needs for texts.
---@param model LanguageModel
---@param sequences table[]
---@param bytes integer
---@return number
function M.bits(model, sequences, bytes)
  local who = "captioner.bits"
  expect(who, "model", model, "a module")
  expect(who, "sequences", sequences, "a list of tables")
  expect(who, "bytes", bytes, "an integer > 0")
  local sum, part = 0, 16
  for first = 1, #sequences, part do
    ty.scope(ty.no_grad, function()
      local batch = vlm.packing.padded(table.move(sequences, first, math.min(first + part - 1, #sequences), 1, {}))
      sum = sum + vlm.Dialogue.loss(model, batch):item() * batch.wanted.shape[1]
    end)
  end
  return sum / bytes / math.log(2)
end

return M
