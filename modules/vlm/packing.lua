--- Several sequences in one row of tokens, none of which sees another, with positions that count as if each were alone:
-- what is computed for all of them is computed once, and nothing is spent on padding. Krell et al. 2021, "Efficient
-- Sequence Packing without Cross-contamination".
--
-- There are two ways. Turns about one picture share their beginning, the picture's tokens: packing.turns(). Samples
-- that share nothing lie one after the other in rows of a fixed length: packing.fit() and packing.samples().
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
-- has room for it (Johnson 1973). Returns a list of rows, each the positions of its sequences in `lengths`, from 1.
---@param lengths integer[]
---@param room integer
---@return integer[][]
function M.fit(lengths, room)
  local who = "vlm.packing.fit"
  arguments.expect(who, "lengths", lengths, "a list of integers")
  arguments.expect(who, "room", room, "an integer > 0")
  local order, rows, left = {}, {}, {}
  for i, length in ipairs(lengths) do
    if length > room then
      arguments.fail("%s: lengths: expected at most the %d tokens of a row, got %d as number %d", who, room, length, i)
    end
    order[i] = i
  end
  table.sort(order, function(a, b)
    if lengths[a] ~= lengths[b] then return lengths[a] > lengths[b] end
    return a < b
  end)
  for _, i in ipairs(order) do
    local r = 1
    while left[r] and left[r] < lengths[i] do r = r + 1 end
    rows[r], left[r] = rows[r] or {}, (left[r] or room) - lengths[i]
    table.insert(rows[r], i)
  end
  return rows
end

--- Sequences { ids, learnt } one after the other in one row, as models take packed ones: tokens and targets i64 [1, n],
-- and options { cu_seqlens, longest } of forward(). With room the row is filled up to so many tokens by a sequence of
-- `fill` of its own, from which nothing is learnt.
---@param sequences table[]
---@param room? integer
---@param fill? integer  (0)
---@return table { tokens, targets, options }
function M.samples(sequences, room, fill)
  local who = "vlm.packing.samples"
  arguments.expect(who, "sequences", sequences, "a list of tables")
  local ids, targets, begins, longest = {}, {}, { 0 }, 1
  for i, one in ipairs(sequences) do
    sequence(who, ("sequence %d"):format(i), one)
    for j, id in ipairs(one.ids) do
      ids[#ids + 1] = id
      targets[#targets + 1] = one.learnt[j + 1] and one.ids[j + 1] or IGNORED
    end
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
  return { tokens = matrix { ids }, targets = matrix { targets },
    options = { cu_seqlens = ty.tensor(begins, { dtype = "i64" }), longest = longest } }
end

return M
