--- What methods of editing a language model are measured on: invented facts that it first learns by heart. People with
-- names that nobody has, two relations, five ways of saying each; an edit is one sentence with another object. That an
-- edit holds, also said otherwise, and what it breaks, is measured in the same way for every method.
--
--     local beliefs = peft.beliefs.new(model, tokenizer, { people = 60, texts = training, unrelated = others })
--     beliefs:learn(optimizer, 220)
--     local found = beliefs:measure(beliefs:edits(beliefs.held_out, 24), function(edit)
--       change the model by beliefs:loss { edit.prompt }, { edit.object } ...
--     end, function() take it back end)
--
-- Mitchell et al. 2022, "Fast Model Editing at Scale", section 2 (success and drawdown).
local ty = require "tycho"
local arguments = require "tycho.arguments"

local nn = ty.nn
local expect = arguments.expect
local M = {}

local relations = {
  { objects = { "Jerusalem", "Egypt", "Babylon", "Hebron", "Samaria", "Zion", "Gilead", "Jericho", "Bethel", "Moab" },
    "And %s dwelt in the city of", "The city of %s was", "Then returned %s unto his house in",
    "And they buried %s in", "Now the inheritance of %s was in" },
  { objects = { "David", "Moses", "Aaron", "Saul", "Jacob", "Joseph", "Solomon", "Samuel", "Joshua", "Abraham" },
    "And %s was the son of", "The father of %s was", "And these are the words of %s the son of",
    "Now %s was of the seed of", "And %s hearkened unto the voice of his father" },
}
local starts, ends = { "Bal", "Zim", "Har", "Mel", "Jot", "Kel", "Nad", "Oz", "Pel", "Tir" },
  { "dor", "rok", "an", "tesh", "uel", "bor", "iph", "mar" }

--- The phrasings that editors may be trained with, and those that an edit is asked for in.
M.learnt, M.asked = { 1, 2, 3 }, { 4, 5 }

--- A fact: the tokens of its phrasings up to the object, the tokens that objects of its relation can be, which of them
-- is right, and whom it is about.
---@class Fact
---@field prompts integer[][]
---@field objects integer[]
---@field answer integer
---@field name string

--- A model with the facts that it is to believe.
---@class Beliefs
---@field model Module
---@field facts Fact[]
---@field trained Fact[]   of three quarters of the people
---@field held_out Fact[]  of the others
local Beliefs = {}
Beliefs.__index = Beliefs

--- Facts for a model whose tokens begin words with a space. options: people (60, 80 at most), texts (a list of texts
-- that it has seen, which it goes on reading), unrelated (a list of texts that edits should not change), probes (60
-- facts, in a phrasing each, that edits should not change either), length (48 tokens of a text; of those in
-- `unrelated` 127), random (math.random, or another function like it: numbers are drawn from it in a fixed order).
---@param model Module      a decoder: model(tokens, { cu_seqlens, longest }) gives logits
---@param tokenizer Tokenizer
---@param options table
---@return Beliefs
function M.new(model, tokenizer, options)
  local who = "peft.beliefs.new"
  expect(who, "model", model, "a module")
  if type(tokenizer) ~= "table" and type(tokenizer) ~= "userdata" or ty.is_tensor(tokenizer)
    or not tokenizer.encode then
    arguments.fail("%s: tokenizer: expected one with encode(), got %s", who, arguments.describe(tokenizer))
  end
  local none = arguments.none
  local o = arguments.read(who, options, { people = 60, texts = none, unrelated = none, probes = 60, length = 48,
    unrelated_length = 127, random = math.random }, { people = "an integer in [4, 80]", texts = "a list of strings",
    unrelated = "a list of strings", probes = "an integer >= 1", length = "an integer >= 16",
    unrelated_length = "an integer >= 1", random = "a function" })
  for _, name in ipairs { "texts", "unrelated" } do
    expect(who, name, o[name], "a list of strings")
    if #o[name] == 0 then arguments.fail("%s: %s: expected at least one text, got none", who, name) end
  end
  local self = setmetatable({ model = model, tokenizer = tokenizer, options = o, facts = {}, trained = {},
    held_out = {}, unrelated = {} }, Beliefs)
  local function ids(text) return tokenizer:encode(text):tolist() end
  for person = 0, o.people - 1 do
    local name = starts[person % #starts + 1] .. ends[person // #starts % #ends + 1]
    for k, relation in ipairs(relations) do
      local fact = { prompts = {}, objects = {}, name = name }
      for i, object in ipairs(relation.objects) do fact.objects[i] = ids(" " .. object)[1] end
      fact.answer = fact.objects[(person * 7 + k * 3 + person // 10) % #fact.objects + 1]
      for i, phrasing in ipairs(relation) do fact.prompts[i] = ids(phrasing:format(name)) end
      local other = false
      for _, object in ipairs(fact.objects) do other = other or object ~= fact.answer end
      if not other then
        arguments.fail("%s: tokenizer: expected words with a space before them to begin differently, got %d for all",
          who, fact.answer)
      end
      table.insert(self.facts, fact)
      table.insert(person % 4 == 3 and self.held_out or self.trained, fact)
    end
  end
  for i, text in ipairs(o.unrelated) do self.unrelated[i] = self:_tokens(text, o.unrelated_length) end
  return self
end

function Beliefs:_some(list) return list[self.options.random(#list)] end

-- The first tokens of a text, i64 [1, count + 1] or fewer.
function Beliefs:_tokens(text, count)
  local tokens = self.tokenizer:encode(text:sub(1, 8 * count + 200)):to "i64"
  return tokens:narrow(0, 0, math.min(count + 1, tokens:numel())):unsqueeze(0)
end

function Beliefs:_text() return self:_tokens(self:_some(self.options.texts), self.options.length) end

--- Logits [n, vocabulary] behind each of n prompts.
---@param prompts integer[][]
---@return Tensor
function Beliefs:behind(prompts)
  expect("Beliefs:behind", "prompts", prompts, "a list of lists")
  local tokens, cu, longest, last = {}, { 0 }, 0, {}
  for _, prompt in ipairs(prompts) do
    table.move(prompt, 1, #prompt, #tokens + 1, tokens)
    cu[#cu + 1], longest, last[#last + 1] = #tokens, math.max(longest, #prompt), #tokens - 1
  end
  if #tokens == 0 then arguments.fail("Beliefs:behind: prompts: expected at least one token, got none") end
  local options = { cu_seqlens = ty.tensor(cu, { dtype = "i64" }), longest = longest }
  return self.model(ty.tensor({ tokens }, { dtype = "i64" }), options):flatten(0, 1)
    :index_select(0, ty.tensor(last, { dtype = "i64" }))
end

--- The mean cross entropy of the objects behind their prompts.
---@param prompts integer[][]
---@param objects integer[]
---@return Tensor
function Beliefs:loss(prompts, objects)
  expect("Beliefs:loss", "objects", objects, "a list of integers >= 0")
  return nn.cross_entropy(self:behind(prompts), ty.tensor(objects, { dtype = "i64" }))
end

local function text_loss(model, tokens)
  local n = tokens.shape[2] - 1
  return nn.cross_entropy(model(tokens:narrow(1, 0, n)):flatten(0, 1), tokens:narrow(1, 1, n):reshape(-1))
end

--- Teaches the model the facts, `batch` (32) phrasings and a text in each step; from then on what it knows is what
-- edits are measured against. watch(step, loss): called every 50 steps.
---@param optimizer Optimizer  of the model's parameters
---@param steps integer
---@param options? { batch?: integer, watch?: fun(step: integer, loss: number) }
function Beliefs:learn(optimizer, steps, options)
  local who = "Beliefs:learn"
  expect(who, "optimizer", optimizer, "a table")
  expect(who, "steps", steps, "an integer >= 0")
  local o = arguments.read(who, options, { batch = 32, watch = arguments.none }, { batch = "an integer >= 1",
    watch = "a function" })
  for step = 1, steps do
    local prompts, objects = {}, {}
    for i = 1, o.batch do
      local fact = self:_some(self.facts)
      prompts[i], objects[i] = self:_some(fact.prompts), fact.answer
    end
    ty.scope(function()
      local loss = self:loss(prompts, objects)
      if o.watch and step % 50 == 0 then o.watch(step, loss:item()) end
      optimizer:step(loss + text_loss(self.model, self:_text()))
    end)
  end
  self.model:eval()
  self.model:requires_grad_(false)
  local probes, truth = {}, {} -- of all facts, in every phrasing, some
  for i = 1, self.options.probes do
    local fact = self:_some(self.facts)
    probes[i], truth[i] = self:_some(fact.prompts), fact.answer
  end
  self.probes = { prompts = probes, objects = truth }
  self.known, self.nats = self:hits(probes, truth), self:text_nats()
end

--- For each of the prompts 1 where the likeliest token is the object, else 0.
---@param prompts integer[][]
---@param objects integer[]
---@return integer[]
function Beliefs:hits(prompts, objects)
  return ty.no_grad(ty.scope, function()
    return self:behind(prompts):argmax(-1):eq(ty.tensor(objects, { dtype = "i64" })):to("i64"):tolist()
  end)
end

--- The share of such prompts.
---@return number
function Beliefs:share(prompts, objects) return ty.stats.mean(self:hits(prompts, objects)) end

--- What a token of the unrelated texts costs the model now, in nats.
---@return number
function Beliefs:text_nats()
  return ty.no_grad(ty.scope, function()
    local sum = 0
    for _, tokens in ipairs(self.unrelated) do sum = sum + text_loss(self.model, tokens):item() end
    return sum / #self.unrelated
  end)
end

--- `count` edits of facts in turn: another object each, said in one of the phrasings that editors may learn from.
---@param facts Fact[]
---@param count integer
---@return {fact: Fact, object: integer, prompt: integer[]}[]
function Beliefs:edits(facts, count)
  expect("Beliefs:edits", "facts", facts, "a list of tables")
  expect("Beliefs:edits", "count", count, "an integer >= 0")
  if #facts == 0 then arguments.fail("Beliefs:edits: facts: expected at least one, got none") end
  local edits = {}
  for i = 1, count do
    local fact = facts[(i - 1) % #facts + 1]
    local object = self:_some(fact.objects)
    while object == fact.answer do object = self:_some(fact.objects) end
    edits[i] = { fact = fact, object = object, prompt = fact.prompts[self:_some(M.learnt)] }
  end
  return edits
end

--- The prompts and objects of an edit in several phrasings.
---@param edit table
---@param phrasings integer[]
---@return integer[][] prompts, integer[] objects
function Beliefs:said(edit, phrasings)
  expect("Beliefs:said", "edit", edit, "a table")
  expect("Beliefs:said", "phrasings", phrasings, "a list of integers in [1, 5]")
  local prompts, objects = {}, {}
  for i, k in ipairs(phrasings) do prompts[i], objects[i] = edit.fact.prompts[k], edit.object end
  return prompts, objects
end

--- What is unrelated to a fact, drawn now: the beginnings of 16 other facts and a bit of text. A function that gives
-- the model's logits there.
---@param fact Fact
---@return fun(): Tensor
function Beliefs:bystanders(fact)
  expect("Beliefs:bystanders", "fact", fact, "a table")
  local prompts = {}
  while #prompts < 16 do
    local other = self:_some(self.trained)
    if other ~= fact then prompts[#prompts + 1] = other.prompts[self:_some(M.learnt)] end
  end
  local tokens = self:_text():narrow(1, 0, 16)
  return function() return ty.concat({ self:behind(prompts), self.model(tokens):flatten(0, 1) }, 0) end
end

--- Success and drawdown of a way to edit: change(edit) changes the model, restore() takes it back. Means over the
-- edits: own (share that holds as it was said), asked (in other phrasings), drawdown (what unrelated texts lose, in
-- nats a token), lost (share of the other facts that are no longer right).
---@param edits table[]
---@param change fun(edit: table)
---@param restore fun()
---@return {own: number, asked: number, drawdown: number, lost: number}
function Beliefs:measure(edits, change, restore)
  local who = "Beliefs:measure"
  expect(who, "edits", edits, "a list of tables")
  expect(who, "change", change, "a function")
  expect(who, "restore", restore, "a function")
  if not self.known then
    arguments.fail("%s: expected a model that has learnt its facts by Beliefs:learn, got one that has not", who)
  end
  local found = { own = 0, asked = 0, drawdown = 0, lost = 0 }
  for _, edit in ipairs(edits) do
    change(edit)
    found.own = found.own + self:share({ edit.prompt }, { edit.object }) / #edits
    found.asked = found.asked + self:share(self:said(edit, M.asked)) / #edits
    found.drawdown = found.drawdown + (self:text_nats() - self.nats) / #edits
    local after, lost, count = self:hits(self.probes.prompts, self.probes.objects), 0, 0
    for i, prompt in ipairs(self.probes.prompts) do
      local same = false
      for _, own in ipairs(edit.fact.prompts) do same = same or own == prompt end
      if not same then lost, count = lost + self.known[i] - after[i], count + 1 end
    end
    found.lost = found.lost + (count > 0 and lost / count or 0) / #edits
    restore()
  end
  return found
end

--- Fine-tuning as a way to edit: Adam on weights until the edit's own sentence has the new object, `steps` (25) at
-- most; with `kl` it keeps what bystanders get. Returns change(rate), which gives the function that measure() takes,
-- and restore.
---@param targets string[]|string  names of layers, as nn.surgery.find takes them
---@param options? { kl?: boolean, steps?: integer }
---@return fun(rate: number): fun(edit: table) change
---@return fun() restore
function Beliefs:fine_tuning(targets, options)
  local o = arguments.read("Beliefs:fine_tuning", options, { kl = false, steps = 25 }, { steps = "an integer >= 1" })
  local weights, start = {}, {}
  for i, layer in ipairs(nn.surgery.find("Beliefs:fine_tuning", self.model, { targets = targets })) do
    weights[i] = layer.module.weight
    start[i] = weights[i]:detach():clone()
  end
  local function loss(edit, keep, before)
    local value = self:loss({ edit.prompt }, { edit.object })
    return keep and value + (before:exp() * (before - keep():log_softmax(-1))):sum(-1):mean() or value
  end
  local function change(rate)
    return function(edit)
      for _, w in ipairs(weights) do w:requires_grad_() end
      local optimizer = ty.optim.Adam(weights, { lr = rate })
      local keep = o.kl and self:bystanders(edit.fact)
      local before = keep and ty.no_grad(function() return keep():log_softmax(-1) end)
      for _ = 1, o.steps do
        if self:share({ edit.prompt }, { edit.object }) == 1 then break end
        ty.scope(function() optimizer:step(loss(edit, keep, before)) end)
      end
      for _, w in ipairs(weights) do w:requires_grad_(false) end
    end
  end
  return change, function()
    ty.no_grad(function() for i, w in ipairs(weights) do w:detach():copy_(start[i]) end end)
  end
end

return M
