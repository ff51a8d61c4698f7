--- The n-gram model that a neural one has to beat: interpolated Kneser-Ney smoothing with three discounts. Kneser and
-- Ney 1995; Chen and Goodman 1999, "An Empirical Study of Smoothing Techniques for Language Modeling".
--
-- A document is a string of symbols of `width` bytes each, so that a context is a piece of it and its own key.
local arguments = require "tycho.arguments"
local M = {}

--- A language model that counts: the share of each token after the last few, smoothed.
---@class NGram
---@field order integer
local NGram = {}
NGram.__index = NGram

-- How often each n-gram of the highest order occurs; for a shorter one, before how many different symbols it does,
-- the begin of a document being one of them.
local function count(documents, order, width)
  local grams = {}
  for k = 1, order do grams[k] = {} end
  local highest, size = grams[order], order * width
  for _, text in ipairs(documents) do
    for to = size, #text, width do
      local gram = text:sub(to - size + 1, to)
      highest[gram] = (highest[gram] or 0) + 1
    end
    -- At its begin a document has less context. The first symbol is given, not predicted.
    for k = 2, math.min(order - 1, #text // width) do
      local gram = text:sub(1, k * width)
      grams[k][gram] = 1
    end
  end
  for k = order - 1, 1, -1 do
    local shorter = grams[k]
    for gram in pairs(grams[k + 1]) do
      local rest = gram:sub(width + 1)
      shorter[rest] = (shorter[rest] or 0) + 1
    end
  end
  return grams
end

-- The three discounts of an order, by how many of its n-grams have a count of 1, 2, 3 and 4.
local function discounts(grams)
  local t = { 0, 0, 0, 0 }
  for _, c in pairs(grams) do if t[c] then t[c] = t[c] + 1 end end
  if t[1] == 0 or t[2] == 0 then return { 0.5, 0.5, 0.5 } end
  local y, d = t[1] / (t[1] + 2 * t[2]), {}
  for i = 1, 3 do
    d[i] = t[i] > 0 and i - (i + 1) * y * t[i + 1] / t[i] or y
    d[i] = math.max(0, math.min(i, d[i]))
  end
  return d
end

--- Learns from documents (strings). options: order (5), width (1: bytes of a symbol), vocabulary (256 symbols). The
-- first symbol of a document is context alone.
---@param documents string[]
---@param options? {order?: integer, width?: integer, vocabulary?: integer}
---@return NGram
function M.train(documents, options)
  local o = arguments.read("llm.ngram", options, { order = 5, width = 1, vocabulary = 256 },
    { order = "an integer >= 1", width = "an integer >= 1", vocabulary = "an integer >= 1" })
  arguments.expect("llm.ngram", "documents", documents, "a list of strings")
  local self = setmetatable({ order = o.order, width = o.width, vocabulary = o.vocabulary }, NGram)
  self.grams, self.discounts, self.totals, self.left = count(documents, o.order, o.width), {}, {}, {}
  for k, grams in ipairs(self.grams) do
    -- Of each context: the sum of its counts, and of what the discounts take away.
    local d, totals, left = discounts(grams), {}, {}
    for gram, c in pairs(grams) do
      local context = gram:sub(1, -o.width - 1)
      totals[context] = (totals[context] or 0) + c
      left[context] = (left[context] or 0) + d[math.min(c, 3)]
    end
    self.discounts[k], self.totals[k], self.left[k] = d, totals, left
  end
  return self
end

--- The probability of `symbol` behind `context` (a string of symbols, of which the last order - 1 count).
function NGram:probability(context, symbol)
  local p, width = 1 / self.vocabulary, self.width
  for k = 1, math.min(self.order, #context // width + 1) do
    local seen = k == 1 and "" or context:sub(-(k - 1) * width)
    local total = self.totals[k][seen]
    if not total then break end -- nor is a longer context known
    local c = self.grams[k][seen .. symbol] or 0
    local cut = c > 0 and self.discounts[k][math.min(c, 3)] or 0
    p = (c - cut + self.left[k][seen] * p) / total
  end
  return p
end

--- Bits that the documents take, each without its first symbol.
---@param documents string[]
---@return number bits
---@return integer symbols
function NGram:bits(documents)
  local nats, symbols, width = 0.0, 0, self.width
  local span = (self.order - 1) * width
  for _, text in ipairs(documents) do
    for at = width + 1, #text, width do
      nats = nats - math.log(self:probability(text:sub(math.max(1, at - span), at - 1), text:sub(at, at + width - 1)))
      symbols = symbols + 1
    end
  end
  return nats / math.log(2), symbols
end

return M
