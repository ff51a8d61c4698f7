--- Several sequences in one row of tokens, none of which sees another, with positions that count as if each were alone:
-- what is computed for all of them is computed once, and nothing is spent on padding. Krell et al. 2021, "Efficient
-- Sequence Packing without Cross-contamination".
--
-- There are two ways. Turns about one picture share their beginning, the picture's tokens: packing.turns(). Samples
-- that share nothing lie one after the other in rows of a fixed length: packing.fit() and packing.samples(), and
-- packing.loader(), which trains on them.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local M = {}

local IGNORED = -100

local function sequence(who, what, x)
  if type(x) ~= "table" or type(x.ids) ~= "table" or type(x.learnt) ~= "table" or #x.ids ~= #x.learnt then
    arguments.fail("%s: %s: expected { ids = list, learnt = list as long }, got %s", who, what, arguments.describe(x))
  end
end

-- Lists of one length as an i64 tensor [n, t].
local function matrix(rows) return ty.tensor(rows, { dtype = "i64" }) end

--- Which tokens see which, bool [n, t, t], by the number of the turn that each is of, i64 [n, t]: a token sees its own
-- turn and turn 0, which all share. That none sees what comes after it is left to attention.
---@param turn Tensor
---@return Tensor
function M.visible(turn)
  if not ty.is_tensor(turn) or turn.ndim ~= 2 then
    arguments.fail("vlm.packing.visible: turn: expected an i64 tensor [n, t], got %s", arguments.describe(turn))
  end
  local of_key = turn:unsqueeze(1)
  return turn:unsqueeze(2):eq(of_key):logical_or(of_key:eq(0))
end

--- Rows of turns that share a beginning. rows: a list of { shared = list of ids, turns = list of { ids, learnt } },
-- where learnt says for each id whether it is to be predicted; the first id of a turn never is, since what comes before
-- it is not one token. fill: the id that shorter rows end with. Returns a table with
--   tokens     i64 [n, t]
--   targets    i64 [n, t]: the token that follows, within a turn and where it is learnt; -100 elsewhere
--   options    of a model's forward(): mask, bool [n, t, t], and positions, i64 [n, t]: each turn's go on from the
--              shared beginning
--   turn       i64 [n, t]: 0 the shared beginning, k the k-th turn, -1 what fills a row up
--   at, wanted  i64 [learnt]: places of targets in the flattened tokens, and these targets
---@param rows table[]
---@param fill integer
---@return table
function M.turns(rows, fill)
  local who = "vlm.packing.turns"
  arguments.expect(who, "rows", rows, "a list of tables")
  arguments.expect(who, "fill", fill, "an integer >= 0")
  local longest = 0
  for i, row in ipairs(rows) do
    local length = type(row.shared) == "table" and #row.shared
      or arguments.fail("%s: row %d: expected { shared = list, turns = list }, got %s", who, i, arguments.describe(row))
    for k, turn in ipairs(row.turns or {}) do
      sequence(who, ("turn %d of row %d"):format(k, i), turn)
      length = length + #turn.ids
    end
    longest = math.max(longest, length)
  end
  if longest == 0 then arguments.fail("%s: rows: expected at least one token, got none", who) end
  local tokens, targets, positions, numbers, at, wanted = {}, {}, {}, {}, {}, {}
  for i, row in ipairs(rows) do
    local ids, follows, places, turn_of, first = {}, {}, {}, {}, #row.shared
    for k, id in ipairs(row.shared) do ids[k], follows[k], places[k], turn_of[k] = id, IGNORED, k - 1, 0 end
    local n = first
    for k, turn in ipairs(row.turns) do
      for j, id in ipairs(turn.ids) do
        n = n + 1
        ids[n], places[n], turn_of[n] = id, first + j - 1, k
        follows[n] = turn.learnt[j + 1] and turn.ids[j + 1] or IGNORED
        if follows[n] ~= IGNORED then
          at[#at + 1], wanted[#wanted + 1] = (i - 1) * longest + n - 1, follows[n]
        end
      end
    end
    for k = n + 1, longest do ids[k], follows[k], places[k], turn_of[k] = fill, IGNORED, 0, -1 end
    tokens[i], targets[i], positions[i], numbers[i] = ids, follows, places, turn_of
  end
  local turn = matrix(numbers)
  return { tokens = matrix(tokens), targets = matrix(targets), turn = turn, at = ty.tensor(at, { dtype = "i64" }),
    wanted = ty.tensor(wanted, { dtype = "i64" }), options = { mask = M.visible(turn), positions = matrix(positions) } }
end

--- Which sequences share a row of `room` tokens: first-fit decreasing, the longest first, each into the first row that
-- has room for it (Johnson 1973). decreasing (true); false: in their order, which wastes a little more, and leaves rows
-- with long and short sequences where first-fit decreasing makes rows of equally long ones. Returns a list of rows,
-- each the positions of its sequences in `lengths`, from 1.
---@param lengths integer[]
---@param room integer
---@param decreasing? boolean
---@return integer[][]
function M.fit(lengths, room, decreasing)
  local who = "vlm.packing.fit"
  arguments.expect(who, "lengths", lengths, "a list of integers")
  arguments.expect(who, "room", room, "an integer > 0")
  arguments.expect(who, "decreasing", decreasing, "a boolean or nil")
  local order, rows, left = {}, {}, {}
  for i, length in ipairs(lengths) do
    if length > room then
      arguments.fail("%s: lengths: expected at most the %d tokens of a row, got %d as number %d", who, room, length, i)
    end
    order[i] = i
  end
  if decreasing ~= false then
    table.sort(order, function(a, b)
      if lengths[a] ~= lengths[b] then return lengths[a] > lengths[b] end
      return a < b
    end)
  end
  for _, i in ipairs(order) do
    local r = 1
    while left[r] and left[r] < lengths[i] do r = r + 1 end
    rows[r], left[r] = rows[r] or {}, (left[r] or room) - lengths[i]
    table.insert(rows[r], i)
  end
  return rows
end

-- Adds to a row of targets those of a sequence, and to `at` and `wanted` their places, from 0, behind `before` tokens,
-- and what they are.
local function add_targets(one, targets, at, wanted, before)
  for j = 1, #one.ids do
    local target = one.learnt[j + 1] and one.ids[j + 1] or IGNORED
    targets[#targets + 1] = target
    if target ~= IGNORED then at[#at + 1], wanted[#wanted + 1] = before + j - 1, target end
  end
end

--- Sequences { ids, learnt } one after the other in one row, as models take packed ones: tokens and targets i64 [1, n],
-- options { cu_seqlens, longest } of forward(), and at and wanted as turns() has them. With room the row is filled up
-- to so many tokens by a sequence of `fill` of its own, from which nothing is learnt.
---@param sequences table[]
---@param room? integer
---@param fill? integer  (0)
---@return table { tokens, targets, at, wanted, options }
function M.samples(sequences, room, fill)
  local who = "vlm.packing.samples"
  arguments.expect(who, "sequences", sequences, "a list of tables")
  local ids, targets, at, wanted, begins, longest = {}, {}, {}, {}, { 0 }, 1
  for i, one in ipairs(sequences) do
    sequence(who, ("sequence %d"):format(i), one)
    add_targets(one, targets, at, wanted, #ids)
    table.move(one.ids, 1, #one.ids, #ids + 1, ids)
    begins[#begins + 1], longest = #ids, math.max(longest, #one.ids)
  end
  if #ids == 0 then arguments.fail("%s: sequences: expected at least one token, got none", who) end
  if room then
    arguments.expect(who, "room", room, "an integer > 0")
    if #ids > room then
      arguments.fail("%s: room: expected at least the %d tokens of the sequences, got %d", who, #ids, room)
    end
    local rest = room - #ids
    for _ = 1, rest do ids[#ids + 1], targets[#targets + 1] = fill or 0, IGNORED end
    if rest > 0 then begins[#begins + 1], longest = #ids, math.max(longest, rest) end
  end
  return { tokens = matrix { ids }, targets = matrix { targets }, at = ty.tensor(at, { dtype = "i64" }),
    wanted = ty.tensor(wanted, { dtype = "i64" }),
    options = { cu_seqlens = ty.tensor(begins, { dtype = "i64" }), longest = longest } }
end

--- Sequences { ids, learnt } in a row each, all as long as the longest, filled up with `fill`: what packing is compared
-- with. tokens and targets i64 [n, t]; at and wanted as turns() has them; options is empty, since what fills a row up
-- comes behind what is learnt.
---@param sequences table[]
---@param fill? integer  (0)
---@return table { tokens, targets, at, wanted, options }
function M.padded(sequences, fill)
  local who = "vlm.packing.padded"
  arguments.expect(who, "sequences", sequences, "a list of tables")
  local longest, rows, followers, at, wanted = 0, {}, {}, {}, {}
  for i, one in ipairs(sequences) do
    sequence(who, ("sequence %d"):format(i), one)
    longest = math.max(longest, #one.ids)
  end
  if longest == 0 then arguments.fail("%s: sequences: expected at least one token, got none", who) end
  for i, one in ipairs(sequences) do
    local targets = {}
    add_targets(one, targets, at, wanted, (i - 1) * longest)
    rows[i] = table.move(one.ids, 1, #one.ids, 1, {})
    for k = #one.ids + 1, longest do rows[i][k], targets[k] = fill or 0, IGNORED end
    followers[i] = targets
  end
  return { tokens = matrix(rows), targets = matrix(followers), at = ty.tensor(at, { dtype = "i64" }),
    wanted = ty.tensor(wanted, { dtype = "i64" }), options = {} }
end

-- ---- batches for training ----

--- Sequences in batches without end, in another order in every round: rows of a fixed length packed by first-fit
-- decreasing, or padded batches of so many.
---@class PackedLoader
---@field used integer      tokens of sequences that were given so far
---@field computed integer  tokens of rows, with what fills them up
local Loader = {}
Loader.__index = Loader

-- The next sequence, by its position from 1; after the last of a round all are shuffled.
local function draw(self)
  if self.place >= #self.order then self.order, self.place = ty.randperm(#self.sequences):tolist(), 0 end
  self.place = self.place + 1
  return self.order[self.place] + 1
end

-- Packs as many sequences as fill `ahead` rows. The row that was opened last is the one with room left: its sequences
-- wait for the next time.
local function pack_more(self)
  local chosen, lengths, sum = self.waiting, {}, 0
  for k, i in ipairs(chosen) do
    lengths[k] = #self.sequences[i].ids
    sum = sum + lengths[k]
  end
  while sum < self.ahead * self.room do
    local i = draw(self)
    chosen[#chosen + 1], lengths[#lengths + 1] = i, #self.sequences[i].ids
    sum = sum + lengths[#lengths]
  end
  local packed, rows = M.fit(lengths, self.room, self.decreasing), {}
  for r, row in ipairs(packed) do
    rows[r] = {}
    for k, place in ipairs(row) do rows[r][k] = chosen[place] end
  end
  self.waiting = #rows > 1 and table.remove(rows) or {}
  for k, place in ipairs(ty.randperm(#rows):tolist()) do self.rows[k] = rows[place + 1] end
end

--- The next batch: as samples() or padded() give it, with `sequences`, positions i64 [k] of its sequences, from 0.
---@return table batch
function Loader:next()
  local places = {}
  if self.room then
    if #self.rows == 0 then pack_more(self) end
    places = table.remove(self.rows)
  else
    for k = 1, self.size do places[k] = draw(self) end
  end
  local list, numbers = {}, {}
  for k, i in ipairs(places) do
    list[k], numbers[k] = self.sequences[i], i - 1
    self.used = self.used + #list[k].ids
  end
  local batch = self.room and M.samples(list, self.room, self.filler) or M.padded(list, self.filler)
  self.computed = self.computed + batch.tokens:numel()
  batch.sequences = ty.tensor(numbers, { dtype = "i64" })
  return batch
end

--- The share of the tokens computed so far that fills rows up.
---@return number
function Loader:padding() return self.computed > 0 and 1 - self.used / self.computed or 0 end

-- What a token is, as a colour: of what is given (pictures, questions), of what is learnt, of what fills a row up.
local colours = { given = { 60, 110, 190 }, learnt = { 240, 190, 60 }, filled = { 200, 50, 50 },
  none = { 255, 255, 255 } }

--- The next batches as a picture u8 [3, height, width]: a bar each, a column of pixels for each token that is computed,
-- blue where it is given, yellow where it is learnt and red where it fills a row up. Bars are as wide as the longest of
-- them, or as `width`; a black line stands before each sequence.
---@param count integer
---@param options? { bar?: integer, gap?: integer, width?: integer }  pixels (10, 3)
---@return Tensor
function Loader:drawn(count, options)
  local who = "PackedLoader:drawn"
  arguments.expect(who, "count", count, "an integer > 0")
  local o = arguments.read(who, options, { bar = 10, gap = 3, width = arguments.none }, { bar = "an integer > 0",
    gap = "an integer >= 0", width = "an integer > 0" })
  local bars, longest = {}, o.width or 0
  for b = 1, count do
    local batch, bar = self:next(), {}
    for _, i in ipairs(batch.sequences:tolist()) do
      local one, first = self.sequences[i + 1], #bar
      for j, learnt in ipairs(one.learnt) do bar[first + j] = learnt and colours.learnt or colours.given end
      bar[first + 1] = { 0, 0, 0 }
      if not self.room then
        for k = #one.ids + 1, batch.tokens.shape[2] do bar[first + k] = colours.filled end
      end
    end
    for k = #bar + 1, batch.tokens:numel() do bar[k] = colours.filled end
    bars[b], longest = bar, math.max(longest, #bar)
  end
  local rows = {}
  for b, bar in ipairs(bars) do
    for k = #bar + 1, longest do bar[k] = colours.none end
    local row = ty.tensor(bar, { dtype = "u8" }):transpose(0, 1):unsqueeze(1)
    rows[2 * b - 1] = row:expand(3, o.bar, longest)
    rows[2 * b] = ty.full({ 3, o.gap, longest }, 255, { dtype = "u8" })
  end
  return ty.concat(rows, 1)
end

--- Sequences { ids, learnt } as a loader of ty.train.fit. options: room (tokens of a packed row) or batch (sequences
-- of a padded batch), fill (0: the id that rows end with), ahead (8: rows that are packed at a time), decreasing (true:
-- the longest first; false: as they are drawn, so that a step on one row sees short and long ones alike). What is drawn
-- follows ty.manual_seed.
---@param sequences table[]
---@param options { room?: integer, batch?: integer, fill?: integer, ahead?: integer, decreasing?: boolean }
---@return PackedLoader
function M.loader(sequences, options)
  local who = "vlm.packing.loader"
  arguments.expect(who, "sequences", sequences, "a list of tables")
  local o = arguments.read(who, options, { room = arguments.none, batch = arguments.none, fill = 0, ahead = 8,
    decreasing = true }, { room = "an integer > 0", batch = "an integer > 0", fill = "an integer >= 0",
    ahead = "an integer > 0" })
  if (o.room == nil) == (o.batch == nil) then
    arguments.fail("%s: expected one of the options room and batch, got %s", who, o.room and "both" or "none")
  end
  if #sequences == 0 then arguments.fail("%s: sequences: expected at least one, got none", who) end
  for i, one in ipairs(sequences) do
    sequence(who, ("sequence %d"):format(i), one)
    if #one.ids == 0 or o.room and #one.ids > o.room then
      arguments.fail("%s: sequence %d: expected between 1 and %s tokens, got %d", who, i, tostring(o.room or "more"),
        #one.ids)
    end
  end
  return setmetatable({ sequences = sequences, room = o.room, size = o.batch, filler = o.fill, ahead = o.ahead,
    decreasing = o.decreasing, order = {}, place = 0, rows = {}, waiting = {}, used = 0, computed = 0 }, Loader)
end

return M
