--- What the recipes of the models of scenes share: recipes/zoo/scene-*.lua. Their pictures, their arguments, how they
-- train with checkpoints and an average of the weights, and the words that captions are made of.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local datasets = require "tycho.datasets"
local hub = require "tycho.hub"
local recipe_arguments = require "tycho.recipe.arguments"
local retrieval = require "tycho.vlm.retrieval"

local M = {}

--- The arguments of such a recipe: those that all have, with the defaults of `own` (steps, batch, lr, every, count),
-- and then its list `more`.
---@param own table<string, number>
---@param more? RecipeArgument[]
---@return RecipeArgument[]
function M.arguments(own, more)
  local list = {
    { "steps", own.steps, "training steps", quick = 3 },
    { "batch", own.batch, "pictures of a step", quick = own.quick or 4 },
    { "lr", own.lr, "peak learning rate" },
    { "count", own.count or 1000, "pictures of a split to measure with", quick = own.quick_count or 8 },
    { "every", own.every, "steps between evaluations" },
  }
  table.move(more or {}, 1, #(more or {}), #list + 1, list)
  list[#list + 1] = { "resume", false, "go on from the checkpoints in the results folder", place = true }
  list[#list + 1] = { "publish", false, "write the first seed's model to zoo/", place = true }
  return list
end

--- What scenes show that networks of the zoo draw: one or two objects of two dozen kinds on a plain colour or a
-- gradient. With all ninety kinds a network of that size draws blobs of the right colours after hours of training.
M.drawn = { objects = { 1, 2 }, rotation = 0, backgrounds = { "plain", "gradient" }, objects_of = { "dog", "cat",
  "panda", "pig", "frog", "fish", "octopus", "butterfly", "apple", "banana", "strawberry", "watermelon", "carrot",
  "pizza", "donut", "cactus", "sunflower", "car", "airplane", "sailboat", "house", "star", "heart", "umbrella" } }

--- Scenes of a split with some fields: a data set.
---@param split string
---@param fields string[]
---@param more? table  other options of the set
---@return Scenes
function M.set(split, fields, more)
  local options = { split = split, fields = fields }
  for key, value in pairs(more or {}) do options[key] = value end
  return datasets.load("scenes", options)
end

--- The names of the objects that training scenes show, as classes from 0: their names, the objects' numbers (from 0) in
-- datasets.scenes.objects, and the class of each object by its number.
---@return string[] names
---@return integer[] numbers
---@return table<integer, integer> class_of
function M.classes()
  local names, numbers, class_of = {}, {}, {}
  for i, object in ipairs(datasets.scenes.objects) do
    if not object.held_out then
      names[#names + 1], numbers[#numbers + 1] = object.name, i - 1
      class_of[i - 1] = #names - 1
    end
  end
  return names, numbers, class_of
end

--- Scenes `first` to first + count - 1 of a split as one batch, with the class (as classes() counts) of the first
-- object of each as labels, i64 [count], where there are scenes among the fields.
---@param split string
---@param fields string[]
---@param first integer
---@param count integer
---@param more? table  other options of the set; { objects = { 1, 1 } }: of one object
---@return table<string, any>
function M.labelled(split, fields, first, count, more)
  local batch = M.set(split, fields, more):batch(ty.arange(first, first + count))
  local _, _, class_of = M.classes()
  local labels = {}
  for i, scene in ipairs(batch.scene or {}) do labels[i] = class_of[scene.objects[1].object] or -1 end
  batch.labels = batch.scene and ty.tensor(labels, { dtype = "i64" }) or batch.labels
  return batch
end

--- Training scenes in batches, in another order in every epoch, made by a thread of their own.
---@param r Recipe
---@param fields string[]
---@param seed integer
---@return DataLoader
function M.loader(r, fields, seed)
  return ty.data.DataLoader(M.set("training", fields), { batch_size = r.args.batch, shuffle = true, seed = seed,
    drop_last = true, device = r.device, workers = 1 })
end

--- The options that train.fit and its like take in such a recipe: checkpoints and a log under the results of this seed,
-- an average of the weights, and the arguments of the command line.
---@param r Recipe
---@param seed integer
---@param more? table  options that are added, or are in the place of these
---@return table
function M.fit_options(r, seed, more)
  local args, folder = r.args, r:path("seed" .. seed)
  local options = { steps = args.steps, lr = args.lr, final = 0.02, weight_decay = 0.05, average = 0.999,
    every = args.every, folder = folder .. "/checkpoint", log = folder, resume = args.resume and "auto" or false,
    title = r.name:match "[^/]+$" }
  for key, value in pairs(more or {}) do options[key] = value end
  return options
end

-- What the names of weights in blocks have in common, by architecture.
local blocks = { "block", "layers", "encoder%.layer%." }

local function in_block(name)
  for _, pattern in ipairs(blocks) do
    if name:find(pattern) then return true end
  end
  return false
end

--- Muon for the matrices inside of blocks, AdamW for all else. For painters, with the same pictures, the error on
-- others is as small after 500 steps as after about 800 of AdamW at twice its usual rate. tuned: the beginning of the
-- names of weights that are trained already: AdamW with a fifth of the others' rate.
---@param model Module
---@param o { lr: number, schedule: table, clip_norm: number, tuned?: string }
---@return Optimizer
function M.muon(model, o)
  arguments.expect("scenes.muon", "model", model, "a module")
  arguments.expect("scenes.muon", "options", o, "a table")
  local inner, rest, tuned = {}, {}, {}
  for name, p in model:named_parameters() do
    local known = o.tuned and name:sub(1, #o.tuned) == o.tuned
    table.insert(known and tuned or p.ndim >= 2 and in_block(name) and inner or rest, p)
  end
  local groups = { { params = inner }, { params = rest, matrices = false } }
  if #tuned > 0 then groups[3] = { params = tuned, matrices = false, adam_rate = 0.01 } end
  return ty.optim.Muon(groups, { lr = o.lr, weight_decay = 0.01, schedule = o.schedule, clip_norm = o.clip_norm,
    adam_rate = 0.05 })
end

--- Where the trained model of a seed is kept.
---@param r Recipe
---@param seed? integer  (the first)
---@return string
function M.folder(r, seed) return r:path("seed" .. (seed or r.seeds[1]) .. "/model") end

--- Pictures of bytes as networks take them: floats from -1 to 1.
---@param image Tensor
---@return Tensor
function M.pictures(image) return image:to "f32" / 127.5 - 1 end

-- Arguments that say how a model is measured, and not how it is made.
local measuring = { count = true, drawing_steps = true, eta = true, guidance = true, interval = true,
  judge_steps = true, seeds = true }

--- The model that ships as that of the first seed, where --base names the folder zoo/: it is measured and not trained
-- again, and other seeds are trained beside it. nil for these and where --base says nothing. Arguments that make
-- another model are refused. read: of hub, hub.load by default.
---@param r Recipe
---@param seed integer
---@param read? fun(folder: string, options: table): Module|Pipeline
---@return Module|Pipeline|nil
function M.shipped(r, seed, read)
  if r.args.base == "" or seed ~= r.seeds[1] then return nil end
  local folder = r:base(r.name:match "[^/]+$")
  if not ty.io.exists(folder .. "/checksums.json") then
    arguments.fail("%s: --base: expected a folder zoo/ with this recipe's model, got %s", r.name, r.args.base)
  end
  local changed = r.quick and {} or recipe_arguments.changed(r.entries, r.args)
  for _, entry in ipairs(r.entries) do
    local name = entry[1]
    if changed[name] ~= nil and not measuring[name] then
      arguments.fail("%s: --base: expected the arguments that the model in %s was made with, got --%s %s; without "
        .. "--base another is made", r.name, folder, name:gsub("_", "-"), changed[name])
    end
  end
  r:say("seed %d: measures the model in %s", seed, folder)
  r.measured = folder -- so that zoo.publish writes its page alone
  return (read or hub.load)(folder, { dtype = "f32", device = r.device })
end

--- Writes the first seed's model in half precision, and the tokenizer if there is one.
---@param r Recipe
---@param folder string
---@param tokenizer? Tokenizer
function M.write(r, folder, tokenizer)
  hub.load(M.folder(r), { dtype = "f16" }):save(folder)
  if tokenizer then tokenizer:save(folder) end
end

-- ---- single emoji ----

--- The emoji that models of scenes are trained on, with their names.
---@class TrainingEmoji
---@field names string[]
---@field subgroups string[]
---@field pictures Tensor  u8 [n, 4, 64, 64]
local TrainingEmoji = {}
TrainingEmoji.__index = TrainingEmoji

--- The emoji that models of scenes may be trained on: the training part of datasets.emoji but those whose objects no
-- training scene has.
---@return TrainingEmoji
function M.emoji()
  local held_out, places = {}, {}
  for _, object in ipairs(datasets.scenes.objects) do held_out[object.code] = object.held_out end
  local set = datasets.load("emoji", { size = 64, languages = {} })
  local all = set:batch(ty.arange(#set))
  local list = setmetatable({ names = {}, subgroups = {} }, TrainingEmoji)
  for i, code in ipairs(all.code) do
    if not held_out[code] then
      local n = #places + 1
      places[n], list.names[n], list.subgroups[n] = i - 1, all.name[i], all.subgroup[i]
    end
  end
  list.pictures = all.image:index_select(0, ty.tensor(places))
  return list
end

--- Pictures of emoji with transparency, u8 [n, 4, h, w], on plain backgrounds of random colours, as networks take them.
---@param pictures Tensor
---@return Tensor f32 [n, 3, h, w]
function M.on_colours(pictures)
  local x = pictures:to "f32" / 255
  local alpha = x:narrow(1, 3, 1)
  return (x:narrow(1, 0, 3) * alpha + ty.rand(pictures.shape[1], 3, 1, 1) * (1 - alpha)) * 2 - 1
end

--- n emoji drawn at random on plain backgrounds, and their places in the lists, i64 [n].
---@param n integer
---@return Tensor pictures  f32 [n, 3, 64, 64]
---@return Tensor places
function TrainingEmoji:draw(n)
  local places = ty.randint(0, #self.names, { n })
  return M.on_colours(self.pictures:index_select(0, places)), places
end

-- ---- words ----

local first, last = "<|startoftext|>", "<|endoftext|>"

--- A tokenizer as CLIP's: byte-level BPE of small letters, learnt from texts, a mark before a text and another behind
-- it, which fills batches up as well.
---@param texts string[]
---@param vocabulary integer
---@return Tokenizer
function M.tokenizer_of(texts, vocabulary)
  arguments.expect("scenes.tokenizer_of", "texts", texts, "a list of strings")
  local learnt = ty.tokenizer.train(texts, { vocabulary = vocabulary, special = { first, last } })
  local json = ty.io.json_decode(learnt:json())
  local function piece(token) return { SpecialToken = { id = token, type_id = 0 } } end
  local function text(name) return { Sequence = { id = name, type_id = 0 } } end
  json.normalizer = { type = "Lowercase" }
  json.post_processor = { type = "TemplateProcessing",
    single = ty.io.array { piece(first), text "A", piece(last) },
    pair = ty.io.array { piece(first), text "A", piece(last), text "B", piece(last) },
    special_tokens = { [first] = { id = first, ids = ty.io.array { 0 }, tokens = ty.io.array { first } },
      [last] = { id = last, ids = ty.io.array { 1 }, tokens = ty.io.array { last } } } }
  local made = ty.tokenizer.parse(ty.io.json_encode(json))
  local fields = ty.tokenizer.fields(made)
  fields.bos, fields.eos, fields.pad, fields.unk = 0, 1, 1, 1
  return made
end

--- Such a tokenizer of captions of training scenes and of the texts of `more`.
---@param count integer      captions
---@param vocabulary integer
---@param more? string[]
---@return Tokenizer
function M.tokenizer(count, vocabulary, more)
  local texts = M.set("training", { "caption" }):batch(ty.arange(count)).caption
  for _, text in ipairs(more or {}) do texts[#texts + 1] = text:lower() end
  return M.tokenizer_of(texts, vocabulary)
end

--- Tokens of captions, i64 [n, t]: cut to a length, and filled up with the mark of the end to that of the longest.
---@param tokenizer Tokenizer
---@param captions string[]
---@param length integer
---@return Tensor
function M.tokens(tokenizer, captions, length)
  return (tokenizer:encode_batch(captions, { max_length = length }))
end

--- What fn makes of pictures of bytes, some at a time and without a graph: it gets them as networks take them, on the
-- device, with the place of the first (from 0) and their number.
---@param image Tensor  u8 [n, 3, h, w]
---@param fn fun(pictures: Tensor, start: integer, rows: integer): Tensor
---@param device? string  ("cpu")
---@return Tensor [n, ...]
function M.through(image, fn, device)
  local who = "zoo.scenes.through"
  arguments.expect(who, "image", image, "a tensor")
  arguments.expect(who, "fn", fn, "a function")
  device = arguments.expect(who, "device", device, "a string or nil") or "cpu"
  return retrieval.embed(image.shape[1], function(start, rows)
    return fn(M.pictures(image:narrow(0, start, rows):to { device = device }), start, rows)
  end)
end

--- Features of captions by a CLIP, [n, d], not of unit length.
---@param clip CLIPModel
---@param tokenizer Tokenizer
---@param captions string[]
---@param length? integer  most tokens of a caption (48)
---@return Tensor
function M.read(clip, tokenizer, captions, length)
  local who = "zoo.scenes.read"
  arguments.expect(who, "clip", clip, "a module")
  length = arguments.expect(who, "length", length, "an integer >= 1 or nil") or 48
  return clip:text_features(M.tokens(tokenizer, captions, length):to { device = clip:device() })
end

return M
