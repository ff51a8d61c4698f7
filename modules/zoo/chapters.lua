--- The text of the zoo's language models in parts: what techniques that need no training calibrate with, choose by and
-- are measured on. The models read every chapter of the King James Bible but each tenth, see zoo.language.
local ty = require "tycho"
local datasets = require "tycho.datasets"
local llm = require "tycho.llm"
local random = require "tycho.datasets.random"
local shelf = require "tycho.zoo.shelf"

local arguments = require "tycho.arguments"

-- `wanted` of a list of chapters, as a seed draws them.
local function drawn(set, wanted, seed)
  local draw, order, list = random.new(seed, "chapters", 0), {}, {}
  for i = 1, #set do order[i] = i - 1 end
  for i = 1, math.min(wanted, #set) do
    local k = draw:integer(i, #set)
    order[i], order[k] = order[k], order[i]
    list[i] = set:get(order[i]).text
  end
  return list
end

-- The texts of a set, dealt into two hands.
local function dealt(set)
  local all = {}
  for i = 1, #set do all[i] = set:get(i - 1).text end
  return ty.data.deal(all, 2)
end

-- `wanted` items of a list, spread over all of it.
local function spread(list, wanted)
  wanted = math.min(wanted, #list)
  local some = {}
  for i = 1, wanted do some[i] = list[(i - 1) * #list // wanted + 1] end
  return some
end

--- Chapters of the King James Bible in the tokens of a model of the zoo. options: model ("kjv-lm"), folder (where token
-- files go), seed (0: which chapters are calibrated with), training (48: how many, of those that the model was trained
-- on), validation (8) and held_out (24: chapters that it never saw, others for each; spread over all books), length
-- (256: tokens of a row). Returns the parts as llm.data.Packed, the tokenizer, and of held_out the bytes.
---@param options { model?: string, folder: string, seed?: integer, training?: integer, validation?: integer,
---  held_out?: integer, length?: integer }
---@return { training: PackedDataset, validation: PackedDataset, held_out: PackedDataset, tokenizer: Tokenizer,
---  bytes: integer }
return function(options)
  local who = "zoo.chapters"
  local o = arguments.read(who, options, { model = "kjv-lm", folder = "", seed = 0, training = 48, validation = 8,
    held_out = 24, length = 256 }, { training = "an integer >= 1", validation = "an integer in [1, 59]",
    held_out = "an integer in [1, 59]", length = "an integer >= 2" })
  if o.folder == "" then arguments.fail("%s: folder: expected a folder for the token files, got none", who) end
  local tokenizer = shelf.tokenizer(o.model)
  local seen, unseen = datasets.load("kjv"), datasets.load("kjv", { split = "held_out" })
  local hands = dealt(unseen)
  local parts = { training = drawn(seen, o.training, o.seed), validation = spread(hands[1], o.validation),
    held_out = spread(hands[2], o.held_out) }
  ty.io.mkdir(o.folder)
  local result, mark = { tokenizer = tokenizer, bytes = 0 }, "<|endoftext|>"
  for name, list in pairs(parts) do
    local ids = {}
    for i, chapter in ipairs(list) do ids[i] = tokenizer:encode(mark .. chapter .. mark) end
    local path = ("%s/%s.safetensors"):format(o.folder, name)
    llm.data.write(path, ids)
    result[name] = llm.data.Packed(path, { length = o.length })
  end
  for _, chapter in ipairs(parts.held_out) do result.bytes = result.bytes + #chapter end
  return result
end
