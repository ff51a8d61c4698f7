--- Blank infilling: spans of a text are cut out and written after it, one token after another. Du et al. 2022, "GLM:
-- General Language Model Pretraining with Autoregressive Blank Infilling", section 2.1; Zeng et al. 2023, "GLM-130B",
-- section 2.2: [MASK] stands for short spans inside of a text (lengths by Poisson's law of mean 3, 15 % of its tokens),
-- [gMASK] for all that follows a prefix; 30 % of the samples are of the first kind.
--
--     local marks = llm.infill.marks(tokenizer.size)              -- four ids behind those of the tokenizer
--     local rows = llm.infill.Rows(ids, { length = 56, marks = marks })
--     local batch = ty.data.DataLoader(rows, { batch_size = 8, shuffle = true }):next()
--     local loss = llm.infill.loss(glm, batch)
--     local text = llm.infill.fill(glm, { 5, 9, marks.mask, 7 }, marks)
--
-- A sample is part A, the text with marks in place of spans, whose tokens see one another, and part B, each span behind
-- a begin, of which the end is predicted, too. The tokens of a short span all have the position of its mark; those
-- behind [gMASK] count on. So published code has it for this model.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local expect, fail, none = arguments.expect, arguments.fail, arguments.none
local M = {}

--- The marks of samples as the ids from `first` on: mask, gmask, sop (begin of a piece), eop (its end); count: how
-- many.
---@param first integer
---@return { mask: integer, gmask: integer, sop: integer, eop: integer, count: integer }
function M.marks(first)
  expect("llm.infill.marks", "first", first, "an integer >= 0")
  return { mask = first, gmask = first + 1, sop = first + 2, eop = first + 3, count = 4 }
end

local function check_marks(who, marks)
  expect(who, "marks", marks, "a table")
  for _, key in ipairs { "mask", "gmask", "sop", "eop" } do
    expect(who, "marks." .. key, marks[key], "an integer >= 0")
  end
  return marks
end

-- Uniform numbers one after another, from the generator.
local function uniform()
  local list, at = {}, 0
  return function()
    if at == #list then list, at = ty.rand(64):tolist(), 0 end
    at = at + 1
    return list[at]
  end
end

-- By inversion, from one uniform number.
local function poisson(mean, u)
  local k, p = 0, math.exp(-mean)
  local sum = p
  while u > sum and k < 50 do
    k = k + 1
    p = p * mean / k
    sum = sum + p
  end
  return k
end

--- Draws spans of a text of n tokens: lengths by Poisson's law (at least 1) until there are `share` of the tokens,
-- places so that a token is left between two of them. A list of { first token from 0, length }, in order.
---@param n integer
---@param share? number  0.15
---@param mean? number   3
---@return integer[][]
function M.spans(n, share, mean)
  local who = "llm.infill.spans"
  expect(who, "n", n, "an integer >= 1")
  share = expect(who, "share", share == nil and 0.15 or share, "a number in [0, 1]")
  mean = expect(who, "mean", mean == nil and 3 or mean, "a number > 0")
  local draw = uniform()
  local lengths, wanted = {}, math.floor(share * n + 0.5)
  local left = wanted
  -- k spans need k - 1 tokens between them.
  while left > 0 and #lengths <= n - wanted do
    local length = math.min(left, math.max(1, poisson(mean, draw())))
    lengths[#lengths + 1], left = length, left - length
  end
  local rest = n - wanted + left
  local gaps = {}
  for gap = 0, rest do gaps[gap + 1] = gap end
  for i = 1, #lengths do -- places without repetition
    local j = i + math.floor(draw() * (#gaps - i + 1))
    gaps[i], gaps[j] = gaps[j], gaps[i]
  end
  local chosen = table.move(gaps, 1, #lengths, 1, {})
  table.sort(chosen)
  local list, shift = {}, 0
  for i, gap in ipairs(chosen) do
    list[i] = { gap + shift, lengths[i] }
    shift = shift + lengths[i]
  end
  return list
end

local function ids_of(who, ids)
  if ty.is_tensor(ids) then ids = ids:tolist() end
  expect(who, "ids", ids, "a list of integers")
  return ids
end

--- A sample with short spans cut out. ids: the text; spans as spans() gives them; order: that of the spans in part B, a
-- list of their numbers (as they come by default; training shuffles them). Returns lists of the same length: tokens,
-- targets (-100: not counted) and positions, from 0, and prefix, the length of part A.
---@param ids integer[]|Tensor
---@param spans integer[][]
---@param marks table
---@param order? integer[]
---@return { tokens: integer[], targets: integer[], positions: integer[], prefix: integer }
function M.blank(ids, spans, marks, order)
  local who = "llm.infill.blank"
  ids = ids_of(who, ids)
  check_marks(who, marks)
  expect(who, "spans", spans, "a list of tables")
  local s, at, places = { tokens = {}, targets = {}, positions = {} }, 0, {}
  local function put(token, target, position)
    local i = #s.tokens + 1
    s.tokens[i], s.targets[i], s.positions[i] = token, target, position
  end
  for i, span in ipairs(spans) do
    local from, length = span[1], span[2]
    if not math.tointeger(from) or not math.tointeger(length) or length < 1 or from < at or from + length > #ids then
      fail("%s: spans: expected spans in order within %d tokens, got { %s, %s } as span %d", who, #ids,
        tostring(from), tostring(length), i)
    end
    for k = at, from - 1 do put(ids[k + 1], -100, #s.tokens) end
    places[i] = #s.tokens
    put(marks.mask, -100, places[i])
    at = from + length
  end
  for k = at, #ids - 1 do put(ids[k + 1], -100, #s.tokens) end
  s.prefix = #s.tokens
  for i = 1, #spans do
    local which = order and order[i] or i
    local span = expect(who, "order", spans[which], "a table")
    put(marks.sop, ids[span[1] + 1], places[which])
    for k = 1, span[2] do put(ids[span[1] + k], k < span[2] and ids[span[1] + k + 1] or marks.eop, places[which]) end
  end
  return s
end

--- A sample whose first `cut` tokens are the context and all others are to be written. As blank() returns it.
---@param ids integer[]|Tensor
---@param cut integer
---@param marks table
---@return { tokens: integer[], targets: integer[], positions: integer[], prefix: integer }
function M.suffix(ids, cut, marks)
  local who = "llm.infill.suffix"
  ids = ids_of(who, ids)
  check_marks(who, marks)
  expect(who, "cut", cut, ("an integer in [0, %d)"):format(math.max(#ids, 1)))
  local s = { tokens = {}, targets = {}, positions = {}, prefix = cut + 1 }
  local function put(token, target)
    local i = #s.tokens + 1
    s.tokens[i], s.targets[i], s.positions[i] = token, target, i - 1
  end
  for k = 1, cut do put(ids[k], -100) end
  put(marks.gmask, -100)
  put(marks.sop, ids[cut + 1])
  for k = cut + 1, #ids do put(ids[k], ids[k + 1] or marks.eop) end
  return s
end

--- The text that a sample was made of: the targets of part B in the places of their marks.
---@param sample { tokens: integer[], targets: integer[], positions: integer[], prefix: integer }
---@param marks table
---@return integer[] ids
function M.restore(sample, marks)
  local who = "llm.infill.restore"
  expect(who, "sample", sample, "a table")
  check_marks(who, marks)
  local pieces = {}
  for i = sample.prefix + 1, #sample.tokens do
    if sample.tokens[i] == marks.sop then pieces[#pieces + 1] = { sample.positions[i], {} } end
    if sample.targets[i] ~= marks.eop then table.insert(pieces[#pieces][2], sample.targets[i]) end
  end
  local by_place, ids = {}, {}
  for _, p in ipairs(pieces) do by_place[p[1]] = p[2] end
  for i = 1, sample.prefix do
    local token = sample.tokens[i]
    local cut = token == marks.mask and by_place[i - 1] or token == marks.gmask and pieces[1][2]
    if cut then
      for _, id in ipairs(cut) do ids[#ids + 1] = id end
    else
      ids[#ids + 1] = token
    end
  end
  return ids
end

--- Samples side by side, filled up with tokens that nobody sees: tokens, targets and positions i64 [n, longest], prefix
-- i64 [n], count (of targets that count).
---@param samples table[]
---@return table batch
function M.batch(samples)
  expect("llm.infill.batch", "samples", samples, "a list of tables")
  if #samples == 0 then fail "llm.infill.batch: samples: expected at least one, got an empty table" end
  local longest, count = 0, 0
  for i, s in ipairs(samples) do
    for _, key in ipairs { "tokens", "targets", "positions" } do
      expect("llm.infill.batch", ("samples[%d].%s"):format(i, key), s[key], "a list of integers")
    end
    longest = math.max(longest, #s.tokens)
  end
  local rows = { tokens = {}, targets = {}, positions = {}, prefix = {} }
  for i, s in ipairs(samples) do
    for key, fill in pairs { tokens = 0, targets = -100, positions = 0 } do
      local row = table.move(s[key], 1, #s[key], 1, {})
      for k = #row + 1, longest do row[k] = fill end
      rows[key][i] = row
    end
    rows.prefix[i] = s.prefix
    for _, target in ipairs(s.targets) do count = count + (target ~= -100 and 1 or 0) end
  end
  local batch = { count = count }
  for key, list in pairs(rows) do batch[key] = ty.tensor(list, { dtype = "i64" }) end
  return batch
end

--- Samples of a text, as a data set.
---@class InfillRows
---@field size integer
local Rows = ty.data.class()

--- Samples of a text's tokens, i64 [n] or a list of such, for ty.data.DataLoader. options: marks; length (tokens of the
-- text in a sample, 56), short (share of samples with [MASK], 0.3; the others have [gMASK] behind a prefix whose length
-- is drawn evenly), share (of the tokens in short spans, 0.15), mean (of their lengths, 3). Every sample is drawn anew,
-- its begin, too. A batch: see batch().
---@param ids Tensor|Tensor[]
---@param options table
---@return InfillRows
function M.Rows(ids, options)
  local who = "llm.infill.Rows"
  local o = arguments.read(who, options, { marks = none, length = 56, short = 0.3, share = 0.15, mean = 3 },
    { marks = "a table", length = "an integer >= 2", short = "a number in [0, 1]", share = "a number in (0, 1)",
      mean = "a number > 0" })
  check_marks(who, o.marks)
  if not ty.is_tensor(ids) then
    expect(who, "ids", ids, "a tensor or a list")
    ids = ty.concat(ids, 0)
  end
  if ids.ndim ~= 1 or ids:numel() < o.length then
    fail("%s: ids: expected at least %d tokens, [n], got %s", who, o.length, arguments.describe(ids))
  end
  o.ids, o.size = ty.keep(ids:to "i64"), ids:numel() // o.length
  return setmetatable(o, Rows)
end

-- A list of the numbers up to n in an order that is drawn.
local function shuffled(n)
  local list = n > 0 and ty.randperm(n):tolist() or {}
  for i, v in ipairs(list) do list[i] = v + 1 end
  return list
end

--- Samples by number (i64 tensor), as a batch.
function Rows:batch(positions)
  local samples, draw = {}, uniform()
  for i, position in ipairs(positions:tolist()) do
    local from = math.min(position * self.length + math.floor(draw() * self.length), self.ids:numel() - self.length)
    local ids = self.ids:narrow(0, from, self.length):tolist()
    if draw() < self.short then
      local spans = M.spans(self.length, self.share, self.mean)
      samples[i] = M.blank(ids, spans, self.marks, shuffled(#spans))
    else
      samples[i] = M.suffix(ids, math.floor(draw() * self.length), self.marks)
    end
  end
  return M.batch(samples)
end

--- One sample, as a batch of one.
function Rows:get(i) return self:batch(ty.tensor({ i }, { dtype = "i64" })) end

--- The loss of a model (tycho.models.glm) on a batch, nats a token that counts.
---@param model GLM
---@param batch table
---@return Tensor
function M.loss(model, batch)
  expect("llm.infill.loss", "model", model, "a module")
  expect("llm.infill.loss", "batch", batch, "a table")
  if type(model.loss) ~= "function" then
    arguments.fail("llm.infill.loss: model: expected one with a method loss, got %s", arguments.describe(model))
  end
  return model:loss(batch.tokens, batch.targets, { prefix = batch.prefix, positions = batch.positions })
end

--- How well a model fills in batches: nats a token that counts, and the share of these that are the likeliest.
---@param model GLM
---@param batches table[]
---@return { loss: number, right: number }
function M.evaluate(model, batches)
  expect("llm.infill.evaluate", "model", model, "a module")
  expect("llm.infill.evaluate", "batches", batches, "a list of tables")
  local training = model.training
  model:eval()
  local ok, found = pcall(ty.train.evaluate, batches, function(batch)
    local logits = model(batch.tokens, { prefix = batch.prefix, positions = batch.positions })
    return { loss = ty.nn.cross_entropy(logits:flatten(0, 1), batch.targets:flatten()):item() * batch.count,
      right = logits:argmax(-1):eq(batch.targets):to("f32"):sum() }, batch.count
  end)
  model:train(training)
  if not ok then error(found, 0) end
  return found
end

--- What the tokens of batches cost, in nats each, that are guessed by how frequent they are among those to be written
-- in others: what a model has learnt that is better. Each token counts once more than it was seen.
---@param seen table[]     batches to count tokens in
---@param batches table[]
---@param size integer     tokens that there are, with the marks
---@return number
function M.frequencies(seen, batches, size)
  local who = "llm.infill.frequencies"
  expect(who, "seen", seen, "a list of tables")
  expect(who, "batches", batches, "a list of tables")
  expect(who, "size", size, "an integer >= 1")
  return ty.no_grad(ty.scope, function()
    local counts = ty.ones(size)
    for _, batch in ipairs(seen) do
      local targets = batch.targets:flatten()
      counts = counts + targets:masked_select(targets:ge(0)):bincount(nil, size):to "f32"
    end
    local logits = counts:log():unsqueeze(0)
    return ty.train.evaluate(batches, function(batch)
      local targets = batch.targets:flatten()
      return ty.nn.cross_entropy(logits:expand(targets.shape[1], -1), targets):item() * batch.count, batch.count
    end)
  end)
end

--- Fills the marks of a text one after another, each with the likeliest tokens up to the end of the piece; what was
-- filled in is context for the next. options: most (tokens of a piece, 16). Returns the text without marks, and the
-- pieces.
---@param model GLM
---@param ids integer[]|Tensor  with marks.mask among them, or marks.gmask at the end
---@param marks table
---@param options? { most?: integer }
---@return integer[] ids
---@return integer[][] pieces
function M.fill(model, ids, marks, options)
  local who = "llm.infill.fill"
  expect(who, "model", model, "a module")
  ids = ids_of(who, ids)
  check_marks(who, marks)
  local o = arguments.read(who, options, { most = 16 }, { most = "an integer >= 1" })
  ids = table.move(ids, 1, #ids, 1, {})
  local pieces, at = {}, 1
  while at <= #ids do
    local token = ids[at]
    if token ~= marks.mask and token ~= marks.gmask then
      at = at + 1
    else
      local piece = {}
      local tokens = table.move(ids, 1, #ids, 1, {})
      local positions = {}
      for i = 1, #tokens do positions[i] = i - 1 end
      local next_token = marks.sop
      while next_token ~= marks.eop and #piece <= o.most do
        tokens[#tokens + 1] = next_token
        positions[#tokens] = token == marks.mask and at - 1 or #tokens - 1
        if next_token ~= marks.sop then piece[#piece + 1] = next_token end
        if #piece == o.most then break end
        next_token = ty.no_grad(ty.scope, function()
          local logits = model(ty.tensor({ tokens }, { dtype = "i64" }), {
            prefix = ty.tensor({ #ids }, { dtype = "i64" }), positions = ty.tensor({ positions }, { dtype = "i64" }) })
          return logits:select(1, -1):argmax(-1):item()
        end)
        if next_token >= marks.mask and next_token ~= marks.eop then next_token = marks.eop end -- no mark is text
      end
      pieces[#pieces + 1] = piece
      local filled = table.move(piece, 1, #piece, at, table.move(ids, 1, at - 1, 1, {}))
      ids = table.move(ids, at + 1, #ids, #filled + 1, filled)
      at = at + #piece
    end
  end
  return ids, pieces
end

return M
