--- Small coloured shapes with captions, for recipes that train a painter from the start: drawn by rule, so that what is
-- in a picture, and what an edit had to leave alone, is read off without a judge that was trained.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local expect, fail = arguments.expect, arguments.fail
local M = {}

--- The words of a caption, { colour, kind, place }; an edit's is { colour, "to", "blank" }.
M.words = { colour = { "red", "green", "blue", "yellow" }, kind = { "square", "bar", "post", "corner" },
  place = { "above left", "above right", "below left", "below right" } }

local COLOURS = { { 1, -0.6, -0.6 }, { -0.6, 0.8, -0.6 }, { -0.4, -0.2, 1 }, { 1, 0.9, -0.6 } }
local KINDS = { { 1, 1, 1, 1, 1, 1, 1, 1, 1 }, { 0, 0, 0, 1, 1, 1, 0, 0, 0 }, { 0, 1, 0, 0, 1, 0, 0, 1, 0 },
  { 1, 1, 1, 1, 0, 0, 1, 0, 0 } }
local SIDE, WORDS, WIDE = 8, 14, 16 -- 12 words, "to", and one that says nothing

-- Tables are made on the CPU, once, and go where the labels are. What is drawn by chance is the same on every device.
local masks -- [4 kinds, 4 places, 4 jitters, 8, 8]

local function all_masks()
  if masks then return masks end
  local values = {}
  for kind = 1, 4 do
    for place = 0, 3 do
      for jitter = 0, 3 do
        local top, left = place // 2 * 4 + jitter // 2, place % 2 * 4 + jitter % 2
        for i = 0, SIDE - 1 do
          for j = 0, SIDE - 1 do
            local inside = i >= top and i < top + 3 and j >= left and j < left + 3
            values[#values + 1] = inside and KINDS[kind][(i - top) * 3 + j - left + 1] or 0
          end
        end
      end
    end
  end
  masks = ty.keep(ty.tensor(values, { dtype = "f32" }):reshape(4, 4, 4, SIDE, SIDE))
  return masks
end

local function check(who, labels)
  expect(who, "labels", labels, "a tensor")
  if labels.ndim ~= 2 or labels.shape[2] ~= 3 or labels.dtype ~= "i64" then
    fail("%s: labels: expected i64 [n, 3] (colour, kind, place, 0 to 3 each), got %s", who, arguments.describe(labels))
  end
  return labels
end

-- Where shapes are, [n, 1, 8, 8].
local function mask_of(labels, jitter)
  local at = (labels:select(1, 1) * 4 + labels:select(1, 2)) * 4 + jitter
  return all_masks():to { device = at.device }:reshape(64, 1, SIDE, SIDE):index_select(0, at)
end

local function colour_of(labels)
  local colours = ty.tensor(COLOURS, { dtype = "f32", device = labels.device })
  return colours:index_select(0, labels:select(1, 0)):reshape(-1, 3, 1, 1)
end

--- Pictures of labels, f32 [n, 3, 8, 8] from -1 to 1: a shape of 3 x 3 in its quarter on a dark ground. jitter: where
-- in its quarter, i64 [n], 0 to 3 (0: kinds that may lie anywhere take a small painter much longer to tell apart);
-- ground: how dark, f32 [n], -1 to -0.6 (drawn evenly).
---@param labels Tensor  i64 [n, 3]: colour, kind, place, 0 to 3 each
---@param jitter? Tensor
---@param ground? Tensor
---@return Tensor pictures
---@return Tensor mask  f32 [n, 1, 8, 8], 1 where the shape is
function M.draw(labels, jitter, ground)
  local who = "distill.shapes.draw"
  check(who, labels)
  expect(who, "jitter", jitter, "a tensor or nil")
  expect(who, "ground", ground, "a tensor or nil")
  local n, device = labels.shape[1], labels.device
  local mask = mask_of(labels, jitter or ty.zeros({ n }, { dtype = "i64", device = device }))
  local dark = (ground or ty.rand({ n }, { device = device }) * 0.4 - 1):reshape(n, 1, 1, 1)
  return mask * colour_of(labels) + (1 - mask) * dark, mask
end

--- n labels, drawn evenly: i64 [n, 3].
---@param n integer
---@param device? string  ("cpu")
---@return Tensor
function M.labels(n, device)
  expect("distill.shapes.labels", "n", n, "an integer >= 1")
  return ty.randint(0, 4, { n, 3 }, { device = device })
end

local table_of_words

-- A vector for each word: of length 4, the same always.
local function vectors()
  table_of_words = table_of_words or ty.keep(ty.data.with_seed(4321, function() return ty.randn(WORDS, WIDE) end))
  return table_of_words
end

--- Embeddings of captions, f32 [n, 3, 16], as a text encoder gives them: a fixed vector for each word. edit: of
-- instructions instead, "to" the colour of the labels.
---@param labels Tensor  i64 [n, 3]
---@param edit? boolean
---@return Tensor
function M.text(labels, edit)
  local who = "distill.shapes.text"
  check(who, labels)
  expect(who, "edit", edit, "a boolean or nil")
  local how = { dtype = "i64", device = labels.device }
  local at = labels + ty.tensor({ 0, 4, 8 }, how)
  if edit then
    local n = labels.shape[1]
    at = ty.stack({ ty.full({ n }, 12, how), labels:select(1, 0), ty.full({ n }, 13, how) }, 1)
  end
  return vectors():to { device = at.device }:index_select(0, at:flatten()):reshape(-1, 3, WIDE)
end

--- The text that says nothing, to be left out for guidance: zeros [1, 3, 16].
---@param device? string  ("cpu")
---@return table  { text = { embeddings } }
function M.nothing(device) return { text = { embeddings = ty.zeros({ 1, 3, WIDE }, { device = device }) } } end

--- What is in pictures: the labels whose picture, wherever in the quarter and on the ground that fits best, is nearest;
-- and its distance, root mean square, f64 [n].
---@param pictures Tensor  [n, 3, 8, 8]
---@return Tensor labels   i64 [n, 3]
---@return Tensor distance
function M.read(pictures)
  local who = "distill.shapes.read"
  expect(who, "pictures", pictures, "a tensor")
  if pictures.ndim ~= 4 or table.concat(pictures.shape, ",", 2) ~= "3,8,8" then
    fail("%s: pictures: expected [n, 3, 8, 8], got %s", who, arguments.describe(pictures))
  end
  local n = pictures.shape[1]
  local x = pictures:to "f64"
  local m = all_masks():reshape(64, 64):to { dtype = "f64", device = x.device } -- [kind, place, jitter], pixels
  local flat = x:reshape(n, 3, 64)
  local size = m:sum(1)
  -- Of the ground: its mean over channels outside of the shape, and the squares about it.
  local all, squares = flat:sum(1), flat:square():sum(1)
  local outside = 1 - m
  local total, power = all:matmul(outside:transpose(0, 1)), squares:matmul(outside:transpose(0, 1))
  local count = (64 - size) * 3
  local ground = (total / count):clamp(-1, -0.6)
  local error_outside = power - 2 * ground * total + ground:square() * count -- [n, 64]
  local best, at
  for colour = 0, 3 do
    local c = ty.tensor(COLOURS[colour + 1], { dtype = "f64", device = x.device }):reshape(1, 3, 1)
    local inside = (flat - c):square():sum(1):matmul(m:transpose(0, 1))
    local errors = error_outside + inside
    local least, k = errors:min(1), errors:argmin(1) + colour * 64
    if best then
      at = ty.where(least:lt(best), k, at)
      best = ty.minimum(best, least)
    else
      best, at = least, k
    end
  end
  local labels = ty.stack({ at:floor_divide(64), at:floor_divide(16) % 4, at:floor_divide(4) % 4 }, 1)
  return labels, (best:clamp(0) / 192):sqrt()
end

--- The share of pictures in which all of colour, kind and place are what was asked for.
---@param pictures Tensor
---@param labels Tensor  i64 [n, 3]
---@return number
function M.asked(pictures, labels)
  check("distill.shapes.asked", labels)
  return M.read(pictures):eq(labels:to { device = pictures.device }):all(1):to("f64"):mean():item()
end

--- Shares of pictures in which colour, kind and place are what was asked for, and in which all three are.
---@param pictures Tensor
---@param labels Tensor  i64 [n, 3]
---@return { colour: number, kind: number, place: number, all: number }
function M.shares(pictures, labels)
  check("distill.shapes.shares", labels)
  local right = M.read(pictures):eq(labels:to { device = pictures.device })
  local each = right:to("f64"):mean(0):tolist()
  return { colour = each[1], kind = each[2], place = each[3], all = right:all(1):to("f64"):mean():item() }
end

local order

--- n labels of `count` of the 64 captions, each as often as the others: those from number `first` on in an order that
-- is always the same, and at random. For captions that training does not see.
---@param first integer  from 0
---@param count integer
---@param n integer
---@param device? string  ("cpu")
---@return Tensor  i64 [n, 3]
function M.captions(first, count, n, device)
  local who = "distill.shapes.captions"
  expect(who, "first", first, "an integer in [0, 63]")
  expect(who, "count", count, ("an integer in [1, %d]"):format(64 - first))
  expect(who, "n", n, "an integer >= 1")
  order = order or ty.keep(ty.data.with_seed(7, function() return ty.randperm(64) end))
  local number = order:narrow(0, first, count):index_select(0, ty.arange(n) % count)
  return ty.stack({ number:floor_divide(16), number:floor_divide(4) % 4, number % 4 }, 1):to { device = device }
end

--- n pictures with their captions, drawn evenly, to train a painter on.
---@param n integer
---@param device? string  ("cpu")
---@return { image: Tensor, text: table }  [n, 3, 8, 8]; text as conditions have it, { embeddings }
function M.batch(n, device)
  expect("distill.shapes.batch", "n", n, "an integer >= 1")
  local labels = M.labels(n, device)
  return { image = (M.draw(labels)), text = { embeddings = M.text(labels) } }
end

--- Pictures to edit: n of them, the same in another colour, what says so, and where nothing was to change.
---@param n integer
---@param device? string  ("cpu")
---@return { source: Tensor, image: Tensor, labels: Tensor, text: Tensor, kept: Tensor }
function M.edits(n, device)
  expect("distill.shapes.edits", "n", n, "an integer >= 1")
  local there = { device = device }
  local labels, ground = M.labels(n, device), ty.rand({ n }, there) * 0.4 - 1
  local source, mask = M.draw(labels, nil, ground)
  local other = (labels:narrow(1, 0, 1) + ty.randint(1, 4, { n, 1 }, there)) % 4
  local wanted = ty.concat({ other, labels:narrow(1, 1, 2) }, 1)
  return { source = source, image = (M.draw(wanted, nil, ground)), labels = wanted, text = M.text(wanted, true),
    kept = 1 - mask }
end

--- What an edit changed where nothing was to change: the root mean square of the difference, over those pixels.
---@param x Tensor      [n, 3, 8, 8], edited pictures
---@param edits table   as of edits()
---@return number
function M.elsewhere(x, edits)
  local who = "distill.shapes.elsewhere"
  expect(who, "x", x, "a tensor")
  expect(who, "edits", edits, "a table")
  expect(who, "edits.source", edits.source, "a tensor")
  expect(who, "edits.kept", edits.kept, "a tensor")
  if table.concat(x.shape, ",") ~= table.concat(edits.source.shape, ",") then
    arguments.fail("%s: x: expected pictures %s, got %s", who, arguments.describe(edits.source), arguments.describe(x))
  end
  local off = ((x - edits.source) * edits.kept):square():sum() / (edits.kept:sum() * x.shape[2])
  return math.sqrt(off:item())
end

return M
