--- BLEU: how many n-grams of a candidate are in its references. Papineni et al. 2002, "BLEU: a Method for Automatic
-- Evaluation of Machine Translation"; of token ids in a batch: Filatov 2025, "TensorBLEU".
--
--     local scores = llm.bleu.batch({ { 5, 8, 2 }, { 7 } }, { { { 5, 8, 2, 1 } }, { { 7, 7 }, { 9 } } })  -- [2]
--     local score = llm.bleu.sentence({ "the", "cat" }, { { "the", "cat", "sat" } }, { order = 2 })
--
-- Ids that lie in tensors go to ty.bleu itself, which does the work of `batch`.
local ty = require "tycho"
local options_of = require "tycho.nn.options"

local M = {}

local defaults = { order = 4, weights = options_of.none, smoothing = "none", epsilon = 0.1, k = 5 }

---@class BleuOptions
---@field order? integer      longest n-grams (4), each order with the weight 1 / order
---@field weights? number[]   of each order, instead
---@field smoothing? string   of orders without a match: none, epsilon, add_one, geometric, length; see ty.bleu
---@field epsilon? number     the matches that "epsilon" puts in place of none (0.1)
---@field k? number           of "length" (5)
---@field corpus? boolean     one score, of the counts of all (batch alone)
---@field device? string      where (batch alone)
---@field dtype? string       f32 or f64 (batch alone)

-- What the precision of an order becomes; `empty` counts the orders without a match up to this one.
local smoothed = {
  none = function(matches, total) return matches > 0 and matches / total or 2.2250738585072014e-308 end,
  epsilon = function(matches, total, _, _, _, o) return (matches > 0 and matches or o.epsilon) / total end,
  add_one = function(matches, total, n) return n == 1 and matches / total or (matches + 1) / (total + 1) end,
  geometric = function(matches, total, _, empty)
    return matches > 0 and matches / total or 1 / (2 ^ empty * total)
  end,
  length = function(matches, total, _, empty, length, o)
    if matches > 0 or length < 2 then return matches / total end
    return math.log(length) / (2 ^ empty * o.k * total)
  end,
}

local expect = options_of.expect
local item_list = "a list of strings or a list of numbers"

-- The reference's length that is closest to the candidate's; the shorter of two.
local function closest_length(length, references)
  local closest
  for _, reference in ipairs(references) do
    local n = #reference
    local nearer = closest and math.abs(n - length) - math.abs(closest - length)
    if not closest or nearer < 0 or (nearer == 0 and n < closest) then closest = n end
  end
  return closest or 0
end

local kinds = { order = "an integer >= 1", weights = "a list of finite numbers", epsilon = "a finite number > 0",
  smoothing = '"none" or "epsilon" or "add_one" or "geometric" or "length"', k = "a finite number > 0" }

local function checked(who, options) return options_of.read(who, options, defaults, kinds) end

local function score_of(matches, totals, length, closest, o)
  local order, smooth = #matches, smoothed[o.smoothing]
  if matches[1] == 0 then return 0.0 end
  local sum, empty = 0.0, 0
  for n = 1, order do
    if matches[n] == 0 then empty = empty + 1 end
    local precision = smooth(matches[n], math.max(1, totals[n]), n, empty, length, o)
    if precision > 0 then sum = sum + (o.weights and o.weights[n] or 1 / order) * math.log(precision) end
  end
  return (length > closest and 1 or math.exp(1 - closest / length)) * math.exp(sum)
end

--- The score from counts: matches and numbers of n-grams of each order, the length of the candidate and the closest one
-- of a reference; those of one sentence, or their sums over many.
---@param matches integer[]
---@param totals integer[]
---@param length integer
---@param closest integer
---@param options? BleuOptions
---@return number
function M.score(matches, totals, length, closest, options)
  expect("llm.bleu.score", "matches", matches, "a list of integers >= 0")
  expect("llm.bleu.score", "totals", totals, "a list of integers >= 0")
  if #matches == 0 or #totals ~= #matches then
    options_of.fail("llm.bleu.score: totals: expected as many orders as matches, at least 1, got %d for %d", #totals,
      #matches)
  end
  expect("llm.bleu.score", "length", length, "an integer >= 0")
  expect("llm.bleu.score", "closest", closest, "an integer >= 0")
  return score_of(matches, totals, length, closest, checked("llm.bleu.score", options))
end

--- BLEU of one candidate, a list of ids or of words, against a list of references, in plain Lua: the definition, one
-- sentence at a time. Also returns the matches and the numbers of n-grams of each order, as lists. The score of a
-- candidate without a match is 0; so is that of one without references.
---@param candidate any[]
---@param references any[][]
---@param options? BleuOptions
---@return number score
---@return integer[] matches
---@return integer[] totals
function M.sentence(candidate, references, options)
  expect("llm.bleu.sentence", "candidate", candidate, item_list)
  expect("llm.bleu.sentence", "references", references, "a list of lists")
  for _, reference in ipairs(references) do expect("llm.bleu.sentence", "references", reference, item_list) end
  local o = checked("llm.bleu.sentence", options)
  local order, length = o.weights and #o.weights or o.order, #candidate
  local closest = closest_length(length, references)
  local matches, totals = {}, {}

  -- An n-gram has a number, given by the number of its first n - 1 items and that of its last item, so that keys are
  -- exact whatever the items are.
  local ones, grams, numbers = {}, {}, {}
  local count, seen = 0, {} -- of the candidate's n-grams of this order
  for i = 1, length do
    local item = candidate[i]
    local number = numbers[item]
    if not number then
      count = count + 1
      number, numbers[item] = count, count
      seen[number] = 0
    end
    seen[number] = seen[number] + 1
    ones[i], grams[i] = number, number
  end
  local theirs, their_ones = {}, {}
  for r, reference in ipairs(references) do
    local list, copy = {}, {}
    for i = 1, #reference do
      local number = numbers[reference[i]] or 0
      list[i], copy[i] = number, number
    end
    theirs[r], their_ones[r] = list, copy
  end
  for n = 1, order do
    matches[n], totals[n] = 0, math.max(0, length - n + 1)
  end
  for n = 1, math.min(order, length) do
    if n > 1 then
      numbers, seen, count = {}, {}, 0
      for i = 1, length - n + 1 do
        local key = grams[i] << 32 | ones[i + n - 1]
        local number = numbers[key]
        if not number then
          count = count + 1
          number, numbers[key] = count, count
          seen[number] = 0
        end
        seen[number] = seen[number] + 1
        grams[i] = number
      end
      for r, list in ipairs(theirs) do
        local last = their_ones[r]
        for i = 1, #last - n + 1 do list[i] = numbers[list[i] << 32 | last[i + n - 1]] or 0 end
      end
    end
    local best, matched = {}, 0
    for r, list in ipairs(theirs) do
      local now = {}
      for i = 1, #their_ones[r] - n + 1 do
        local number = list[i]
        if number > 0 then
          local times = (now[number] or 0) + 1
          now[number] = times
          if times > (best[number] or 0) and times <= seen[number] then
            best[number], matched = times, matched + 1
          end
        end
      end
    end
    matches[n] = matched
    if matched == 0 then break end -- no longer ones match either
  end
  return score_of(matches, totals, length, closest, o), matches, totals
end

-- A table of lists as one padded tensor of `width` columns, and the lists' lengths; missing lists have length -1.
local function padded(lists, rows, width)
  local flat, lengths = {}, {}
  for row = 1, rows do
    local list = lists[row]
    local n = list and #list or -1
    lengths[row] = n
    if n > 0 then table.move(list, 1, n, #flat + 1, flat) end
    for _ = math.max(n, 0) + 1, width do flat[#flat + 1] = -1 end
  end
  return ty.tensor(flat, { dtype = "i64" }), ty.tensor(lengths, { dtype = "i64" })
end

--- BLEU of each candidate (a list of ids) against its own list of references, by ty.bleu: [n], or one score of all
-- when options.corpus. Also returns the counts, i64 [n, 2 * order + 2], as ty.bleu does.
---@param candidates integer[][]
---@param references integer[][][]
---@param options? BleuOptions
---@return Tensor scores
---@return Tensor counts
function M.batch(candidates, references, options)
  local o = options_of.read("llm.bleu.batch", options, { order = 4, weights = options_of.none, smoothing = "none",
    epsilon = 0.1, k = 5, corpus = false, device = "cpu", dtype = "f32" }, kinds)
  expect("llm.bleu.batch", "candidates", candidates, "a list of lists")
  expect("llm.bleu.batch", "references", references, "a list of lists")
  local n = #candidates
  if #references ~= n then
    options_of.fail("llm.bleu.batch: references: expected those of %d candidates, got those of %d", n, #references)
  end
  for i = 1, n do
    expect("llm.bleu.batch", "candidates", candidates[i], "a list of integers")
    for _, reference in ipairs(references[i]) do
      expect("llm.bleu.batch", "references", reference, "a list of integers")
    end
  end
  local width, most, longest, flat = 0, 0, 0, {}
  for i = 1, n do
    width, most = math.max(width, #candidates[i]), math.max(most, #references[i])
    for _, reference in ipairs(references[i]) do longest = math.max(longest, #reference) end
  end
  for i = 1, n do
    for j = 1, most do flat[(i - 1) * most + j] = references[i][j] or false end
  end
  local x, x_lengths = padded(candidates, n, width)
  local y, y_lengths = padded(flat, n * most, longest)
  local weights = o.weights and ty.tensor(o.weights, { dtype = "f64" }):to(o.device)
  return ty.bleu(x:reshape(n, width):to(o.device), y:reshape(n, most, longest):to(o.device), x_lengths:to(o.device),
    y_lengths:reshape(n, most):to(o.device), weights, { order = o.order, smoothing = o.smoothing, epsilon = o.epsilon,
      k = o.k, corpus = o.corpus, dtype = o.dtype })
end

return M
