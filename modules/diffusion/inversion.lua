--- Words of its own for what pictures show: embeddings of new tokens, learnt while all networks stay as they are, and
-- files of such embeddings as diffusers and others have them. Gal et al. 2023, "An Image is Worth One Word:
-- Personalizing Text-to-Image Generation using Textual Inversion".
--
--     local set = finetune.folder("photos", { caption = "a photo of <mug>", size = 512 })
--     inversion.train(painter, set, { token = "<mug>", start = "mug", steps = 1000 })
--     inversion.save(painter, "<mug>", "mug.safetensors")
--     painter:paint { "a <mug> on a beach" }
local ty = require "tycho"
local arguments = require "tycho.arguments"
local finetune = require "tycho.diffusion.finetune"
local prompting = require "tycho.diffusion.prompts"

local expect, fail = arguments.expect, arguments.fail
local nn = ty.nn
local M = {}

-- The text encoders of CLIP's kind: { reader, encoder, embedding, tokenizer (its name in the pipeline) }.
local function encoders_of(who, painter)
  prompting.check_painter(who, painter)
  local list = {}
  for i, reader in ipairs(painter.prompts.readers) do
    local text = reader.encoder.text_model
    if text then
      list[#list + 1] = { reader = reader, encoder = reader.encoder, embedding = text.embeddings.token_embedding,
        tokenizer = i == 1 and "tokenizer" or "tokenizer_" .. i }
    end
  end
  if #list == 0 then fail("%s: painter: expected one with a text encoder of CLIP's kind, got none", who) end
  return list
end

-- The tokens that a word with several vectors stands for.
local function pieces_of(token, count)
  local list = { token }
  for i = 1, count - 1 do list[i + 1] = ("%s_%d"):format(token, i) end
  return list
end

-- The tokenizer with tokens more, from an id on.
local function with_tokens(tokenizer, tokens, first)
  local json = ty.io.json_decode(tokenizer:json())
  local added = {}
  for i, entry in ipairs(json.added_tokens or {}) do added[i] = entry end
  for i, token in ipairs(tokens) do
    added[#added + 1] = { id = first + i - 1, content = token, single_word = false, lstrip = false, rstrip = false,
      normalized = false, special = false }
  end
  json.added_tokens = added
  local new = ty.tokenizer.parse(ty.io.json_encode(json), "inversion.add")
  local fields = ty.tokenizer.fields(new)
  for name, value in pairs(ty.tokenizer.fields(tokenizer)) do fields[name] = value end
  return new
end

--- Gives a painter a word: rows of embeddings f32 [vectors, width], one tensor for each text encoder of CLIP's kind. In
-- prompts the word stands for all its vectors.
---@param painter TextToImage
---@param token string  such as "<mug>"
---@param rows Tensor[]
function M.add(painter, token, rows)
  local who = "inversion.add"
  local list = encoders_of(who, painter)
  expect(who, "token", token, "a string")
  expect(who, "rows", rows, "a list of tensors")
  if not token:find "^%S+$" then fail("%s: token: expected a word, got %s", who, arguments.describe(token)) end
  if #rows ~= #list then
    fail("%s: rows: expected one tensor for each of %d text encoders, got %d", who, #list, #rows)
  end
  for i, each in ipairs(list) do
    local width = each.embedding.weight.shape[2]
    if rows[i].ndim ~= 2 or rows[i].shape[2] ~= width or rows[i].shape[1] ~= rows[1].shape[1] then
      fail("%s: rows[%d]: expected [%d, %d], got %s", who, i, rows[1].shape[1], width, arguments.describe(rows[i]))
    end
    if each.reader.tokenizer:id(token) then
      fail("%s: token: expected one that the tokenizer does not have, got '%s'", who, token)
    end
  end
  local pieces = pieces_of(token, rows[1].shape[1])
  painter.prompts.words[token] = table.concat(pieces, " ")
  for i, each in ipairs(list) do
    local weight, config = each.embedding.weight, each.encoder.config
    local first = weight.shape[1]
    local tokenizer = with_tokens(each.reader.tokenizer, pieces, first)
    -- What ended a text was the token with the highest number, in older configs.
    if config.eos_token_id == 2 then config.eos_token_id = tokenizer.eos or first - 1 end
    local all = ty.no_grad(function()
      return ty.concat({ weight:detach(), rows[i]:to { device = weight.device }:to(weight.dtype) }, 0)
    end)
    rawset(each.embedding, "weight", ty.keep(all:requires_grad_(weight.requires_grad)))
    each.embedding.count, config.vocab_size = all.shape[1], all.shape[1]
    each.reader.tokenizer = tokenizer
    painter.pipeline.components[each.tokenizer] = tokenizer
    if i == 1 and each.tokenizer == "tokenizer" then painter.tokenizer = tokenizer end
  end
  ty.core.program.renew()
end

-- The rows of a word in each encoder: first id and how many; an error for a word that was not added.
local function places(who, painter, token)
  local list, words = encoders_of(who, painter), painter.prompts.words
  expect(who, "token", token, "a string")
  if not words[token] then fail("%s: token: expected a word that was added, got '%s'", who, token) end
  local _, spaces = words[token]:gsub(" ", "")
  for _, each in ipairs(list) do each.first, each.count = each.reader.tokenizer:id(token), spaces + 1 end
  return list
end

-- ---- files ----

--- Writes a word's embeddings as diffusers has them: for one text encoder under the word itself, for two as clip_l and
-- clip_g.
---@param painter TextToImage
---@param token string
---@param path string  ends in .safetensors
function M.save(painter, token, path)
  local list, state = places("inversion.save", painter, token), {}
  expect("inversion.save", "path", path, "a string")
  for i, each in ipairs(list) do
    local key = #list == 1 and token or i == 1 and "clip_l" or "clip_g"
    state[key] = each.embedding.weight:detach():narrow(0, each.first, each.count):to("f32"):to { device = "cpu" }
  end
  ty.io.save_safetensors(path, state, { format = "pt" })
end

--- Gives a painter the word of a file: diffusers' (.safetensors, .bin), with clip_l and clip_g for two text encoders,
-- or older .pt files with string_to_param. options: token (the file's, or its name in angle brackets). Returns the
-- word.
---@param painter TextToImage
---@param path string
---@param options? { token?: string }
---@return string token
function M.load(painter, path, options)
  local who = "inversion.load"
  local list = encoders_of(who, painter)
  expect(who, "path", path, "a string")
  local o = arguments.read(who, options, { token = arguments.none }, { token = "a string" })
  if not ty.io.stat(path) then fail("%s: %s is not there", who, path) end
  local rows, token, others = {}, nil, {}
  for key, tensor in pairs((ty.io.load(path))) do
    local at = key == "clip_l" and 1 or key == "clip_g" and 2
    if ty.is_tensor(tensor) and tensor.ndim >= 1 and tensor.ndim <= 2 and tensor:is_floating_point() then
      if not at and not key:find "^string_to_param%." then token = key end
      if tensor.ndim == 1 then tensor = tensor:unsqueeze(0) end
      rows[at or 1] = tensor:to "f32"
      others[#others + 1] = ("%s [%s]"):format(key, table.concat(tensor.shape, ", "))
    end
  end
  table.sort(others)
  if #rows ~= #list or #others ~= #list then
    fail("%s: %s: expected embeddings for %d text encoders, got %s", who, path, #list,
      #others > 0 and table.concat(others, ", ") or "none")
  end
  for i, each in ipairs(list) do
    if rows[i].shape[2] ~= each.embedding.weight.shape[2] then
      fail("%s: %s: expected embeddings of %d numbers, as the text encoder has them, got %s", who, path,
        each.embedding.weight.shape[2], others[i])
    end
  end
  token = o.token or token or ("<%s>"):format(path:match "([^/]*)$":gsub("%.%w+$", ""))
  M.add(painter, token, rows)
  return token
end

-- ---- training ----

local Rows = nn.module "Rows"

function Rows:init(rows) self.rows = ty.keep(rows:detach():clone():requires_grad_()) end

-- An embedding whose rows from `first` on are another module's, which is trained.
local learning = nn.surgery.wrapper { name = "Inverted", field = "_inverted", forward = function(base)
  return function(self, index)
    local own = self._inverted
    local new = ty.embedding(own.module.rows, (index - own.first):clamp(0, own.module.rows.shape[1] - 1))
    local y = base.forward(self, index)
    return ty.where(index:ge(own.first):unsqueeze(-1), new:to(y.dtype), y)
  end
end }

-- Embeddings to begin with, [vectors, width] for each encoder: those of a word, again and again, or small noise.
local function start_of(list, start, vectors)
  local rows = {}
  for i, each in ipairs(list) do
    local weight = each.embedding.weight:detach():to "f32"
    if start then
      local ids = each.reader.tokenizer:encode(start, { special = false }):tolist()
      if #ids == 0 then fail("inversion.train: start: expected a word, got %s", arguments.describe(start)) end
      local index = {}
      for k = 1, vectors do index[k] = ids[(k - 1) % #ids + 1] end
      rows[i] = weight:index_select(0, ty.tensor(index, { dtype = "i64", device = weight.device }))
    else
      rows[i] = ty.randn({ vectors, weight.shape[2] }, { device = weight.device }) * weight:std():item()
    end
  end
  return rows
end

local defaults = { token = arguments.none, start = arguments.none, vectors = 1, steps = 1000, batch = 1, lr = 5e-3,
  seed = 0, guidance = 3.5, quiet = true, title = "textual inversion" }
local kinds = { token = "a string", start = "a string", vectors = "an integer in [1, 75]", steps = "an integer >= 1",
  batch = "an integer >= 1", lr = "a finite number > 0", seed = "an integer", guidance = "a finite number" }

local function run(who, painter, set, o)
  local list = encoders_of(who, painter)
  local x, height, width = finetune.latents(painter, set, who)
  if not painter.prompts.words[o.token] then M.add(painter, o.token, start_of(list, o.start, o.vectors)) end
  list = places(who, painter, o.token)
  local told, parts, frozen = { height = height, width = width, guidance = o.guidance }, {}, {}
  for _, model in ipairs { painter.network, table.unpack(painter.prompts:encoders()) } do
    for _, p in ipairs(model:parameters()) do
      if p.requires_grad then
        frozen[#frozen + 1] = p
        p:requires_grad_(false)
      end
    end
  end
  for i, each in ipairs(list) do
    local rows = Rows(each.embedding.weight:narrow(0, each.first, each.count):to "f32")
    parts["encoder_" .. i] = rows
    learning:wrap(each.embedding, { module = rows, first = each.first })
  end
  local objective = setmetatable({ }, getmetatable(painter.process.objective))
  for key, value in pairs(painter.process.objective) do objective[key] = value end
  objective.drop = 0
  local loader = ty.data.DataLoader(ty.data.TensorDataset { at = ty.arange(#set.captions) }, {
    batch_size = math.min(o.batch, #set.captions), shuffle = true, seed = o.seed, drop_last = true })
  local ok, losses = pcall(ty.train.fit, nn.ModuleDict(parts), loader, { steps = o.steps, lr = o.lr, warmup = 0,
    final = 1, weight_decay = 0, beta2 = 0.999, quiet = o.quiet, title = o.title, loss = function(_, batch)
      local chosen = {}
      for i, k in ipairs(batch.at:tolist()) do chosen[i] = set.captions[k + 1] end
      local z = x:index_select(0, batch.at):to { device = painter:device() }
      return objective:loss(painter.network, z:to(painter.network:parameters()[1].dtype),
        painter.prompts:condition(chosen, told, true))
    end })
  for i, each in ipairs(list) do
    learning:unwrap(each.embedding)
    ty.no_grad(function()
      each.embedding.weight:narrow(0, each.first, each.count):copy_(parts["encoder_" .. i].rows)
    end)
  end
  for _, p in ipairs(frozen) do p:requires_grad_(true) end
  if not ok then error(losses, 0) end
  return losses
end

--- Learns a word from a set of pictures (finetune.folder) whose captions have it. options: token (the word), start (a
-- word whose embeddings it begins with; without one it begins with noise), vectors (1), steps (1000), batch (1), lr
-- (5e-3), seed (0), guidance (3.5: what networks like Flux are told), title, quiet. A word that the painter has already
-- is trained on. Returns the loss of every step.
---@param painter TextToImage
---@param set PictureSet
---@param options { token: string, start?: string, vectors?: integer, steps?: integer, lr?: number }
---@return number[] losses
function M.train(painter, set, options)
  local who = "inversion.train"
  encoders_of(who, painter)
  expect(who, "set", set, "a table")
  expect(who, "set.captions", set.captions, "a list of strings")
  expect(who, "set.picture", set.picture, "a function")
  local o = arguments.read(who, options, defaults, kinds)
  expect(who, "token", o.token, "a string")
  for i, caption in ipairs(set.captions) do
    if not caption:find(o.token, 1, true) then
      fail("%s: set.captions[%d]: expected a caption with %s, got %s", who, i, o.token, arguments.describe(caption))
    end
  end
  return ty.data.with_seed(o.seed, function() return run(who, painter, set, o) end)
end

return M
