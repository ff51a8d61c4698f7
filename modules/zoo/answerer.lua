--- Models that answer questions about scenes: what recipes/zoo/scene-vlm.lua and recipes of its family share. How they
-- are trained on questions of the training scenes, and how many questions of other scenes they answer word for word.
local ty = require "tycho"
local datasets = require "tycho.datasets"
local hub = require "tycho.hub"
local scenes = require "tycho.zoo.scenes"
local shelf = require "tycho.zoo.shelf"
local vlm = require "tycho.vlm"

local M = {}

--- The arguments of such a recipe.
---@param own table<string, number>  steps, batch, lr, every
---@param more? RecipeArgument[]
---@return RecipeArgument[]
function M.arguments(own, more)
  local list = { { "questions", 8, "about each training scene" },
    { "precision", "bf16", "of products in training: bf16 or f32" } }
  table.move(more or {}, 1, #(more or {}), #list + 1, list)
  return scenes.arguments(own, list)
end

-- Pictures and the dialogues about them, from a batch of scenes.
local function inputs(dialogue, batch)
  local tokens, targets = dialogue:rows(batch.questions)
  local pictures = dialogue.features > 0 and scenes.pictures(batch.image) or nil
  local device = batch.image.device
  return tokens:to { device = device }, targets:to { device = device }, { pictures = pictures }
end

--- Muon for the matrices of the layers, AdamW for all else.
---@param model Module
---@param o { lr: number, schedule: table, clip_norm: number }
---@return Optimizer
function M.optimizer(model, o)
  local inner, rest = {}, {}
  for name, p in model:named_parameters() do
    table.insert(p.ndim == 2 and name:find("layers", 1, true) and inner or rest, p)
  end
  return ty.optim.Muon({ { params = inner }, { params = rest, matrices = false } }, { lr = o.lr, weight_decay = 0.01,
    schedule = o.schedule, clip_norm = o.clip_norm, adam_rate = 0.05 })
end

--- Shares of questions of a split that a model answers word for word, greedily and each by itself: by kind, and `all`,
-- the mean of the kinds' shares, so that those that are asked more often do not count for more.
---@param model LanguageModel
---@param dialogue Dialogue
---@param split string    a split of datasets.scenes
---@param count integer   scenes
---@param device? string
---@return table<string, number>
function M.measure(model, dialogue, split, count, device)
  local set = scenes.set(split, { "image", "questions" })
  local right, asked = {}, {}
  local training = model.training
  model:eval()
  for start = 0, count - 1, 50 do
    local batch = set:batch(ty.arange(start, math.min(start + 50, count)))
    local single, at = {}, {}
    for i, questions in ipairs(batch.questions) do
      for _, question in ipairs(questions) do
        single[#single + 1], at[#at + 1] = { question }, i - 1
      end
    end
    local tokens, targets = dialogue:rows(single)
    local options = {}
    if dialogue.features > 0 then
      options.pictures = scenes.pictures(batch.image):index_select(0, ty.tensor(at)):to { device = device }
    end
    local answered = ty.scope(function()
      return dialogue.answered(model, tokens:to { device = device }, targets:to { device = device }, options)
    end)
    for i, turns in ipairs(single) do
      local kind = turns[1].kind
      asked[kind] = (asked[kind] or 0) + 1
      right[kind] = (right[kind] or 0) + (answered[i] and 1 or 0)
    end
  end
  model:train(training)
  local shares, sum, kinds = {}, 0, 0
  for kind, n in pairs(asked) do
    shares[kind] = right[kind] / n
    sum, kinds = sum + shares[kind], kinds + 1
  end
  shares.all = sum / kinds
  return shares
end

--- Trains a model on questions about the training scenes; options: those of train.fit that are other than
-- zoo.scenes.fit_options gives. Returns the model with averaged weights.
---@param r Recipe
---@param model LanguageModel
---@param dialogue Dialogue
---@param seed integer
---@param options? table
---@return LanguageModel
function M.train(r, model, dialogue, seed, options)
  local args = r.args
  r:say("seed %d: %d parameters", seed, model:count_parameters())
  local set = scenes.set("training", { "image", "questions" }, { questions = args.questions })
  local loader = ty.data.DataLoader(set, { batch_size = args.batch, shuffle = true, seed = seed, drop_last = true,
    device = r.device, workers = 1 })
  local given = { optimizer = M.optimizer, loss = function(m, batch)
      return ty.autocast(args.precision == "bf16" and "bf16", m.loss, m, inputs(dialogue, batch))
    end,
    evaluate = function(step, m)
      local found = M.measure(m, dialogue, "validation", math.min(200, args.count), r.device)
      local words = {}
      for _, kind in ipairs(datasets.scenes.question_kinds) do
        words[#words + 1] = ("%s %.3f"):format(kind, found[kind] or 0)
      end
      r:say("step %d: %.3f of the questions answered (%s)", step, found.all, table.concat(words, ", "))
      return found
    end }
  for key, value in pairs(options or {}) do given[key] = value end
  local _, averaged = ty.train.fit(model, loader, scenes.fit_options(r, seed, given))
  return averaged:eval()
end

--- A language model and a tower of pictures of the zoo as one model, and the dialogue with it.
---@param language string
---@param tower string
---@param device? string
---@return Llava
---@return Dialogue
function M.start(language, tower, device)
  local model = vlm.join(shelf.load(language), shelf.load(tower))
  local vision = model.vision_tower.config
  local side = vision.image_size // vision.patch_size
  return model:to(device or "cpu"), vlm.Dialogue(shelf.tokenizer(language),
    { image_token = model.config.image_token_index, features = side * side })
end

local TEMPLATE = "{% for message in messages %}{% if message.role == 'user' %}"
  .. "{% if message.content is string %}{{ '\n' + message.content + '\n' }}{% else %}"
  .. "{% for part in message.content %}{% if part.type == 'image' %}<image>{% endif %}{% endfor %}"
  .. "{% for part in message.content %}{% if part.type == 'text' %}{{ '\n' + part.text + '\n' }}{% endif %}"
  .. "{% endfor %}{% endif %}{% else %}{{ message.content + eos_token }}{% endif %}{% endfor %}"

-- The language model's tokenizer with one more token, which stands for a picture's features.
local function tokenizer_with(language, id)
  local json = ty.io.json_decode(shelf.tokenizer(language):json())
  table.insert(json.added_tokens, { id = id, content = "<image>", single_word = false, lstrip = false, rstrip = false,
    normalized = false, special = true })
  return ty.tokenizer.parse(ty.io.json_encode(json))
end

--- Writes the first seed's model in half precision, as published models of its kind are: with a tokenizer that has the
-- token of pictures, a chat template, and what pictures go through before they are seen.
---@param r Recipe
---@param folder string
---@param language string  the model of the zoo whose tokenizer it has
function M.write(r, folder, language)
  local model = hub.load(scenes.folder(r), { dtype = "f16" })
  model:save(folder)
  tokenizer_with(language, model.config.image_token_index):save(folder)
  local path = folder .. "/tokenizer_config.json"
  local config = ty.io.json_decode(ty.io.read(shelf.path(language) .. "/tokenizer_config.json"))
  config.chat_template, config.image_token = TEMPLATE, "<image>"
  ty.io.write_atomic(path, ty.io.json_encode(config))
  local side = model.vision_tower.config.image_size
  ty.io.write_atomic(folder .. "/preprocessor_config.json", ty.io.json_encode { do_resize = true, do_rescale = true,
    do_normalize = true, rescale_factor = 1 / 255, image_mean = ty.io.array { 0.5, 0.5, 0.5 },
    image_std = ty.io.array { 0.5, 0.5, 0.5 }, resample = 3, size = { height = side, width = side },
    image_processor_type = "CLIPImageProcessor" })
end

return M
