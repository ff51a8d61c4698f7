--- Token files and the batches that language models are trained on.
--
-- A token file is a safetensors file, which is mapped and not read: `tokens` [n] (u8, i16 or i32), the documents one
-- after the other, and `starts` i64 [documents + 1], where each begins and the last ends. Rows of a fixed number of
-- tokens are cut from it wherever they fall. A batch packs its rows into one sequence of tokens [1, n]: a row, and each
-- document within it, attends to itself alone, its positions count from 0, and no token is predicted from another
-- document (Krell et al. 2021, "Efficient Sequence Packing without Cross-contamination").
local ty = require "tycho"

local arguments = require "tycho.arguments"
local expect, fail = arguments.expect, arguments.fail
local M = {}

local function smallest_dtype(largest)
  return largest < 1 << 8 and "u8" or largest < 1 << 15 and "i16" or "i32"
end

--- Joins documents: a list of i64 tensors or lists of ids. Returns what a token file holds.
---@param documents (Tensor|integer[])[]
---@return {tokens: Tensor, starts: Tensor}
function M.join(documents)
  local parts, starts, total = {}, { 0 }, 0
  expect("llm.data.join", "documents", documents, "a list")
  for i, document in ipairs(documents) do
    if not ty.is_tensor(document) then
      expect("llm.data.join", ("document %d"):format(i), document, "a tensor or a list of integers")
    end
    local ids = ty.is_tensor(document) and document or ty.tensor(document, { dtype = "i64" })
    if ids.ndim ~= 1 or ids.dtype ~= "i64" then
      fail("llm.data: document %d must be a list of ids or an i64 tensor [n], got %s %dd", i, ids.dtype, ids.ndim)
    end
    total = total + ids:numel()
    parts[i], starts[i + 1] = ids, total
  end
  if total == 0 then fail "llm.data: there are no tokens" end
  local tokens = ty.concat(parts, 0)
  if tokens:min():item() < 0 then fail "llm.data: a token is below 0" end
  return { tokens = tokens:to(smallest_dtype(tokens:max():item())), starts = ty.tensor(starts, { dtype = "i64" }) }
end

--- Writes a token file.
---@param path string
---@param documents (Tensor|integer[])[]
function M.write(path, documents)
  expect("llm.data.write", "path", path, "a string")
  ty.io.save_safetensors(path, M.join(documents))
end

-- What comes from a file is checked once: every document lies within the tokens, behind the one before.
local function check(source, name)
  local tokens, starts = source.tokens, source.starts
  local kinds = { u8 = true, i16 = true, i32 = true, i64 = true }
  if not ty.is_tensor(tokens) or tokens.ndim ~= 1 or not kinds[tokens.dtype] or tokens:numel() == 0 then
    error(("llm.data: %s: 'tokens' must be integers [n], n at least 1"):format(name), 3)
  end
  if not ty.is_tensor(starts) or starts.ndim ~= 1 or starts.dtype ~= "i64" or starts:numel() < 2 then
    error(("llm.data: %s: 'starts' must be i64 [documents + 1]"):format(name), 3)
  end
  local count = starts:numel() - 1
  local steps = starts:narrow(0, 1, count) - starts:narrow(0, 0, count)
  if starts:select(0, 0):item() ~= 0 or starts:select(0, count):item() ~= tokens:numel() or steps:min():item() < 0 then
    error(("llm.data: %s: 'starts' must rise from 0 to %d"):format(name, tokens:numel()), 3)
  end
end

--- Token files packed into rows of one length, as a data set.
---@class PackedDataset
---@field tokens Tensor
---@field starts Tensor
local Packed = ty.data.class()

--- Rows of `length` tokens of a token file (its path, or what join() returned), for ty.data.DataLoader. options:
--   length   tokens of a row (256)
--   overlap  0: how many tokens of a row are there only to be seen: the row before has predicted from them
--   jitter   false: with true a row begins up to a row later, by the loader's random numbers, so that epochs differ
-- Without jitter every token is predicted from exactly once, but for the last of a document, which nothing follows.
-- A batch has tokens and targets i64 [1, n] (-100: not counted), cu_seqlens i64 [sequences + 1], count (targets that
-- count) and longest; model:loss() takes them as they are.
---@param source string|{tokens: Tensor, starts: Tensor}
---@param options? {length?: integer, overlap?: integer, jitter?: boolean}
---@return PackedDataset
function M.Packed(source, options)
  local o = ty.nn.options("llm.data.Packed", options, { length = 256, overlap = 0, jitter = false })
  expect("llm.data.Packed", "source", source, "a string or a table")
  local name = type(source) == "string" and source or "source"
  if type(source) == "string" then source = ty.io.load_safetensors(source) end
  check(source, name)
  if not math.tointeger(o.length) or o.length < 1 or not math.tointeger(o.overlap) or o.overlap < 0
    or o.overlap >= o.length then
    error(("llm.data.Packed: expected integers with 0 <= overlap < length, got length %s and overlap %s"):format(
      tostring(o.length), tostring(o.overlap)), 2)
  end
  o.tokens, o.starts = ty.keep(source.tokens), ty.keep(source.starts)
  o.stride, o.total = o.length - o.overlap, source.tokens:numel()
  o.size = (o.total + o.stride - 1) // o.stride
  return setmetatable(o, Packed)
end

-- The number of the first document that begins behind position `at`.
function Packed:_document_after(at)
  local low, high = 0, self.starts:numel() - 1
  while low < high do
    local middle = (low + high) // 2
    if self.starts:select(0, middle):item() > at then high = middle else low = middle + 1 end
  end
  return low
end

-- Begins of documents between `from` and `to`, `to` included.
function Packed:_begins(from, to)
  local list, i, last = {}, self:_document_after(from), nil
  local count = self.starts:numel()
  while i < count do
    local at = self.starts:select(0, i):item()
    if at > to then break end
    if at ~= last then list[#list + 1] = at end -- empty documents begin where the next one does
    i, last = i + 1, at
  end
  return list
end

--- Rows by number (i64 tensor), packed.
function Packed:batch(positions)
  local rows, targets, cu, n = {}, {}, { 0 }, 0
  local shifts = self.jitter and ty.randint(0, self.stride, { positions:numel() }):tolist()
  for i, position in ipairs(positions:tolist()) do
    local first = position * self.stride -- the first token that is predicted from
    if shifts then first = math.min(first + shifts[i], math.max(0, self.total - self.stride)) end
    local from, to = math.max(0, first - self.overlap), math.min(self.total, first + self.stride)
    local row = self.tokens:narrow(0, from, to - from):to "i64"
    local target = ty.full({ to - from }, -100, { dtype = "i64" })
    local rest = math.min(to + 1, self.total) - (first + 1)
    if rest > 0 then
      target:narrow(0, first - from, rest):copy_(self.tokens:narrow(0, first + 1, rest))
    end
    for _, begin in ipairs(self:_begins(from, to)) do
      target:narrow(0, begin - 1 - from, 1):fill_(-100)
      if begin < to then cu[#cu + 1] = n + begin - from end
    end
    n = n + to - from
    rows[i], targets[i], cu[#cu + 1] = row, target, n
  end
  local all = ty.concat(targets, 0):unsqueeze(0)
  return { tokens = ty.concat(rows, 0):unsqueeze(0), targets = all, cu_seqlens = ty.tensor(cu, { dtype = "i64" }),
    count = all:ne(-100):to("i64"):sum():item(), longest = self.length }
end

--- One row, packed as a batch of one.
function Packed:get(i) return self:batch(ty.tensor({ i }, { dtype = "i64" })) end

return M
