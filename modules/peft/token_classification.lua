--- Classes of words by an encoder: a linear head over the hidden state of each word's first piece, to tag entities.
-- With peft.lora on the encoder little is trained besides: Panahi 2025, "OpenMed NER", does so after the encoder has
-- read text of the domain (llm.masking.fit).
--
--     local tagger = peft.token_classification.new(bert, { "O", "B-place", "I-place" })
--     peft.lora(tagger.encoder, { targets = { "query", "value" }, rank = 4 })
--     local batch = tagger:batch(tokenizer, { { words = { "In", "Moab" }, tags = { "O", "B-place" } } })
--     optimizer:step(tagger:loss(batch))
--     local tags = tagger:tags(tokenizer, { { words = { "Go", "up" } } })
local ty = require "tycho"
local arguments = require "tycho.arguments"
local adapter = require "tycho.peft.adapter"

local nn = ty.nn
local expect, fail = arguments.expect, arguments.fail
local M = {}

--- An encoder with a head over words.
---@class TokenClassifier: Module
---@field encoder Module
---@field classes string[]
local TokenClassifier = nn.module "TokenClassifier"

function TokenClassifier:init(encoder, classes, options)
  local who = "peft.token_classification"
  expect(who, "encoder", encoder, "a module")
  expect(who, "classes", classes, "a list of strings")
  local width = type(encoder.config) == "table" and encoder.config.hidden_size
  if math.type(width) ~= "integer" then
    fail("%s: encoder: expected one with config.hidden_size, got %s", who, arguments.describe(encoder))
  end
  if #classes < 2 then fail("%s: classes: expected at least 2, got %d", who, #classes) end
  local o = arguments.read(who, options, { dropout = 0.1, pad = 0 }, { dropout = "a number in [0, 1)",
    pad = "an integer >= 0" })
  self.encoder = encoder
  self.dropout = nn.Dropout(o.dropout)
  self.classifier = nn.Linear(width, #classes)
  self.classes, self.pad = table.move(classes, 1, #classes, 1, {}), o.pad
  local index = {}
  for i, class in ipairs(classes) do
    if index[class] then fail('%s: classes: there are two "%s"', who, class) end
    index[class] = i - 1
  end
  rawset(self, "_index", index)
end

--- Texts as a batch: tokens i64 [n, t], mask (bool, where there is text), labels i64 [n, t] (-100 but on the first
-- piece of each word that has a tag) and first, for each text the positions of its words' first pieces. A word is
-- encoded with a space before it.
---@param tokenizer Tokenizer
---@param texts {words: string[], tags?: string[]}[]
---@return {tokens: Tensor, mask: Tensor, labels: Tensor, first: integer[][]}
function TokenClassifier:batch(tokenizer, texts)
  local who = "TokenClassifier:batch"
  if type(tokenizer) ~= "table" and type(tokenizer) ~= "userdata" or ty.is_tensor(tokenizer)
    or not tokenizer.encode then
    fail("%s: tokenizer: expected one with encode(), got %s", who, arguments.describe(tokenizer))
  end
  expect(who, "texts", texts, "a list of tables")
  if #texts == 0 then fail("%s: texts: expected at least one, got none", who) end
  local rows, labels, first, longest = {}, {}, {}, 0
  for i, text in ipairs(texts) do
    local words = expect(who, ("words of text %d"):format(i), text.words, "a list of strings")
    expect(who, ("tags of text %d"):format(i), text.tags, "a list of strings or nil")
    if #words == 0 or text.tags and #text.tags ~= #words then
      fail("%s: text %d: expected as many tags as words and at least one, got %d words and %d tags", who, i, #words,
        text.tags and #text.tags or 0)
    end
    local row, label, at = {}, {}, {}
    for k, word in ipairs(words) do
      local pieces = tokenizer:encode(" " .. word)
      pieces = ty.is_tensor(pieces) and pieces:tolist() or pieces
      at[k] = #row
      for j, piece in ipairs(pieces) do
        row[#row + 1] = piece
        label[#row] = -100
        if j == 1 and text.tags then
          label[#row] = self._index[text.tags[k]]
            or fail('%s: text %d: there is no class "%s"', who, i, text.tags[k])
        end
      end
    end
    rows[i], labels[i], first[i], longest = row, label, at, math.max(longest, #row)
  end
  local tokens, targets, mask = {}, {}, {}
  for i, row in ipairs(rows) do
    mask[i] = {}
    for k = 1, longest do
      mask[i][k] = row[k] and 1 or 0
      row[k], labels[i][k] = row[k] or self.pad, labels[i][k] or -100
    end
    tokens[i], targets[i] = row, labels[i]
  end
  local place = { dtype = "i64", device = self.classifier.weight.device }
  return { tokens = ty.tensor(tokens, place), mask = ty.tensor(mask, place):to "bool",
    labels = ty.tensor(targets, place), first = first }
end

--- Scores [n, t, classes] of every piece.
---@param tokens Tensor i64 [n, t]
---@param options? {mask: Tensor}  what the encoder takes
---@return Tensor logits
function TokenClassifier:forward(tokens, options)
  expect("TokenClassifier:forward", "tokens", tokens, "a tensor")
  if tokens.ndim ~= 2 or tokens.dtype ~= "i64" then
    fail("TokenClassifier:forward: tokens: expected i64 [n, t], got %s", arguments.describe(tokens))
  end
  expect("TokenClassifier:forward", "options", options, "a table or nil")
  return self.classifier(self.dropout(self.encoder(tokens, options)))
end

--- The mean cross entropy over the words of a batch.
---@param batch {tokens: Tensor, mask: Tensor, labels: Tensor}
---@return Tensor loss
function TokenClassifier:loss(batch)
  expect("TokenClassifier:loss", "batch", batch, "a table")
  for _, key in ipairs { "tokens", "mask", "labels" } do
    expect("TokenClassifier:loss", "batch." .. key, batch[key], "a tensor")
  end
  return nn.cross_entropy(self(batch.tokens, { mask = batch.mask }):flatten(0, 1), batch.labels:flatten())
end

--- What is trained, as a list of parameters, by a way: "full" (all), "head" (the head over a frozen encoder) or "lora"
-- (the head, and adapters that the encoder gets by these options of peft.lora).
---@param how "full"|"head"|"lora"
---@param options? table
---@return Tensor[]
function TokenClassifier:trainable(how, options)
  expect("TokenClassifier:trainable", "how", how, '"full" or "head" or "lora"')
  expect("TokenClassifier:trainable", "options", options, "a table or nil")
  if how == "full" then return self:parameters() end
  local list = {}
  if how == "lora" then
    adapter.lora(self.encoder, options)
    list = adapter.parameters(self.encoder)
  else
    self.encoder:requires_grad_(false)
  end
  for _, p in ipairs(self.classifier:parameters()) do list[#list + 1] = p end
  return list
end

--- The likeliest class of every word, for each text a list. options: batch (64 texts at a time).
---@param tokenizer Tokenizer
---@param texts {words: string[]}[]
---@param options? {batch: integer}
---@return string[][]
function TokenClassifier:tags(tokenizer, texts, options)
  local o = arguments.read("TokenClassifier:tags", options, { batch = 64 }, { batch = "an integer >= 1" })
  expect("TokenClassifier:tags", "texts", texts, "a list of tables")
  local was_training, result = self.training, {}
  self:eval()
  for from = 1, #texts, o.batch do
    local part = {}
    for i = from, math.min(from + o.batch - 1, #texts) do part[#part + 1] = { words = texts[i].words } end
    local best, first = ty.no_grad(ty.scope, function()
      local batch = self:batch(tokenizer, part)
      return self(batch.tokens, { mask = batch.mask }):argmax(-1):tolist(), batch.first
    end)
    for i, at in ipairs(first) do
      local tags = {}
      for k, position in ipairs(at) do tags[k] = self.classes[best[i][position + 1] + 1] end
      result[#result + 1] = tags
    end
  end
  self:train(was_training)
  return result
end

--- Puts a head for classes of words on an encoder: a model whose forward(tokens, { mask = }) gives hidden states, such
-- as models.Bert. options: dropout (0.1, before the head), pad (0: the token behind the end of shorter texts).
---@param encoder Module
---@param classes string[]  of a word, such as llm.spans has them
---@param options? {dropout?: number, pad?: integer}
---@return TokenClassifier
function M.new(encoder, classes, options) return TokenClassifier(encoder, classes, options) end

return M
