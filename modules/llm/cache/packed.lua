--- A cache for steps in which many sequences go on at once, each by as many tokens as it likes, packed one after
-- another without padding: some begin with a part of their prompts while others decode a token. Keys and values lie in
-- the pages of a pool, and attention reads them there. Kwon et al. 2023, "Efficient Memory Management for Large
-- Language Model Serving with PagedAttention"; Yu et al. 2022, "Orca: A Distributed Serving System for
-- Transformer-Based Generative Models".
local ty = require "tycho"
local arguments = require "tycho.arguments"
local Pool = require "tycho.llm.cache.pool"

--- One sequence: how many tokens of it are there, and in which pages.
---@class PackedSequence
---@field length integer
---@field pages integer[]

---@class PackedCache
---@field layers integer
---@field pool PagePool
---@field placed? fun(layer: integer)  is called when a layer holds the tokens of this call, before it attends to them
local PackedCache = {}
PackedCache.__index = PackedCache

--- A cache of the interface of tycho.models.cache, for models whose attention asks it. options: page (tokens in a page,
-- 16), pool (a PagePool; without it one is made), and most (pages) and dtype of the one that is made.
---@param layers integer
---@param options? table
---@return PackedCache
function PackedCache.new(layers, options)
  arguments.expect("PackedCache", "layers", layers, "an integer in [0, 65536]")
  local o = arguments.read("PackedCache", options,
    { page = 16, pool = ty.nn.none, most = ty.nn.none, dtype = ty.nn.none },
    { page = "an integer >= 1", pool = "a table", most = "an integer >= 1", dtype = "a string" })
  local pool = o.pool or Pool.new(layers, o.page, { most = o.most, dtype = o.dtype })
  return setmetatable({ layers = layers, pool = pool, past = 0 }, PackedCache)
end

--- A sequence without tokens. pages: those that it begins with, shared with others and full.
---@param pages? integer[]
---@return PackedSequence
function PackedCache:sequence(pages)
  local own = {}
  for i, page in ipairs(pages or {}) do
    self.pool:share(page)
    own[i] = page
  end
  return { length = #own * self.pool.page, pages = own }
end

--- Gives back the pages of a sequence, which then has no tokens.
---@param sequence PackedSequence
function PackedCache:release(sequence)
  for _, page in ipairs(sequence.pages) do self.pool:release(page) end
  sequence.length, sequence.pages = 0, {}
end

--- Takes the pages that `count` tokens more of a sequence need; false, and nothing taken, where the pool lacks them.
---@param sequence PackedSequence
---@param count integer
---@return boolean
function PackedCache:reserve(sequence, count)
  local pool, pages = self.pool, sequence.pages
  local needed = (sequence.length + count + pool.page - 1) // pool.page - #pages
  if needed > pool:room() then return false end
  for _ = 1, needed do pages[#pages + 1] = pool:take() end
  return true
end

-- The rows of a pool that hold the tokens [first, first + count) of a sequence.
local function rows_of(page, sequence, first, count, device)
  local slots = {}
  for i = 1, count do
    local position = first + i - 1
    slots[i] = sequence.pages[position // page + 1] * page + position % page
  end
  return ty.tensor(slots, { dtype = "i64", device = device })
end

-- Raises unless a sequence has pages for the tokens [first, first + count).
local function check_range(self, who, sequence, layer, first, count)
  arguments.expect(who, "sequence", sequence, "a table")
  arguments.expect(who, "layer", layer, ("an integer in [1, %d]"):format(self.layers))
  arguments.expect(who, "first", first, "an integer >= 0")
  arguments.expect(who, "count", count, "an integer >= 1")
  if first + count > #sequence.pages * self.pool.page then
    arguments.fail("%s: count: expected at most %d tokens from %d on, as the sequence has %d pages of %d, got %d", who,
      #sequence.pages * self.pool.page - first, first, #sequence.pages, self.pool.page, count)
  end
end

--- What one layer (counted from 1) holds of the tokens [first, first + count) of a sequence, for another pool: keys and
-- values [2, count, hkv * d]. Patel et al. 2023, "Splitwise: Efficient generative LLM inference using phase splitting".
---@param sequence PackedSequence
---@param layer integer
---@param first integer  counted from 0
---@param count integer
---@return Tensor
function PackedCache:export(sequence, layer, first, count)
  check_range(self, "PackedCache:export", sequence, layer, first, count)
  local at = self.pool[layer]
  if not at.k then arguments.fail("PackedCache:export: layer: expected one that holds tokens, got %d", layer) end
  local rows = rows_of(self.pool.page, sequence, first, count, at.k.device)
  return ty.stack({ at.k:index_select(0, rows), at.v:index_select(0, rows) }, 0)
end

--- Puts what export() gave of one layer into the pages that a sequence has reserved for these tokens. They count once
-- extend() says that all layers are there.
---@param sequence PackedSequence
---@param layer integer
---@param first integer
---@param x Tensor  [2, count, hkv * d]
---@param device? string  of the pages, where there are none yet (that of x)
function PackedCache:import(sequence, layer, first, x, device)
  local who = "PackedCache:import"
  if not ty.is_tensor(x) or x.ndim ~= 3 or x.shape[1] ~= 2 then
    arguments.fail("%s: x: expected keys and values [2, count, width], got %s", who, arguments.describe(x))
  end
  check_range(self, who, sequence, layer, first, x.shape[2])
  local there = self.pool[layer].k
  if there and there.shape[2] ~= x.shape[3] then
    arguments.fail("%s: x: expected rows of %d numbers as the pool has them, got %s", who, there.shape[2],
      arguments.describe(x))
  end
  x = x:to(device or there and there.device or x.device)
  local places = rows_of(self.pool.page, sequence, first, x.shape[2], x.device)
  for i, name in ipairs { "k", "v" } do
    local part = x:select(0, i - 1)
    local rows = self.pool:rows(layer, name, part:unsqueeze(0):unsqueeze(0))
    rows:index_put_({ places }, part:to(rows.dtype))
  end
end

--- Counts `count` tokens more, which import() has put into all layers.
---@param sequence PackedSequence
---@param count integer
function PackedCache:extend(sequence, count)
  check_range(self, "PackedCache:extend", sequence, 1, sequence and sequence.length or 0, count)
  sequence.length = sequence.length + count
end

--- Says what the next call of the model is about: of each sequence in turn, counts[i] tokens, for which there are
-- pages.
---@param sequences PackedSequence[]
---@param counts integer[]
---@param device? string
function PackedCache:begin(sequences, counts, device)
  local page = self.pool.page
  local most, at, longest = 1, 0, 0
  for _, s in ipairs(sequences) do most = math.max(most, #s.pages) end
  local lists, begins, lengths, slots, positions = {}, { 0 }, {}, {}, {}
  for i, s in ipairs(sequences) do
    local list = table.move(s.pages, 1, #s.pages, 1, {})
    for j = #list + 1, most do list[j] = 0 end
    for position = s.length, s.length + counts[i] - 1 do
      at = at + 1
      slots[at], positions[at] = s.pages[position // page + 1] * page + position % page, position
    end
    lists[i], begins[i + 1], lengths[i] = list, at, s.length + counts[i]
    longest = math.max(longest, lengths[i])
  end
  local i64 = { dtype = "i64", device = device }
  self.lists, self.begins, self.lengths = ty.tensor(lists, i64), ty.tensor(begins, i64), ty.tensor(lengths, i64)
  self.slots, self.positions = ty.tensor(slots, i64), ty.tensor({ positions }, i64)
  self.sequences, self.counts, self.past, self.count = sequences, counts, longest, at
end

--- See tycho.models.cache: the positions of the tokens [1, n] that begin() spoke of.
function PackedCache:see(tokens, mask)
  local shape = tokens.shape
  if mask then error("PackedCache: a mask does not go with packed sequences", 0) end
  if shape[1] ~= 1 or shape[2] ~= self.count then
    error(("PackedCache: expected the %s tokens [1, n] that begin() was told of, got [%s]"):format(
      tostring(self.count), table.concat(shape, ", ")), 0)
  end
  return nil, self.positions
end

--- Attention of the queries q [1, h, n, d] of one layer (counted from 1) to what it holds of their sequences and to the
-- keys and values k, v [1, hkv, n, d] of the same tokens, which it then holds as well.
---@return Tensor y  [1, h, n, d]
function PackedCache:attend(layer, q, k, v, scale, window, softcap)
  local heads = k.shape[2]
  local function put(name, x)
    local rows = self.pool:rows(layer, name, x)
    rows:index_put_({ self.slots }, x:squeeze(0):transpose(0, 1):flatten(1):to(rows.dtype))
    return rows:reshape(rows.shape[1], heads, -1)
  end
  local keys, values = put("k", k), put("v", v)
  if self.placed then self.placed(layer) end
  local y = ty.paged_attention(q:squeeze(0):transpose(0, 1), keys, values, self.lists, self.begins, self.lengths,
    self.pool.page, scale or 0, window or -1, softcap or 0)
  return y:transpose(0, 1):unsqueeze(0)
end

--- Only models that ask the cache for their attention can use it.
function PackedCache.append()
  error("PackedCache: the attention of this model does not take packed sequences", 0)
end

--- See tycho.models.cache: the tokens of this call are there now.
function PackedCache:advance()
  for i, s in ipairs(self.sequences) do s.length = s.length + self.counts[i] end
  self.sequences, self.counts, self.count = {}, {}, nil
end

--- Bytes of the pages.
function PackedCache:bytes() return self.pool:bytes() end

return PackedCache
