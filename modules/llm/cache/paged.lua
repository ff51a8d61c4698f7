--- A cache in pages: keys and values of many sequences in one pool, in pages of a few tokens. Padding takes no room,
-- rows may share what they have in common, and sequences come and go without moving the others. Kwon et al. 2023,
-- "Efficient Memory Management for Large Language Model Serving with PagedAttention". A step copies the keys and values
-- of its rows together for the attention; results are those of the contiguous cache.
local ty = require "tycho"
local Pool = require "tycho.llm.cache.pool"

--- Keys and values in pages of a pool, which sequences with the same beginning share.
---@class PagedCache
---@field past integer  positions of the longest row
local PagedCache = {}
PagedCache.__index = PagedCache

--- A cache with the interface of tycho.models.cache. options: page (tokens in a page, 16), room (tokens that the pool
-- begins with; it grows), pool (of another cache of the same model, to share).
---@param layers integer
---@param options? table
---@return PagedCache
function PagedCache.new(layers, options)
  local o = ty.nn.options("PagedCache", options, { page = 16, room = 256, pool = ty.nn.none })
  if not math.tointeger(o.page) or o.page < 1 then
    error(("PagedCache: page must be a positive integer, got %s"):format(tostring(o.page)), 2)
  end
  local pool = o.pool or Pool.new(layers, o.page, { pages = math.max(1, math.ceil(o.room / o.page)) })
  -- tables: the pages of each row; lengths: its tokens; slots [b, past]: the row of the pool of each position, the
  -- positions of shorter rows at the end, and masked (seen) before.
  return setmetatable({ past = 0, layers = layers, pool = pool, tables = {}, lengths = {} }, PagedCache)
end

-- The slot of the next token of a row.
function PagedCache:next_slot(row)
  local pool, pages, length = self.pool, self.tables[row], self.lengths[row]
  local index, place = length // pool.page + 1, length % pool.page
  if not pages[index] then
    pages[index] = pool:take()
  elseif pool.references[pages[index]] > 1 then
    local old = pages[index]
    local new = pool:copy(old)
    pages[index] = new
    local slots = self.slots:select(0, row - 1) -- what it had there is now in the copy
    slots:copy_(ty.where(slots:floor_div(pool.page):eq(old), slots + (new - old) * pool.page, slots))
  end
  self.lengths[row] = length + 1
  return pages[index] * pool.page + place
end

--- See tycho.models.cache. Gives every token that is no padding its slot.
function PagedCache:see(tokens, mask)
  local shape = tokens.shape
  local b, t = shape[1], shape[2]
  if self.past == 0 and #self.tables == 0 then
    for row = 1, b do self.tables[row], self.lengths[row] = {}, 0 end
  end
  if #self.tables ~= b then error(("PagedCache: %d rows of tokens for %d of the cache"):format(b, #self.tables), 3) end
  local seen, slots, runs = mask and mask:to("u8"):tolist(), {}, {}
  for row = 1, b do
    slots[row] = {}
    for i = 1, t do
      local slot = (not seen or seen[row][i] ~= 0) and self:next_slot(row)
      slots[row][i] = slot or 0
      local run = runs[#runs]
      if slot and run and run.row == row and run.slot + run.count == slot and run.from + run.count == i - 1 then
        run.count = run.count + 1
      elseif slot then
        runs[#runs + 1] = { row = row, from = i - 1, slot = slot, count = 1 }
      end
    end
  end
  self.runs = runs
  local new = ty.tensor(slots, { dtype = "i64", device = tokens.device })
  self.slots = ty.unscoped(function() return self.slots and ty.concat({ self.slots, new }, 1) or new:clone() end)
  if not mask and not self.seen then return nil, nil end
  local full = { dtype = "bool", device = tokens.device }
  mask = mask and mask:to "bool" or ty.ones({ b, t }, full)
  local before = self.seen or ty.ones({ b, self.past }, full)
  self.seen = ty.unscoped(ty.concat, { before, mask }, 1)
  return self.seen, (self.seen:to("i64"):cumsum(1):narrow(1, self.past, t) - 1):clamp(0)
end

--- See tycho.models.cache.
function PagedCache:append(layer, k, v)
  local shape = k.shape
  local heads = shape[2]
  local function one(name, x)
    local rows, wide = self.pool:rows(layer, name, x), x:transpose(1, 2):flatten(2)
    for _, run in ipairs(self.runs) do
      rows:narrow(0, run.slot, run.count):copy_(wide:select(0, run.row - 1):narrow(0, run.from, run.count))
    end
    local all = ty.embedding(rows, self.slots)
    return all:reshape(shape[1], all.shape[2], heads, -1):transpose(1, 2)
  end
  return one("k", k), one("v", v)
end

--- See tycho.models.cache.
function PagedCache:advance(t) self.past = self.past + t end

-- The row gives back the pages that its length no longer needs.
local function trim(self, row)
  local pages = self.tables[row]
  local needed = math.ceil(self.lengths[row] / self.pool.page)
  for i = #pages, needed + 1, -1 do
    self.pool:release(pages[i])
    pages[i] = nil
  end
end

--- See tycho.models.cache. Pages that are no longer needed go back to the pool.
function PagedCache:truncate(past)
  if past > self.past then error(("cache: %d positions are wanted of %d"):format(past, self.past), 2) end
  for row in ipairs(self.tables) do
    local gone = self.past - past
    if self.seen then gone = self.seen:select(0, row - 1):narrow(0, past, gone):to("i64"):sum():item() end
    self.lengths[row] = self.lengths[row] - gone
    trim(self, row)
  end
  self.past = past
  self.slots = self.slots and ty.unscoped(function() return self.slots:narrow(1, 0, past) end)
  if self.seen then self.seen = ty.unscoped(ty.narrow, self.seen, 1, 0, past) end
end

--- Keeps the rows `index` (i64 [n]) of the batch; a row may be there several times and then shares its pages until the
-- copies differ. Rows that are not kept give their pages back.
function PagedCache:select(index)
  local tables, lengths = {}, {}
  for i, row in ipairs(index:tolist()) do
    tables[i] = table.move(self.tables[row + 1], 1, #self.tables[row + 1], 1, {})
    lengths[i] = self.lengths[row + 1]
    for _, page in ipairs(tables[i]) do self.pool.references[page] = self.pool.references[page] + 1 end
  end
  for _, pages in ipairs(self.tables) do
    for _, page in ipairs(pages) do self.pool:release(page) end
  end
  self.tables, self.lengths = tables, lengths
  ty.no_grad(function()
    self.slots = self.slots and ty.unscoped(ty.index_select, self.slots, 0, index)
    self.seen = self.seen and ty.unscoped(ty.index_select, self.seen, 0, index)
  end)
end

--- Takes over the rows of another cache on the same pool, behind its own; the other one is empty afterwards.
---@param other PagedCache
function PagedCache:join(other)
  if other.pool ~= self.pool then error("PagedCache.join: the caches have different pools", 2) end
  local past = math.max(self.past, other.past)
  local parts, masks = {}, {}
  for i, cache in ipairs { self, other } do
    if #cache.tables > 0 then
      local missing = past - cache.past
      local full = cache.seen or ty.ones(cache.slots.shape, { dtype = "bool", device = cache.slots.device })
      parts[i] = cache.slots:pad { missing, 0 }
      masks[i] = full:to("u8"):pad({ missing, 0 }):to "bool"
    end
  end
  if not parts[1] then parts, masks = { parts[2] }, { masks[2] } end
  self.slots, self.seen = ty.unscoped(ty.concat, parts, 0), ty.unscoped(ty.concat, masks, 0)
  if self.seen:all():item() then self.seen = nil end
  table.move(other.tables, 1, #other.tables, #self.tables + 1, self.tables)
  table.move(other.lengths, 1, #other.lengths, #self.lengths + 1, self.lengths)
  self.past = past
  other.past, other.tables, other.lengths, other.slots, other.seen = 0, {}, {}, nil, nil
end

--- Tokens that the pool has room for, and those in pages that are in use.
function PagedCache:usage()
  local pool = self.pool
  return pool.pages * pool.page, (pool.pages - #pool.free) * pool.page
end

return PagedCache
