--- Labelling instructions of a data set, found by retrieval: a few pictures with a text label each that say, to someone
-- who shall annotate, what a category holds. Chang et al. 2023, "Thinking Like an Annotator: Generation of Dataset
-- Labeling Instructions". Nothing is trained.
--
--     local sheet = vlm.label_instructions.generate { image = crops, labels = labels, category = 3, texts = phrases,
--       candidates = some, scored = others, pairs = 5 }
--     for _, pair in ipairs(sheet.pairs) do print(pair.crop, pair.text, pair.score) end
--
-- The annotated crops are an index of frozen features. A pair of a crop and a text asks with the fusion of both; a set
-- of pairs scores a crop by the pair that likes it best. A good set finds the category's crops before all others: pairs
-- are added one at a time, each the one with which the average precision is highest, while it grows. Crops that are
-- scored are never examples, so that a crop does not find itself. How queries are fused and what a set's score is are
-- choices that are made here; the paper's abstract leaves them open.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local vision = require "tycho.vision"

local nn = ty.nn
local expect, fail, none = arguments.expect, arguments.fail, arguments.none
local M = {}

local AT_ONCE = 128 -- candidate sets whose average precision is computed together

local function matrix(x) return ty.is_tensor(x) and x.ndim == 2 and x:numel() > 0 end

local function check_matrix(who, name, x, width)
  expect(who, name, x, "a tensor")
  if not matrix(x) or width and x.shape[2] ~= width then
    fail("%s: %s: expected features [n, %s], got %s", who, name, width or "d", arguments.describe(x))
  end
end

--- Queries [n, d] of length 1 of pairs: `weight` times the unit features of the pictures and 1 - weight times those of
-- their texts.
---@param image Tensor  [n, d]
---@param text Tensor   [n, d]
---@param weight? number  in [0, 1] (0.5; 1: pictures alone)
---@return Tensor
function M.fuse(image, text, weight)
  local who = "vlm.label_instructions.fuse"
  check_matrix(who, "image", image)
  check_matrix(who, "text", text, image.shape[2])
  weight = expect(who, "weight", weight == nil and 0.5 or weight, "a number in [0, 1]")
  if image.shape[1] ~= text.shape[1] then
    fail("%s: expected as many pictures as texts, got %d and %d", who, image.shape[1], text.shape[1])
  end
  return nn.normalize(nn.normalize(image) * weight + nn.normalize(text) * (1 - weight))
end

--- Scores [n] of crops by a set of queries: the largest cosine. queries [k, d], image [n, d].
---@param queries Tensor
---@param image Tensor
---@return Tensor
function M.scores(queries, image)
  local who = "vlm.label_instructions.scores"
  check_matrix(who, "queries", queries)
  check_matrix(who, "image", image, queries.shape[2])
  return nn.normalize(queries):matmul(nn.normalize(image):transpose(0, 1)):max(0)
end

--- The average precision with which a set of queries finds the crops that belong: wanted, [n] of 0 and 1.
---@param queries Tensor  [k, d]
---@param image Tensor    [n, d]
---@param wanted Tensor   [n]
---@return number
function M.precision(queries, image, wanted)
  local who = "vlm.label_instructions.precision"
  local scores = M.scores(queries, image)
  expect(who, "wanted", wanted, "a tensor")
  if wanted.ndim ~= 1 or wanted.shape[1] ~= scores.shape[1] then
    fail("%s: wanted: expected [%d], got %s", who, scores.shape[1], arguments.describe(wanted))
  end
  return (vision.mean_average_precision(scores:unsqueeze(1), wanted:unsqueeze(1)))
end

--- The mean over categories of the average precision with which each one's queries find its crops.
---@param queries table<integer, Tensor|table>  by the category, from 1: [k, d], or what generate() returned; a category
---  without queries does not count
---@param image Tensor   [n, d]
---@param labels Tensor  i64 [n]: categories, from 0
---@return number
function M.mean_precision(queries, image, labels)
  local who = "vlm.label_instructions.mean_precision"
  expect(who, "queries", queries, "a table")
  expect(who, "labels", labels, "a tensor")
  local categories, scores, wanted = {}, {}, {}
  for c in pairs(queries) do categories[#categories + 1] = expect(who, "a category", c, "an integer >= 1") end
  if #categories == 0 then fail("%s: queries: expected those of one category at least, got none", who) end
  table.sort(categories)
  for k, c in ipairs(categories) do
    local own = queries[c]
    scores[k] = M.scores(type(own) == "table" and own.queries or own, image):to "cpu"
    wanted[k] = labels:eq(c - 1):to { dtype = "f32", device = "cpu" }
  end
  return (vision.mean_average_precision(ty.stack(scores, 1), ty.stack(wanted, 1)))
end

--- k crops that stand for all [n, d]: each time the one with which crops are nearest to their nearest, in the sum of
-- cosines. What examples are without instructions: typical ones. Returns positions i64 [k].
---@param image Tensor
---@param k integer
---@return Tensor
function M.medoids(image, k)
  local who = "vlm.label_instructions.medoids"
  check_matrix(who, "image", image)
  expect(who, "k", k, "an integer >= 1")
  if k > image.shape[1] then fail("%s: k: expected at most the %d crops, got %d", who, image.shape[1], k) end
  return ty.no_grad(ty.scope, function()
    local x = nn.normalize(image)
    local cosines = x:matmul(x:transpose(0, 1))
    local nearest, chosen = ty.full({ x.shape[1] }, -1, { dtype = cosines.dtype, device = x.device }), {}
    for i = 1, k do
      local sums = ty.maximum(cosines, nearest:unsqueeze(0)):sum(1)
      for _, at in ipairs(chosen) do sums:select(0, at):fill_(-math.huge) end
      chosen[i] = sums:argmax(0):item()
      nearest = ty.maximum(nearest, cosines:select(0, chosen[i]))
    end
    return ty.tensor(chosen):to { device = image.device }
  end)
end

-- Positions i64 as a list, checked.
local function positions(who, name, x, count)
  expect(who, name, x, "a tensor")
  if x.ndim ~= 1 or x.dtype ~= "i64" or x:numel() == 0 then
    fail("%s: %s: expected i64 [k], got %s", who, name, arguments.describe(x))
  elseif x:min():item() < 0 or x:max():item() >= count then
    fail("%s: %s: expected positions from 0 to %d, got %d to %d", who, name, count - 1, x:min():item(), x:max():item())
  end
  return x:tolist()
end

local defaults = { image = none, labels = none, category = none, texts = none, candidates = none, scored = none,
  pairs = 5, weight = 0.5, gain = 0 }
local kinds = { image = "a tensor", labels = "a tensor", category = "an integer >= 0", texts = "a tensor",
  candidates = "a tensor", scored = "a tensor", pairs = "an integer >= 1", weight = "a number in [0, 1]",
  gain = "a finite number >= 0" }

-- Average precision of every column of scores [n, sets].
local function precisions(scores, wanted)
  local parts = {}
  for start = 0, scores.shape[2] - 1, AT_ONCE do
    parts[#parts + 1] = ty.scope(function()
      local some = scores:narrow(1, start, math.min(AT_ONCE, scores.shape[2] - start))
      local _, each = vision.mean_average_precision(some, wanted:unsqueeze(1):expand(table.unpack(some.shape)))
      return each
    end)
  end
  return ty.concat(parts, 0)
end

--- The instructions for a category: pairs of an example crop and a text label. options:
--   image, labels   features [n, d] of all annotated crops, and their categories, i64 [n]
--   category        for which instructions are wanted
--   texts           features [t, d] of the texts that a label may be
--   candidates      positions i64 of crops that may be examples; only those of the category are taken
--   scored          positions i64 of the crops by which sets are scored; none of them may be a candidate
--   pairs           at most so many (5)
--   weight          of pictures in queries (0.5), as in fuse()
--   gain            by how much a pair has to raise the average precision (0: by anything)
-- Returns { pairs = list of { crop (position in image), text (row of texts), score (of the set up to it) }, score,
-- queries = [k, d] }.
---@param options table
---@return {pairs: {crop: integer, text: integer, score: number}[], score: number, queries: Tensor}
function M.generate(options)
  local who = "vlm.label_instructions.generate"
  expect(who, "options", options, "a table")
  local o = arguments.read(who, options, defaults, kinds)
  check_matrix(who, "image", o.image)
  local n, d = o.image.shape[1], o.image.shape[2]
  check_matrix(who, "texts", o.texts, d)
  expect(who, "labels", o.labels, "a tensor")
  if o.labels.ndim ~= 1 or o.labels.shape[1] ~= n or o.labels.dtype ~= "i64" then
    fail("%s: labels: expected i64 [%d], got %s", who, n, arguments.describe(o.labels))
  end
  expect(who, "category", o.category, "an integer >= 0")
  local candidates, scored = positions(who, "candidates", o.candidates, n), positions(who, "scored", o.scored, n)
  local taken, own, labels = {}, {}, o.labels:tolist()
  for _, i in ipairs(scored) do taken[i] = true end
  for _, i in ipairs(candidates) do
    if taken[i] then fail("%s: candidates: expected none of the scored crops, got %d", who, i) end
    if labels[i + 1] == o.category then own[#own + 1] = i end
  end
  if #own == 0 then fail("%s: candidates: expected one of category %d at least, got none", who, o.category) end
  return ty.no_grad(ty.scope, function()
    local place = { device = o.image.device }
    local t = o.texts.shape[1]
    local crops = o.image:index_select(0, ty.tensor(own):to(place))
    -- All pairs: crop i with text j is query i * t + j.
    local queries = M.fuse(crops:unsqueeze(1):expand(#own, t, d):reshape(#own * t, d),
      o.texts:unsqueeze(0):expand(#own, t, d):reshape(#own * t, d), o.weight)
    local at = o.scored:to(place)
    local wanted = o.labels:to(place):index_select(0, at):eq(o.category):to "f64"
    local likes = nn.normalize(o.image:index_select(0, at)):matmul(queries:transpose(0, 1)) -- [scored, all pairs]
    local list, chosen, best, score = {}, {}, nil, 0
    for k = 1, math.min(o.pairs, #own * t) do
      local with = best and ty.maximum(likes, best:unsqueeze(1)) or likes
      local each = precisions(with, wanted)
      local q = each:argmax(0):item()
      local reached = each:select(0, q):item()
      if k > 1 and (reached <= score or reached - score < o.gain) then break end
      score, chosen[k] = reached, q
      best = with:select(1, q):clone()
      list[k] = { crop = own[q // t + 1], text = q % t, score = reached }
    end
    return { pairs = list, score = score, queries = queries:index_select(0, ty.tensor(chosen):to(place)) }
  end)
end

return M
