--- Streams: items one after the other that nobody counts, read as they are wanted. data.stream(make) is gone through
-- from the front by each loop: `for item in stream do`; map, filter, shuffle, take, skip, batch and prefetch give
-- streams of it.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local datasets = require "tycho.data.dataset"

local expect = arguments.expect

---@class Stream
local Stream = {}
Stream.__index = Stream
Stream.__name = "Stream"

local function wrap(make) return setmetatable({ make = make }, Stream) end

--- A stream of what an iterator gives. make() begins one: it returns a function that gives the next item, nil at the
-- end.
---@param make fun(): fun(): any
---@return Stream
local function new(make)
  expect("data.stream", "make", make, "a function")
  return wrap(make)
end

--- Loops: `for item in stream do` begins at the front.
function Stream:__call(...)
  if select("#", ...) == 0 then return self.make() end
  local _, last = ...
  if last == nil then
    self.loop = self.make()
  elseif not rawequal(last, self.latest) then
    arguments.fail "Stream: another loop has gone over this stream; loops within each other need stream() each"
  end
  local item = self.loop and self.loop()
  if item == nil then self.loop = nil end
  self.latest = item
  return item
end

function Stream.__tostring() return "Stream" end

--- fn(item) of every item.
---@param fn fun(item: any): any
---@return Stream
function Stream:map(fn)
  expect("Stream:map", "fn", fn, "a function")
  return wrap(function()
    local next = self.make()
    return function()
      local item = next()
      if item == nil then return nil end
      local result = fn(item)
      if result == nil then
        arguments.fail "Stream:map: fn: expected a value for each item, got nil (filter leaves out)"
      end
      return result
    end
  end)
end

--- The items of which fn(item) is true.
---@param fn fun(item: any): boolean
---@return Stream
function Stream:filter(fn)
  expect("Stream:filter", "fn", fn, "a function")
  return wrap(function()
    local next = self.make()
    return function()
      while true do
        local item = next()
        if item == nil or fn(item) then return item end
      end
    end
  end)
end

--- The first `count` items.
---@param count integer
---@return Stream
function Stream:take(count)
  expect("Stream:take", "count", count, "an integer >= 0")
  return wrap(function()
    local next, left = self.make(), count
    return function()
      left = left - 1
      if left >= 0 then return next() end
      return nil
    end
  end)
end

--- All but the first `count` items.
---@param count integer
---@return Stream
function Stream:skip(count)
  expect("Stream:skip", "count", count, "an integer >= 0")
  return wrap(function()
    local next, begun = self.make(), false
    return function()
      if not begun then
        begun = true
        for _ = 1, count do if next() == nil then return nil end end
      end
      return next()
    end
  end)
end

--- In an order that is random within `buffer` items: each comes from so many that wait, drawn by the seed. The epoch of
-- the n-th loop draws by seed + n.
---@param buffer integer
---@param seed? integer  (0)
---@return Stream
function Stream:shuffle(buffer, seed)
  expect("Stream:shuffle", "buffer", buffer, "an integer >= 1")
  local first = expect("Stream:shuffle", "seed", seed or 0, "an integer")
  local loops = -1
  return wrap(function()
    loops = loops + 1
    local next, held, draws, at = self.make(), {}, nil, 0
    local own = first + loops
    local function draw(n)
      at = at + 1
      if not draws or at > #draws then
        draws = datasets.with_seed(own, function() return ty.rand(1024):tolist() end)
        own, at = own * 6364136223846793005 + 1442695040888963407, 1
      end
      return math.min(n, 1 + math.floor(draws[at] * n))
    end
    local ended
    return function()
      while not ended and #held < buffer do
        local item = next()
        if item == nil then ended = true else held[#held + 1] = item end
      end
      if #held == 0 then return nil end
      local i = draw(#held)
      local item = held[i]
      held[i] = held[#held]
      held[#held] = nil
      return item
    end
  end)
end

--- Batches of `size` items, put together as a DataLoader does. options: drop_last (false), collate.
---@param size integer
---@param options? {drop_last: boolean, collate: fun(items: any[]): any}
---@return Stream
function Stream:batch(size, options)
  expect("Stream:batch", "size", size, "an integer >= 1")
  local o = arguments.read("Stream:batch", options, { drop_last = false, collate = datasets.collate })
  return wrap(function()
    local next, ended = self.make(), false
    return function()
      local items = {}
      while not ended and #items < size do
        local item = next()
        if item == nil then ended = true else items[#items + 1] = item end
      end
      if #items == 0 or (#items < size and o.drop_last) then return nil end
      return o.collate(items)
    end
  end)
end

-- In the thread: begins a loop, or goes on with it; nil from its end on.
local function serve(make)
  local next
  return function(begin)
    if begin then next = make() end
    local item
    if next then item = next() end
    if item == nil then next = nil end
    return item
  end
end

--- The same items, made up to `count` ahead by a thread of its own: what reads, decodes and batches them goes on while
-- the loop works with others. The thread gets copies of the stream's functions and of what they refer to, as those of
-- a DataLoader do. One loop at a time.
---@param count? integer  (2)
---@return Stream
function Stream:prefetch(count)
  count = expect("Stream:prefetch", "count", count == nil and 2 or count, "an integer in [1, 65536]")
  local thread, latest
  return wrap(function()
    thread = thread or ty.thread.new(serve, self.make)
    while thread:pending() > 0 do -- what a loop that was left has asked for
      local before, ok, problem = thread:pending(), pcall(thread.receive, thread)
      if not ok and thread:pending() == before then error(problem, 0) end -- of the thread, not of an item
    end
    for k = 1, count do thread:send(k == 1) end
    local loop, ended = {}, false
    latest = loop
    return function()
      if ended then return nil end
      if latest ~= loop then
        arguments.fail "Stream:prefetch: another loop has begun, and there is one at a time"
      end
      local ok, item = pcall(thread.receive, thread)
      ended = not ok or item == nil
      if not ok then error(item, 0) end
      if not ended then thread:send(false) end
      return item
    end
  end)
end

return { new = new }
