--- Running, leaving out and replacing blocks of a network of diffusion, from outside of it: what caches and searches
-- over blocks share. No file of a network knows of it; without orders a network gives the same bits as before.
--
--     local blocks = diffusion.blocks(model)
--     blocks:skip { "blocks.3" }                            -- a residual block left out is the identity
--     blocks:replace("blocks.4", "blocks.9", function(next, call, x, ...) ... return next(x, ...) end)
--     blocks:clear()                                        -- all blocks run
--     blocks:remove()                                       -- the network as it was
--
-- As a part of a sampler, with orders for each call of the network and a memory by run, branch and sample:
--
--     local part = blocks:part(function(call)
--       if call.run.step % 2 == 1 then return nil end        -- all blocks run
--       return { skip = { 4, 5 } }
--     end)
--     diffusion.Sampler { ..., parts = { part } }
--
-- A network that is compiled (diffusion.compiled) replays what it recorded and would not follow: it is refused.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local nn = ty.nn
local expect, fail = arguments.expect, arguments.fail
local WHO = "diffusion.blocks"

-- ---- memory ----

--- What a method keeps between calls: tensors by key, branch and sample, so that a picture never depends on which
-- branches or which other samples were in the call that it comes from.
---@class BlockMemory
local Memory = {}
Memory.__index = Memory
Memory.__name = "BlockMemory"

local function new_memory() return setmetatable({ kept = {} }, Memory) end

--- Keeps a tensor [branches * n, ...] for these branches. which: bool [branches * n], the rows that are new (all),
-- where something of that key is kept already.
---@param key string
---@param branches string[]
---@param tensor Tensor
---@param which? Tensor
function Memory:put(key, branches, tensor, which)
  local n = tensor.shape[1] // #branches
  local kept = self.kept[key] or {}
  self.kept[key] = kept
  for i, name in ipairs(branches) do
    local rows = tensor:narrow(0, (i - 1) * n, n)
    if which and kept[name] then
      local shape = { n }
      for d = 2, tensor.ndim do shape[d] = 1 end
      rows = ty.where(which:narrow(0, (i - 1) * n, n):reshape(shape), rows, kept[name])
    end
    kept[name] = ty.keep(rows:detach():clone())
  end
end

--- The tensor [branches * n, ...] kept for these branches; nil where one of them has none.
---@param key string
---@param branches string[]
---@return Tensor?
function Memory:get(key, branches)
  local kept, list = self.kept[key] or {}, {}
  for i, name in ipairs(branches) do
    if not kept[name] then return nil end
    list[i] = kept[name]
  end
  return #list == 1 and list[1] or ty.concat(list, 0)
end

-- ---- what blocks there are ----

local function add(list, name, module, streams)
  list[#list + 1] = { name = name, module = module, streams = streams }
end

local function stack(model, name, streams)
  local list = {}
  for i, module in ipairs(model[name]) do add(list, ("%s.%d"):format(name, i - 1), module, streams) end
  return list
end

-- Residual blocks and the attention after each, in the order that they run in.
local function of_unet(model)
  local list = {}
  local function level(name, l)
    for i, resnet in ipairs(l.resnets) do
      add(list, ("%s.resnets.%d"):format(name, i - 1), resnet, 1)
      if l.attentions and l.attentions[i] then
        add(list, ("%s.attentions.%d"):format(name, i - 1), l.attentions[i], 1)
      end
    end
  end
  for i, l in ipairs(model.down_blocks) do level("down_blocks." .. i - 1, l) end
  if model.mid_block then level("mid_block", model.mid_block) end
  for i, l in ipairs(model.up_blocks) do level("up_blocks." .. i - 1, l) end
  return list
end

-- The blocks, and whether each gets what the one before it gives, so that a range of them can be one.
local function find(model, o)
  local function has(name) return nn.is_module(rawget(model, name)) end
  if o.list then
    if not has(o.list) then fail("%s: list: expected the name of a list of modules, got %s", WHO, o.list) end
    return stack(model, o.list, o.streams), true
  end
  if has "transformer_blocks" then return stack(model, "transformer_blocks", 2), true end
  if has "blocks" then return stack(model, "blocks", 1), true end
  if has "down_blocks" and has "up_blocks" then return of_unet(model), false end
  return fail("%s: model: expected a U-Net, a DiT or an SD3Transformer2DModel, or the option list, got %s", WHO,
    arguments.describe(model))
end

-- ---- a block under orders ----

local wrapper = nn.surgery.wrapper { name = "Ordered", field = "_order_of", forward = function(base)
  return function(self, ...)
    local place = self._order_of
    return place.owner:_run(place.index, function(...) return base.forward(self, ...) end, ...)
  end
end }

--- The blocks of a network of diffusion, to be left out or replaced from outside.
---@class Blocks
---@field names string[]  of the blocks, in the order that they run in
local Blocks = {}
Blocks.__index = Blocks
Blocks.__name = "Blocks"

-- What comes out of a block that does nothing: its inputs of the streams; of a residual block whose width or size
-- changes, what goes beside it.
local function identity(block, x, ...)
  local module = block.module
  if rawget(module, "resize") then x = module.resize(x) end
  if rawget(module, "conv_shortcut") then x = module.conv_shortcut(x) end
  if block.streams == 1 then return x end
  return x, (...)
end

function Blocks:_run(i, forward, ...)
  local block = self.list[i]
  if self.within then -- inside a replaced range: its blocks as they are, or left out
    if self.orders.skip[i] then return identity(block, ...) end
    return forward(...)
  end
  local range = self.orders.ranges[i]
  if range then
    if i > range.first then return identity(block, ...) end -- it ran with the first
    local function following(...)
      local values = table.pack(...)
      local before = self.within
      self.within = true
      local ok, problem = pcall(function()
        for j = range.first, range.last do
          local out = table.pack(self.list[j].module(table.unpack(values, 1, values.n)))
          for s = 1, block.streams do values[s] = out[s] end
        end
      end)
      self.within = before
      if not ok then error(problem, 0) end
      return table.unpack(values, 1, block.streams)
    end
    return range.fn(following, self.call or {}, ...)
  end
  if self.orders.skip[i] then return identity(block, ...) end
  return forward(...)
end

-- The place of a block, by its number from 1 or its name.
local function place_of(self, who, what, which)
  local place = math.type(which) == "integer" and self.list[which] and which or self.places[which]
  if place then return place end
  return fail("%s: %s: expected a number from 1 to %d or a name such as '%s', got %s", who, what, #self.list,
    self.names[1], arguments.describe(which))
end

local function read_orders(self, who, skip, replace)
  local orders = { skip = {}, ranges = {} }
  for i, which in ipairs(skip) do orders.skip[place_of(self, who, ("skip[%d]"):format(i), which)] = true end
  for _, given in ipairs(replace) do
    local first, last = place_of(self, who, "first", given[1]), place_of(self, who, "last", given[2])
    expect(who, "fn", given[3], "a function")
    if last < first then
      fail("%s: last: expected a block that does not come before %s, got %s", who, self.names[first], self.names[last])
    end
    if last > first and not self.chained then
      fail("%s: last: expected %s itself, for connections join the path between blocks of a U-Net, got %s", who,
        self.names[first], self.names[last])
    end
    for i = first, last do
      if orders.ranges[i] then
        fail("%s: first: expected ranges that do not overlap, got %s twice", who, self.names[i])
      end
      orders.ranges[i] = { first = first, last = last, fn = given[3] }
    end
  end
  return orders
end

--- Blocks of a network: of a U-Net its residual blocks and attentions, of a DiT or an SD3Transformer2DModel its
-- transformer blocks; of other networks the modules of a list that feed each other. options: list (the name of the
-- field with that list), streams (1: how many of a block's inputs it gives back).
---@param model Module
---@param options? { list?: string, streams?: integer }
---@return Blocks
local function new(model, options)
  expect(WHO, "model", model, "a module")
  local o = arguments.read(WHO, options, { list = arguments.none, streams = 1 }, { list = "a string",
    streams = "an integer >= 1" })
  local self = setmetatable({ model = model, names = {}, places = {} }, Blocks)
  self.list, self.chained = find(model, o)
  for _, block in ipairs(self.list) do
    if wrapper:state(block.module) then
      fail("%s: model: expected one whose blocks take no orders yet, got one with some: remove() them first", WHO)
    end
  end
  for i, block in ipairs(self.list) do
    self.names[i], self.places[block.name] = block.name, i
    wrapper:wrap(block.module, { owner = self, index = i })
  end
  return self:clear()
end

--- All blocks run. Returns itself.
---@return Blocks
function Blocks:clear()
  self.orders, self.within, self.call = { skip = {}, ranges = {} }, false, nil
  return self
end

--- Leaves these blocks out (numbers from 1, or names) until clear(): what goes in comes out, of a residual block whose
-- width changes through the convolution beside it.
---@param list (integer|string)[]
---@return Blocks
function Blocks:skip(list)
  expect("Blocks:skip", "list", list, "a list")
  for place in pairs(read_orders(self, "Blocks:skip", list, {}).skip) do self.orders.skip[place] = true end
  return self
end

--- fn(next, call, x, ...) in the place of the blocks `first` to `last` until clear(): next(x, ...) runs them and gives
-- what comes out, and fn returns what goes on. Of networks with a stream of text beside, that is two tensors. call: {
-- run, request, branches, memory } in a sampler's part, else empty.
---@param first integer|string
---@param last integer|string
---@param fn function
---@return Blocks
function Blocks:replace(first, last, fn)
  local more = read_orders(self, "Blocks:replace", {}, { { first, last, fn } }).ranges
  for i, range in pairs(more) do
    if self.orders.ranges[i] then
      fail("Blocks:replace: first: expected ranges that do not overlap, got %s twice", self.names[i])
    end
    self.orders.ranges[i] = range
  end
  return self
end

--- Takes the orders and what follows them out of the network.
function Blocks:remove()
  self:clear()
  for _, block in ipairs(self.list) do wrapper:unwrap(block.module) end
end

--- A part of a sampler that orders before each call of the network: choose(call) returns { skip = {...}, replace = { {
-- first, last, fn }, ... } }, or nil for all blocks. call: run, request (as parts of a sampler get it), branches
-- (names, whose batches follow each other in x), memory (BlockMemory, of this run alone).
---@param choose fun(call: table): table?
---@return table part
function Blocks:part(choose)
  local who = "Blocks:part"
  expect(who, "choose", choose, "a function")
  local owner = self
  local part = {}
  function part.start(_, run)
    if run.model ~= owner.model then
      fail("%s: expected the sampler's network to be the one whose blocks these are, got %s", who,
        arguments.describe(run.model))
    end
    return { memory = new_memory() }
  end
  function part.call(_, run, next, request)
    if request.samples then
      fail("%s: expected calls of the network for all samples, got one for %d of them: no part or "
        .. "guidance that decides sample by sample can stand around this one", who, #request.samples)
    end
    local call = { run = run, request = request, branches = request.branches, memory = run.state[part].memory }
    local given = choose(call)
    expect(who, "choose(call)", given, "a table or nil")
    given = arguments.read(who, given, { skip = {}, replace = {} }, { skip = "a list", replace = "a list of tables" })
    owner.orders, owner.call = read_orders(owner, who, given.skip, given.replace), call
    local ok, y = pcall(next, request)
    owner:clear()
    if not ok then error(y, 0) end
    return y
  end
  return part
end

return new
