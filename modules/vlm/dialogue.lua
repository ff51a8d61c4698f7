--- Questions and answers about pictures as rows of tokens for instruction tuning: a picture's place, and then turns, of
-- which the model is to learn the answers alone. Liu et al. 2023, "Visual Instruction Tuning".
--
--     local dialogue = vlm.Dialogue(tokenizer, { image_token = 4096, features = 64 })
--     local tokens, targets = dialogue:rows { { { question = "what is this?", answer = "an apple" } } }
--     model:loss(tokens, targets, { pictures = pictures })
local ty = require "tycho"
local arguments = require "tycho.arguments"
local packing = require "tycho.vlm.packing"

local IGNORED = -100

---@class Dialogue
---@field features integer  image tokens of a picture
local Dialogue = {}
Dialogue.__index = Dialogue
Dialogue.__name = "Dialogue"

--- image_token: the token that stands for a feature of a picture; features: how many of them a picture has (0: no
-- picture, as for a model that only reads); in their place picture: all tokens of a picture, where there are marks
-- among them (tycho.vlm.solo). A turn is the text before, the question, the text between, the text that
-- leads the answer, the answer and the tokenizer's token of the end; before and between are "\n" and lead is empty
-- unless they are given.
---@param tokenizer Tokenizer
---@param options { image_token?: integer, features?: integer, picture?: integer[], before?: string, between?: string,
-- lead?: string }
---@return Dialogue
function Dialogue.new(tokenizer, options)
  local who = "vlm.Dialogue"
  if not ty.tokenizer.fields(tokenizer) then
    arguments.fail("%s: tokenizer: expected a tokenizer, got %s", who, arguments.describe(tokenizer))
  end
  local o = arguments.read(who, options, { image_token = 0, features = 0, before = "\n", between = "\n",
    lead = "", picture = arguments.none }, { picture = "a list of integers" })
  local last = ty.tokenizer.fields(tokenizer).eos
  if not last then arguments.fail("%s: tokenizer: expected one with a token of the end (eos), got none", who) end
  if o.features < 0 or o.image_token < 0 then
    arguments.fail("%s: expected features and image_token of at least 0, got %d and %d", who, o.features,
      o.image_token)
  end
  return setmetatable({ tokenizer = tokenizer, image_token = o.image_token, picture = o.picture,
    features = o.picture and #o.picture or o.features, last = last, before = o.before, between = o.between,
    lead = o.lead, known = {} }, Dialogue)
end

--- The same dialogue about pictures, or clips, of another number of features.
---@param features integer
---@return Dialogue
function Dialogue:about(features)
  arguments.expect("Dialogue:about", "features", features, "an integer >= 0")
  local copy = {}
  for key, value in pairs(self) do copy[key] = value end
  copy.features, copy.picture = features, nil
  return setmetatable(copy, Dialogue)
end

-- Tokens of a text; short texts come again and again, and are kept.
local function encode(self, text)
  local ids = self.known[text]
  if not ids then
    ids = self.tokenizer:encode(text):tolist()
    self.known[text] = ids
  end
  return ids
end

-- Ids of a turn, and for each whether it is learnt.
local function encode_turn(self, turn)
  local ids, learnt = {}, {}
  for _, id in ipairs(encode(self, self.before .. turn.question .. self.between)) do
    ids[#ids + 1], learnt[#learnt + 1] = id, false
  end
  for _, id in ipairs(encode(self, self.lead .. turn.answer)) do ids[#ids + 1], learnt[#learnt + 1] = id, true end
  ids[#ids + 1], learnt[#learnt + 1] = self.last, true
  return ids, learnt
end

local function check_turn(who, i, k, turn)
  if type(turn) ~= "table" or type(turn.question) ~= "string" or type(turn.answer) ~= "string" then
    arguments.fail("%s: dialogue %d: expected turns { question = string, answer = string }, got %s as turn %d", who, i,
      arguments.describe(turn), k)
  end
end

local function picture_ids(self)
  local ids = {}
  if self.picture then return table.move(self.picture, 1, #self.picture, 1, ids) end
  for k = 1, self.features do ids[k] = self.image_token end
  return ids
end

--- What the model is asked: the tokens of the picture, if there is one, and of a question, i64 [1, t].
---@param question string
---@return Tensor
function Dialogue:prompt(question)
  arguments.expect("Dialogue:prompt", "question", question, "a string")
  local ids = picture_ids(self)
  local asked = encode(self, self.before .. question .. self.between)
  table.move(asked, 1, #asked, #ids + 1, ids)
  return ty.tensor({ ids }, { dtype = "i64" })
end

--- Tokens and targets, i64 [n, t], of a list of dialogues, each a list of { question, answer }: rows begin with the
-- picture and are filled up with the token of the end. A target is the token that follows where that is of an answer or
-- its end, and -100 anywhere else.
---@param dialogues { question: string, answer: string }[][]
---@return Tensor tokens
---@return Tensor targets
function Dialogue:rows(dialogues)
  local who = "Dialogue:rows"
  arguments.expect(who, "dialogues", dialogues, "a list")
  if #dialogues == 0 then arguments.fail("%s: dialogues: expected at least one, got none", who) end
  local rows, wanted, longest = {}, {}, 0
  for i, turns in ipairs(dialogues) do
    local ids, learnt = picture_ids(self), {}
    arguments.expect(who, ("dialogue %d"):format(i), turns, "a list")
    for k = 1, self.features do learnt[k] = false end
    for k, turn in ipairs(turns) do
      check_turn(who, i, k, turn)
      local own, is_learnt = encode_turn(self, turn)
      table.move(own, 1, #own, #ids + 1, ids)
      table.move(is_learnt, 1, #own, #learnt + 1, learnt)
    end
    rows[i], wanted[i], longest = ids, learnt, math.max(longest, #ids)
  end
  for i, ids in ipairs(rows) do
    local targets = {}
    for k = 1, longest do targets[k] = wanted[i][k + 1] and ids[k + 1] or IGNORED end
    for k = #ids + 1, longest do ids[k] = self.last end
    wanted[i] = targets
  end
  return ty.tensor(rows, { dtype = "i64" }), ty.tensor(wanted, { dtype = "i64" })
end

--- A picture and what is to be said of it without being asked: its tokens, a text and the token of the end, as a
-- sequence { ids, learnt } of tycho.vlm.packing, in which the text and the end are learnt.
---@param text string
---@return { ids: integer[], learnt: boolean[] }
function Dialogue:described(text)
  arguments.expect("Dialogue:described", "text", text, "a string")
  local ids, learnt = picture_ids(self), {}
  for k = 1, #ids do learnt[k] = false end
  for _, id in ipairs(encode(self, self.lead .. text)) do ids[#ids + 1], learnt[#learnt + 1] = id, true end
  ids[#ids + 1], learnt[#learnt + 1] = self.last, true
  return { ids = ids, learnt = learnt }
end

--- A batch of dialogues whose turns do not see each other, as tycho.vlm.packing.turns() gives it: each row is a
-- picture, which is seen by all of its questions and computed once.
---@param dialogues { question: string, answer: string }[][]
---@return table batch  { tokens, targets, turn, at, wanted, options }
function Dialogue:packed(dialogues)
  local who = "Dialogue:packed"
  arguments.expect(who, "dialogues", dialogues, "a list")
  if #dialogues == 0 then arguments.fail("%s: dialogues: expected at least one, got none", who) end
  local rows, picture = {}, picture_ids(self)
  for i, turns in ipairs(dialogues) do
    arguments.expect(who, ("dialogue %d"):format(i), turns, "a list")
    rows[i] = { shared = picture, turns = {} }
    for k, turn in ipairs(turns) do
      check_turn(who, i, k, turn)
      local ids, learnt = encode_turn(self, turn)
      rows[i].turns[k] = { ids = ids, learnt = learnt }
    end
  end
  return packing.turns(rows, self.last)
end

-- Logits [learnt, vocabulary] of the places of a packed batch that something is learnt at; more: options of forward().
local function logits_of(model, batch, more)
  local device = model:device()
  local options = { places = batch.at:to { device = device } }
  for key, value in pairs(batch.options) do
    options[key] = ty.is_tensor(value) and value:to { device = device } or value
  end
  for key, value in pairs(more or {}) do options[key] = value end
  return model:head(model:hidden(batch.tokens:to { device = device }, options):select(0, 0))
end

--- Logits of the places of a packed batch that something is learnt at, [learnt, vocabulary], in the order of its
-- targets. options: more ones of the model's forward(), pictures among them.
---@param model LanguageModel
---@param batch table  of Dialogue:packed()
---@param options? table
---@return Tensor logits
function Dialogue.logits(model, batch, options)
  local who = "Dialogue.logits"
  arguments.expect(who, "model", model, "a module")
  arguments.expect(who, "batch", batch, "a table")
  arguments.expect(who, "options", options, "a table or nil")
  return logits_of(model, batch, options)
end

--- How likely the targets of a packed batch are, logarithms of probabilities, f32 [learnt]. options: as of logits().
---@param model LanguageModel
---@param batch table  of Dialogue:packed(), or of tycho.vlm.packing
---@param options? table
---@return Tensor
function Dialogue.likelihoods(model, batch, options)
  local logits = Dialogue.logits(model, batch, options):to "f32"
  return logits:log_softmax(-1):gather(1, batch.wanted:to { device = logits.device }:unsqueeze(1)):squeeze(1)
end

--- Mean cross entropy of what is learnt in a packed batch. Only the places that something is learnt at go through the
-- head. options: more ones of the model's forward(), pictures among them.
---@param model LanguageModel
---@param batch table  of Dialogue:packed(), or of tycho.vlm.packing
---@param options? table
---@return Tensor loss
function Dialogue.loss(model, batch, options)
  local who = "Dialogue.loss"
  arguments.expect(who, "model", model, "a module")
  arguments.expect(who, "batch", batch, "a table")
  arguments.expect(who, "options", options, "a table or nil")
  return ty.nn.cross_entropy(logits_of(model, batch, options), batch.wanted:to { device = model:device() })
end

--- Of each turn of a packed batch, whether the model's likeliest token is the right one at each of its targets, so that
-- its greedy answer is right word for word: a list of booleans for each row. options: as of Dialogue.loss().
---@param model LanguageModel
---@param batch table  of Dialogue:packed()
---@param options? table
---@return boolean[][]
function Dialogue.right(model, batch, options)
  local who = "Dialogue.right"
  arguments.expect(who, "model", model, "a module")
  arguments.expect(who, "batch", batch, "a table")
  arguments.expect(who, "options", options, "a table or nil")
  local hit = ty.no_grad(function()
    return logits_of(model, batch, options):argmax(-1):eq(batch.wanted:to { device = model:device() }):to("u8"):tolist()
  end)
  local rows, length = {}, batch.tokens.shape[2]
  for i = 1, batch.tokens.shape[1] do rows[i] = {} end
  local turn = batch.turn:flatten():tolist()
  for k, place in ipairs(batch.at:tolist()) do
    local row, number = rows[place // length + 1], turn[place + 1]
    row[number] = row[number] ~= false and hit[k] == 1
  end
  return rows
end

--- Of each row, whether the model's likeliest token is the right one at every target: a list of booleans. With one turn
-- to a row, these are the rows whose greedy answer is the right one, word for word. options: those of the model's
-- forward(), pictures among them.
---@param model LanguageModel
---@param tokens Tensor   i64 [n, t]
---@param targets Tensor  i64 [n, t]
---@param options? table
---@return boolean[]
function Dialogue.answered(model, tokens, targets, options)
  local who = "Dialogue.answered"
  arguments.expect(who, "model", model, "a module")
  arguments.expect(who, "tokens", tokens, "a tensor")
  arguments.expect(who, "targets", targets, "a tensor")
  arguments.expect(who, "options", options, "a table or nil")
  local right = ty.no_grad(function()
    local guess = model(tokens, options):argmax(-1)
    return guess:eq(targets):logical_or(targets:eq(IGNORED)):all { 1 }:tolist()
  end)
  for i, value in ipairs(right) do right[i] = value == true or value == 1 end
  return right
end

return setmetatable(Dialogue, { __call = function(_, ...) return Dialogue.new(...) end })
