--- Keys and values of many sequences in pages of a few tokens, which are counted: a page that nobody needs any more is
-- free for others. Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with
-- PagedAttention".
local ty = require "tycho"
local arguments = require "tycho.arguments"

---@class PagePool
---@field page integer   tokens in a page
---@field pages integer  how many there are now
---@field layers integer
local Pool = {}
Pool.__index = Pool

--- Pages of `page` tokens for `layers` layers. options: pages (1: how many there is room for at first; it doubles when
-- none is free), most (nil: any number; the most that there will be), dtype (nil: that of what is put there; f16 and
-- bf16 take half the room, and go with tycho.llm.cache.packed).
---@param layers integer
---@param page integer
---@param options? table
---@return PagePool
function Pool.new(layers, page, options)
  arguments.expect("PagePool", "layers", layers, "an integer in [0, 65536]")
  arguments.expect("PagePool", "page", page, "an integer >= 1")
  local o = arguments.read("PagePool", options, { pages = 1, most = ty.nn.none, dtype = ty.nn.none },
    { pages = "an integer >= 1", most = "an integer >= 1", dtype = "a string" })
  local pool = setmetatable({ layers = layers, page = page, pages = 0, most = o.most or math.maxinteger,
    dtype = o.dtype, free = {}, references = {} }, Pool)
  for i = 1, layers do pool[i] = {} end
  pool:add_pages(math.min(o.pages, pool.most))
  return pool
end

--- Makes room for `count` pages more.
function Pool:add_pages(count)
  for page = self.pages + count - 1, self.pages, -1 do self.free[#self.free + 1] = page end
  self.pages = self.pages + count
end

--- A free page, counted once; nil when there are as many as there may be and none is free.
---@return integer? page  counted from 0
function Pool:take()
  if #self.free == 0 then
    local more = math.min(self.pages, self.most - self.pages)
    if more == 0 then return nil end
    self:add_pages(more)
  end
  local page = table.remove(self.free)
  self.references[page] = 1
  return page
end

--- Counts a page that is in use once more.
function Pool:share(page) self.references[page] = self.references[page] + 1 end

--- Counts a page once less; it is free when nobody is left.
function Pool:release(page)
  self.references[page] = self.references[page] - 1
  if self.references[page] == 0 then self.free[#self.free + 1] = page end
end

--- How many pages can still be taken.
function Pool:room() return self.most - self.pages + #self.free end

-- The rows of one layer, as many as there are pages for.
local function grow(pool, at, name, width, dtype, device)
  local old, wanted = at[name], pool.pages * pool.page
  if old and old.shape[1] >= wanted then return old end
  local new = ty.unscoped(ty.empty, { wanted, width }, { dtype = dtype, device = device })
  if old then new:narrow(0, 0, old.shape[1]):copy_(old) end
  at[name] = new
  return new
end

--- The rows [pages * page, hkv * d] of keys or values of one layer, for what is like `like` [b, hkv, t, d].
---@param layer integer
---@param name "k"|"v"
---@param like Tensor
---@return Tensor rows
function Pool:rows(layer, name, like)
  return self:wide(layer, name, like.shape[2] * like.shape[4], like.dtype, like.device)
end

--- The same rows, for what is `width` wide and of a dtype, on a device.
---@param layer integer
---@param name "k"|"v"
---@param width integer
---@param dtype string
---@param device string
---@return Tensor rows
function Pool:wide(layer, name, width, dtype, device)
  return grow(self, self[layer], name, width, self.dtype or dtype, device)
end

--- A page of its own with what `page` has.
---@param page integer
---@return integer page
function Pool:copy(page)
  local new = self:take()
  for i = 1, self.layers do
    for name, rows in pairs(self[i]) do
      rows = grow(self, self[i], name, rows.shape[2], rows.dtype, rows.device)
      rows:narrow(0, new * self.page, self.page):copy_(rows:narrow(0, page * self.page, self.page))
    end
  end
  self:release(page)
  return new
end

--- Bytes of all pages.
---@return integer
function Pool:bytes()
  local sum = 0
  for i = 1, self.layers do
    for _, rows in pairs(self[i]) do sum = sum + rows:nbytes() end
  end
  return sum
end

return Pool
