--- A BERT trained on passages of all lengths by several ranks, with padding and without, for the recipe.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local buckets = require("tycho.dist.gradients").buckets
local unpadded = require "tycho.dist.unpadded"

local M = {}

local MASK, IGNORED = 4, -100
local SPECIAL = { "<pad>", "<s>", "</s>", "<unk>", "<mask>" }

--- Passages of the book that ships: so many verses each as chance has it, a few often and many seldom, with 15 % of
-- the tokens hidden. Returns items i64 [2, length], tokens and labels, and how many tokens there are to tell apart.
---@param options? { longest?: integer, verses?: number, vocabulary?: integer, books?: integer, seed?: integer }
-- longest (256: tokens that a passage has at most), verses (4: of a passage on average)
---@return { items: Tensor[], vocabulary: integer, longest: integer }
function M.passages(options)
  local o = arguments.read("dist.unpadded_trial.passages", options, { longest = 256, verses = 4, vocabulary = 1000,
    books = 1, seed = 0 }, { longest = "an integer >= 8", verses = "a number >= 1", vocabulary = "an integer >= 300",
    books = "an integer in [1, 66]", seed = "an integer" })
  local verses = {}
  for line in ty.data.kjv { books = o.books }:gmatch "[^\n]+" do verses[#verses + 1] = line end
  local tokenizer = ty.tokenizer.train(verses, { vocabulary = o.vocabulary, special = SPECIAL })
  local draws = ty.seeded_noise(ty.empty(#verses), o.seed, "uniform"):tolist()
  local items, at, n = {}, 1, 0
  while at <= #verses do
    n = n + 1
    local count = 1 + math.floor(math.log(1 - draws[n]) / math.log(1 - 1 / o.verses))
    local text = table.concat(verses, " ", at, math.min(#verses, at + count - 1))
    at = at + count
    local tokens = tokenizer:encode("<s>" .. text .. "</s>"):to "i64"
    if tokens.shape[1] > o.longest then tokens = tokens:narrow(0, 0, o.longest) end
    local hidden = ty.seeded_noise(ty.empty(tokens.shape[1]), o.seed * 100003 + n, "uniform"):lt(0.15)
    hidden:narrow(0, 0, 1):fill_(false)
    items[n] = ty.stack({ tokens:masked_fill(hidden, MASK), tokens:masked_fill(hidden:logical_not(), IGNORED) }, 0)
  end
  return { items = items, vocabulary = tokenizer.size, longest = o.longest }
end

-- The items of a rank in a step: so many of those that come next, in an order that is drawn.
local function share(passages, order, step, rank, ranks, count)
  local list = {}
  for i = 1, count do
    local k = (step * ranks + rank) * count + i - 1
    list[i] = passages.items[order[k % #order + 1]]
  end
  return list
end

-- Rows with padding to a length.
local function padded(items, length)
  local tokens, labels, mask = {}, {}, {}
  for i, x in ipairs(items) do
    local more = { 0, length - x.shape[2] }
    tokens[i] = ty.pad(x[0], more, "constant", 0)
    labels[i] = ty.pad(x[1], more, "constant", IGNORED)
    mask[i] = ty.arange(length):lt(x.shape[2])
  end
  return ty.stack(tokens, 0), ty.stack(labels, 0), { mask = ty.stack(mask, 0) }
end

-- Tokens, labels and options of a batch, in a way: "unpadded", "longest" (rows as long as the longest of the batch) or
-- "all" (as long as the longest there can be).
local function batch_of(items, way, longest)
  if way == "unpadded" then
    local packed = unpadded.pack(items)
    return packed.values:narrow(0, 0, 1), packed.values:narrow(0, 1, 1),
      { cu_seqlens = packed.cu_seqlens, longest = packed.longest }
  end
  local length = longest
  if way == "longest" then
    length = 0
    for _, x in ipairs(items) do length = math.max(length, x.shape[2]) end
  end
  return padded(items, length)
end

--- Trains a BERT on a rank. options: config (of the model), passages, way ("unpadded", "longest", "all"), balanced
-- (false: items change ranks, so that all have as much work), items (of a rank and step), steps, warmup (1: steps that
-- are not timed), lr, seed, dtype ("f32"), gradients (true: those of the first step are returned).
-- Returns losses (of all ranks together), seconds (of a step, by the clock, until all ranks are through), tokens (that
-- the rank has computed), real (that were there), work (seconds that the rank computed in a step) and waited (seconds
-- that it waited for items).
---@param group RankGroup
---@param options table
---@return table
function M.train(group, options)
  local who = "dist.unpadded_trial.train"
  arguments.expect(who, "options", options, "a table")
  local o = arguments.read(who, options, { config = {}, passages = {}, way = "unpadded", balanced = false, items = 8,
    steps = 4, warmup = 1, lr = 1e-3, seed = 0, dtype = "f32", gradients = false },
    { config = "a table", passages = "a table", way = '"unpadded" or "longest" or "all"', items = "an integer >= 1",
      steps = "an integer >= 1", warmup = "an integer >= 0", lr = "a finite number >= 0", seed = "an integer" })
  ty.manual_seed(o.seed)
  local model = require("tycho.models").BertForMaskedLM(o.config):to(o.dtype)
  local optimizer = ty.optim.AdamW(model:parameters(), { lr = o.lr })
  local flat = buckets(model:parameters())
  local order = ty.seeded_noise(ty.empty(#o.passages.items), o.seed, "uniform"):argsort():add(1):tolist()
  local function draw(step)
    local mine = share(o.passages, order, step, group.rank, group.size, o.items)
    if not o.balanced then return { wait = function() return mine end } end
    return unpadded.exchange(group, mine, { width = o.config.hidden_size })
  end
  local out = { losses = {}, tokens = 0, real = 0, work = 0, waited = 0 }
  local coming, began = draw(1), nil
  for step = 1, o.warmup + o.steps do
    if step == o.warmup + 1 then
      group:barrier()
      began = group:clock()
    end
    ty.scope(function()
      local before = group:clock()
      local items = coming:wait()
      local waited = group:clock() - before
      coming = draw(step + 1)
      local start = group:clock()
      local tokens, labels, with = batch_of(items, o.way, o.passages.longest)
      local counts = ty.tensor({ labels:ne(IGNORED):sum():item() }, { dtype = "f64" })
      local all = group:all_reduce(counts:clone()):item()
      -- The mean over ranks of what each has of the sum over all hidden tokens.
      local loss = model:loss(tokens, labels, with) * (counts:item() * group.size / all)
      optimizer:zero_grad()
      loss:backward()
      local computed = group:clock() - start
      flat:mean_gradients(group)
      if step == 1 and o.gradients then
        out.gradients = {}
        for i, p in ipairs(model:parameters()) do out.gradients[i] = ty.keep(p.grad:clone()) end
      end
      optimizer:step()
      if step > o.warmup then
        out.tokens, out.work, out.waited = out.tokens + tokens:numel(), out.work + computed, out.waited + waited
        for _, x in ipairs(items) do out.real = out.real + x.shape[2] end
      end
      out.losses[step] = group:all_reduce(loss:detach():to "f64", "mean"):item()
    end)
  end
  coming:wait()
  group:barrier()
  out.seconds = (group:clock() - began) / o.steps
  out.work, out.waited = out.work / o.steps, out.waited / o.steps
  return out
end

return M
