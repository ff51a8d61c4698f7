--- Models that answer questions about scenes: what recipes/zoo/scene-vlm.lua and recipes on its model share. Their
-- tokens, how they begin, how they are trained, and how many questions about other scenes they answer word for word.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local datasets = require "tycho.datasets"
local hub = require "tycho.hub"
local judge = require "tycho.zoo.judge"
local models = require "tycho.models"
local scenes = require "tycho.zoo.scenes"
local shelf = require "tycho.zoo.shelf"
local vlm = require "tycho.vlm"

local nn = ty.nn
local M = {}

local LAST, IMAGE = "<|endoftext|>", "<image>"

local TEMPLATE = "{% for message in messages %}{% if message.role == 'user' %}"
  .. "{% if message.content is string %}{{ ' ' + message.content + '\n' }}{% else %}"
  .. "{% for part in message.content %}{% if part.type == 'image' %}<image>{% endif %}{% endfor %}"
  .. "{% for part in message.content %}{% if part.type == 'text' %}{{ ' ' + part.text + '\n' }}{% endif %}"
  .. "{% endfor %}{% endif %}{% else %}{{ ' ' + message.content + eos_token }}{% endif %}{% endfor %}"

--- What is asked where the answer is a caption.
M.describe = { "describe the picture.", "what does the picture show?", "give a caption." }

-- ---- tokens ----

--- A tokenizer of the language of scenes: byte-level BPE of captions, questions and answers, in which nearly every word
-- is one token, with the marks of the end and of a picture. count: training scenes that it learns from.
---@param count integer
---@param vocabulary integer
---@return Tokenizer
function M.tokenizer(count, vocabulary)
  local batch = scenes.set("training", { "caption", "questions" }, { questions = 8 }):batch(ty.arange(count))
  local texts = table.move(M.describe, 1, #M.describe, 1, {})
  for i, caption in ipairs(batch.caption) do
    texts[#texts + 1] = " " .. caption
    for _, turn in ipairs(batch.questions[i]) do texts[#texts + 1] = (" %s\n %s"):format(turn.question, turn.answer) end
  end
  local learnt = ty.tokenizer.train(texts, { vocabulary = vocabulary, special = { LAST, IMAGE } })
  local fields = ty.tokenizer.fields(learnt)
  fields.bos, fields.eos, fields.pad, fields.chat_template = 0, 0, 0, TEMPLATE
  return learnt
end

--- The dialogue with a model of a tokenizer of this kind. features: of a picture (64; 0: a model that only reads).
---@param tokenizer Tokenizer
---@param features? integer
---@return Dialogue
function M.dialogue(tokenizer, features)
  return vlm.Dialogue(tokenizer, { image_token = 1, features = features or 64, before = " ", between = "\n",
    lead = " " })
end

-- ---- models ----

--- The config of the language model.
---@param tokenizer Tokenizer
---@param o { width: integer, layers: integer, heads: integer, inner: integer }
---@return table
function M.text_config(tokenizer, o)
  return { model_type = "llama", vocab_size = tokenizer.size, hidden_size = o.width, intermediate_size = o.inner,
    num_hidden_layers = o.layers, num_attention_heads = o.heads, max_position_embeddings = 256,
    tie_word_embeddings = true, bos_token_id = 0, eos_token_id = 0 }
end

--- A Llava whose tower is a residual network of the zoo and whose projector and language model are new. The network
-- stays as it is; the norm and the embedding of places behind it are trained.
---@param tokenizer Tokenizer
---@param tower string
---@param o { width: integer, layers: integer, heads: integer, inner: integer }
---@return Llava
function M.model(tokenizer, tower, o)
  local seen = models.ResNetVisionModel.around(shelf.load(tower), 64)
  local vision = seen:published_config()
  local model = models.Llava { model_type = "llava", text_config = M.text_config(tokenizer, o), vision_config = vision,
    image_token_index = 1, vision_feature_layer = -1, tie_word_embeddings = true, eos_token_id = 0 }
  model.vision_tower:load_state_dict(seen:state_dict())
  model.vision_tower.resnet:requires_grad_(false)
  M.spread(model)
  return model
end

--- Begins the projector and the layers of the language model anew with weights whose spread goes by their width: the
-- usual 0.02 leaves attention of narrow layers even for long.
---@param model LanguageModel  a Llava, or a language model alone
function M.spread(model)
  local decoder = model.language_model or model
  local branches = 2 * decoder.config.num_hidden_layers
  for name, p in model:named_parameters() do
    local ours = name:find("model.layers", 1, true) or name:find("multi_modal_projector", 1, true)
    if ours and p.ndim == 2 then
      local last = name:find "o_proj" or name:find "down_proj"
      nn.init.normal(p, 0, (p.shape[2] * (last and branches or 1)) ^ -0.5)
    end
  end
end

-- ---- words for patches ----

-- By row the mean of the tokens of some words, f32 [rows, vocabulary]: times the embeddings, an embedding for each row.
local function averages(tokenizer, rows)
  local result = {}
  for i, words in ipairs(rows) do
    local row, count = {}, 0
    for k = 1, tokenizer.size do row[k] = 0 end
    for _, text in ipairs(words) do
      for _, id in ipairs(tokenizer:encode(" " .. text):tolist()) do row[id + 1], count = row[id + 1] + 1, count + 1 end
    end
    for k = 1, #row do row[k] = row[k] / count end
    result[i] = row
  end
  return ty.keep(ty.tensor(result, { dtype = "f32" }))
end

--- What every place shows, said in the language model's own words: the loss by which the tower and the projector learn
-- to give features that lie near the embeddings of the object's name and of its colour, or of the background's.
-- Pictures have one answer for a question, and an answer of each place here, so they teach faster (Jiang et al. 2021,
-- "All Tokens Matter: Token Labeling for Training Better Vision Transformers"). Returns a function of the model,
-- features [n, places, width] and the batch, whose fields are owner, boxes and scene.
---@param tokenizer Tokenizer
---@return fun(model: Llava, features: Tensor, batch: table): Tensor
function M.patch_words(tokenizer)
  local names, tints, grounds = {}, {}, {}
  for i, object in ipairs(datasets.scenes.objects) do names[i] = { object.name, object.plural } end
  names[#names + 1] = { "background" }
  for name, place in pairs(datasets.scenes.tints) do tints[place] = { name } end
  for name, place in pairs(datasets.scenes.backgrounds) do grounds[place] = { name } end
  local of_names, of_tints, of_grounds = averages(tokenizer, names), averages(tokenizer, tints),
    averages(tokenizer, grounds)
  local function likelihoods(x, table_of, weight)
    return ty.linear(x, table_of:to { device = x.device }:matmul(weight)):log_softmax(-1)
  end
  return function(model, features, batch)
    local objects, colours = judge.cells(batch, math.tointeger(features.shape[2] ^ 0.5))
    local x = features * features:square():mean({ -1 }, true):add(1e-6):rsqrt()
    local weight = model.language_model.model.embed_tokens.weight
    local named = -(objects * likelihoods(x, of_names, weight)):sum(-1):mean()
    local tinted = colours:narrow(2, 1, #tints)
    local coloured = -(tinted * likelihoods(x, of_tints, weight)):sum() / tinted:sum():clamp(1)
    -- Backgrounds have one colour or two, photographs none.
    local rows = {}
    for i, scene in ipairs(batch.scene) do
      rows[i] = {}
      for k = 1, #grounds do rows[i][k] = 0 end
      local list = scene.background.colours or {}
      for _, name in ipairs(list) do
        local k = datasets.scenes.backgrounds[name]
        rows[i][k] = rows[i][k] + 1 / #list
      end
    end
    local ground = objects:narrow(2, #names - 1, 1) * ty.tensor(rows):to { device = x.device }:unsqueeze(1)
    local seen = -(ground * likelihoods(x, of_grounds, weight)):sum() / ground:sum():clamp(1)
    return named + coloured + seen
  end
end

-- ---- training ----

--- The arguments of a recipe that trains such a model.
---@param own table<string, number>  steps, batch, lr, every, count
---@param more? RecipeArgument[]
---@return RecipeArgument[]
function M.arguments(own, more)
  local list = { { "questions", 12, "about each training scene" } }
  table.move(more or {}, 1, #(more or {}), #list + 1, list)
  return scenes.arguments(own, list)
end

-- Training scenes in batches, made by a thread of their own.
local function loader(r, seed, fields, more)
  return ty.data.DataLoader(scenes.set("training", fields, more), { batch_size = r.args.batch, shuffle = true,
    seed = seed, drop_last = true, device = r.device, workers = 1 })
end

--- Trains the tower and the projector of a model to name what each patch shows (patch_words).
---@param r Recipe
---@param model Llava
---@param tokenizer Tokenizer
---@param seed integer
---@param options? table  those of train.fit that are other than zoo.scenes.fit_options gives
---@return Llava model
function M.look(r, model, tokenizer, seed, options)
  local words, folder = M.patch_words(tokenizer), r:path(("seed%d/look"):format(seed))
  local given = { loss = function(m, batch)
    return words(m, m:picture_features(scenes.pictures(batch.image)), batch)
  end, folder = folder .. "/checkpoint", log = folder, average = 0, final = 0.5 }
  for key, value in pairs(options or {}) do given[key] = value end
  ty.train.fit(model, loader(r, seed, { "image", "owner", "boxes", "scene" }), scenes.fit_options(r, seed, given))
  return model
end

--- Scenes of a split with their questions in batches, as vlm.answers.ask() takes them.
---@param split string
---@param count integer  scenes
---@param more? table    options of the set
---@return table[]
function M.questions(split, count, more)
  arguments.expect("answerer.questions", "count", count, "an integer >= 1")
  local set, batches = scenes.set(split, { "image", "questions" }, more), {}
  for start = 0, count - 1, 50 do
    local batch = set:batch(ty.arange(start, math.min(start + 50, count)))
    batches[#batches + 1] = { image = batch.image, pictures = scenes.pictures(batch.image),
      questions = batch.questions }
  end
  return batches
end

--- Shares of questions of a split that a model answers word for word: by kind, and `all`, the mean of the kinds'.
---@param model LanguageModel
---@param dialogue Dialogue
---@param split string    a split of datasets.scenes
---@param count integer   scenes
---@return table<string, number>
function M.measure(model, dialogue, split, count)
  return vlm.answers.shares(vlm.answers.ask(model, dialogue, M.questions(split, count)))
end

--- Shares by kind as text.
---@param shares table<string, number>
---@return string
function M.told(shares)
  arguments.expect("answerer.told", "shares", shares, "a table")
  local words = {}
  for _, kind in ipairs(datasets.scenes.question_kinds) do
    words[#words + 1] = ("%s %.3f"):format(kind, shares[kind] or 0)
  end
  return table.concat(words, ", ")
end

--- Trains a model on questions about training scenes. words: patch_words() of its tokenizer, which is added to the loss
-- with a weight of 0.2, so that places go on to be named (nil for a model that only reads); pointer: of zoo.pointing,
-- attached to the model, whose loss is added with a weight of 0.5; scenes: options of the scenes. Returns the model
-- with averaged weights.
---@param r Recipe
---@param model LanguageModel
---@param dialogue Dialogue
---@param seed integer
---@param options? table  those of train.fit that are other than zoo.scenes.fit_options gives, words, pointer, scenes
---@return LanguageModel
function M.train(r, model, dialogue, seed, options)
  local args, o = r.args, {}
  for key, value in pairs(options or {}) do o[key] = value end
  local words, pointer, sees, more = o.words, o.pointer, dialogue.features > 0, { questions = args.questions }
  for key, value in pairs(o.scenes or {}) do more[key] = value end
  o.words, o.pointer, o.scenes = nil, nil, nil
  r:say("seed %d: %d parameters", seed, model:count_parameters())
  local given = { average = 0.998, loss = function(m, batch)
    local packed = dialogue:packed(batch.questions)
    if not sees then return vlm.Dialogue.loss(m, packed) end
    local features = m:picture_features(scenes.pictures(batch.image))
    local how = { features = features }
    local answers, points
    if pointer then
      answers, points = pointer:loss(m, packed, batch, how)
    else
      answers = vlm.Dialogue.loss(m, packed, how)
    end
    local loss, numbers = answers, { answers = answers:detach() }
    if points then loss, numbers.points = loss + points * 0.5, points:detach() end
    if words then
      local named = words(m, features, batch)
      loss, numbers.patches = loss + named * 0.2, named:detach()
    end
    return loss, numbers
  end, evaluate = function(step, m)
    local found = M.measure(m, dialogue, "validation", math.min(200, args.count))
    r:say("step %d: %.3f of the questions answered (%s)", step, found.all, M.told(found))
    return found
  end }
  for key, value in pairs(o) do given[key] = value end
  local fields = { "image", "questions" }
  if words or pointer then fields = { "image", "questions", "owner", "boxes", "scene" } end
  local _, averaged = ty.train.fit(model, loader(r, seed, fields, more), scenes.fit_options(r, seed, given))
  return averaged:eval()
end

-- ---- tuning the decoder alone ----

--- Batches of questions() with the features of their pictures in the place of these: what methods that leave the tower
-- and the projector as they are compute once.
---@param model Llava
---@param batches table[]
---@return table[]
function M.featured(model, batches)
  local list = {}
  for i, batch in ipairs(batches) do
    local features = ty.no_grad(function()
      return model:picture_features(batch.pictures:to { device = model:device() }):clone()
    end)
    list[i] = { features = ty.keep(features), questions = batch.questions, image = batch.image }
  end
  return list
end

--- The samples of such batches at some positions, from 0, as one batch.
---@param batches table[]
---@param positions integer[]
---@return table
function M.subset(batches, positions)
  local at, all, features, questions, images = {}, 0, {}, {}, {}
  for _, batch in ipairs(batches) do
    for i = 1, #batch.questions do at[all], all = { batch, i }, all + 1 end
  end
  for k, place in ipairs(positions) do
    if not at[place] then
      arguments.fail("answerer.subset: positions: expected integers in [0, %d], got %s", all - 1, tostring(place))
    end
    local batch, i = at[place][1], at[place][2]
    features[k], images[k] = batch.features:select(0, i - 1), batch.image:select(0, i - 1)
    questions[k] = batch.questions[i]
  end
  return { features = ty.keep(ty.stack(features)), questions = questions, image = ty.keep(ty.stack(images)) }
end

--- The same pictures with their first question alone: as many tokens of pictures and of text as prompts have.
---@param batches table[]
---@return table[]
function M.single(batches)
  arguments.expect("answerer.single", "batches", batches, "a list of tables")
  local list = {}
  for i, batch in ipairs(batches) do
    list[i] = {}
    for key, value in pairs(batch) do list[i][key] = value end
    list[i].questions = {}
    for k, turns in ipairs(batch.questions) do list[i].questions[k] = { turns[1] } end
  end
  return list
end

--- The same batches with what the tower gives of their pictures as `seen`: what methods compute once that train the
-- projector, too.
---@param model Llava
---@param batches table[]
---@return table[]
function M.seen(model, batches)
  local list = {}
  for i, batch in ipairs(batches) do
    local seen = ty.no_grad(function()
      return vlm.pooling.seen(model, batch.pictures:to { device = model:device() }):clone()
    end)
    list[i] = { seen = ty.keep(seen), questions = batch.questions, image = batch.image }
  end
  return list
end

--- A function that gives a model's logits of all words of the answers of batches of featured(), [words, vocabulary].
---@param model Llava
---@param dialogue Dialogue
---@param batches table[]
---@return fun(): Tensor
function M.logits(model, dialogue, batches)
  arguments.expect("answerer.logits", "model", model, "a module")
  arguments.expect("answerer.logits", "batches", batches, "a list of tables")
  local packed = {}
  for i, batch in ipairs(batches) do packed[i] = dialogue:packed(batch.questions) end
  return function()
    local list = {}
    for i, batch in ipairs(batches) do
      list[i] = vlm.Dialogue.logits(model, packed[i], { features = batch.features })
    end
    return ty.concat(list, 0)
  end
end

-- Draws pictures from batches of featured() at random, each once before any comes again: a function that returns the
-- questions about the next `count` and what the batches have of them as `field` (nil: nothing).
local function drawn(pool, count, field)
  local features, questions = {}, {}
  for i, batch in ipairs(pool) do
    features[i] = batch[field]
    table.move(batch.questions, 1, #batch.questions, #questions + 1, questions)
  end
  local all, next_places = field and ty.keep(ty.concat(features, 0)), ty.data.rounds(#questions, count)
  return function()
    local places, asked = next_places(), {}
    for k, place in ipairs(places) do asked[k] = questions[place + 1] end
    return asked, all and all:index_select(0, ty.tensor(places, { dtype = "i64" }):to { device = all.device }) or nil
  end
end

--- Draws from batches of featured() at random, each picture once before any comes again: a function that returns the
-- next `count` pictures' questions, packed, and their features [count, features, hidden]. By the random numbers that
-- ty.manual_seed began.
---@param dialogue Dialogue
---@param pool table[]
---@param count integer
---@return fun(): table, Tensor
function M.draw(dialogue, pool, count)
  arguments.expect("answerer.draw", "pool", pool, "a list of tables")
  arguments.expect("answerer.draw", "count", count, "an integer > 0")
  local draw = drawn(pool, count, "features")
  return function()
    local asked, features = draw()
    return dialogue:packed(asked), features
  end
end

--- Trains a model's decoder, and what a method added to it, on questions about pictures whose features are known. pool:
-- of featured(), or of seen() with project (a function of the model and what is seen that gives features: then all that
-- is not frozen is trained); of a dialogue without pictures only the questions count. options: steps, batch (16
-- pictures), lr (5e-4), seed, decay (0: of weights), watch(step, loss), fast and times (parameters whose names match
-- the pattern `fast` learn at so many times the rate), beside (a function of the model that gives a loss to be added in
-- each step), loss(model, questions, features, step) (in place of that of the questions about the features). Returns
-- the mean loss of the last tenth of the steps.
---@param model Llava
---@param dialogue Dialogue
---@param pool table[]
---@param options table
---@return number
function M.tune(model, dialogue, pool, options)
  local o = arguments.read("answerer.tune", options, { steps = 100, batch = 16, lr = 5e-4, seed = 0, decay = 0.0,
    watch = arguments.none, fast = arguments.none, times = 1.0, project = arguments.none, beside = arguments.none,
    loss = arguments.none }, { steps = "an integer > 0", batch = "an integer > 0", watch = "a function",
    fast = "a string", times = "a number > 0", project = "a function", beside = "a function", loss = "a function" })
  local loss_of = o.loss or function(m, asked, given)
    return vlm.Dialogue.loss(m, dialogue:packed(asked), { features = given and o.project and o.project(m, given)
      or given })
  end
  local slow, fast = {}, {}
  for name, p in (o.project and model or model.language_model or model):named_parameters() do
    if p.requires_grad then table.insert(o.fast and name:find(o.fast) and fast or slow, p) end
  end
  local groups = { { params = slow } }
  if #fast > 0 then groups[2] = { params = fast, lr = o.lr * o.times } end
  local opt = ty.optim.AdamW(groups, { lr = o.lr, beta2 = 0.95, clip_norm = 1,
    weight_decay = o.decay, schedule = ty.optim.cosine { steps = o.steps, warmup = o.steps // 10, final = 0.05 } })
  ty.manual_seed(o.seed)
  local draw = drawn(pool, o.batch, dialogue.features > 0 and (o.project and "seen" or "features") or nil)
  model:train()
  local last = ty.train.minimize(opt, o.steps, function(step)
    local asked, features = draw()
    local loss = loss_of(model, asked, features, step)
    return o.beside and loss + o.beside(model) or loss
  end, o.watch)
  model:eval()
  return last
end

--- The shares that were measured in training, by the log of a folder, as a plot over steps.
---@param folder string  with metrics.jsonl
---@return LinePlot
function M.curve(folder)
  local kinds, series = { "all" }, {}
  table.move(datasets.scenes.question_kinds, 1, #datasets.scenes.question_kinds, 2, kinds)
  for i, kind in ipairs(kinds) do series[i] = { x = {}, y = {}, label = kind:gsub("_", " or ") } end
  for line in ty.io.read(folder .. "/metrics.jsonl"):gmatch "[^\n]+" do
    local row = ty.io.json_decode(line)
    if row.all then
      for i, kind in ipairs(kinds) do
        table.insert(series[i].x, row.step)
        table.insert(series[i].y, row[kind] or 0)
      end
    end
  end
  return ty.plot.line { series = series, x_label = "steps", y_label = "share of the questions that are answered",
    y_range = { 0, 1 } }
end

--- Writes the first seed's model in half precision, as published models of its kind are: with its tokenizer, the
-- template of chats, and what pictures go through before they are seen.
---@param r Recipe
---@param folder string
---@param tokenizer Tokenizer
function M.write(r, folder, tokenizer)
  local model = hub.load(scenes.folder(r), { dtype = "f16" })
  model:save(folder)
  tokenizer:save(folder)
  local side = model.vision_tower.config.image_size
  ty.io.write_atomic(folder .. "/preprocessor_config.json", ty.io.json_encode { do_resize = true, do_rescale = true,
    do_normalize = true, do_center_crop = false, rescale_factor = 1 / 255, image_mean = ty.io.array { 0.5, 0.5, 0.5 },
    image_std = ty.io.array { 0.5, 0.5, 0.5 }, resample = 3, size = { height = side, width = side },
    image_processor_type = "CLIPImageProcessor" })
end

return M
