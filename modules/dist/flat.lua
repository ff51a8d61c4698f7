-- Parameters as one flat tensor that ranks divide: where their values, their gradients and what the optimizer keeps of
-- them are. What is exchanged how is said by its ways, a table of functions that begin a collective.
--
-- Each rank owns one part. The parameters stay the objects that the model knows; their memory is the flat tensor's, or
-- away: an op that meets them then brings them back.
local ty = require "tycho"
local absent = require "tycho.absent"

local tier = ty.core.tier_core

--- Parameters as one flat tensor that ranks divide.
---@class RankFlat
---@field parameters Tensor[]
---@field count integer      elements of them; those of the flat tensor are filled up to a multiple of the ranks
---@field part integer       elements of a rank's own part
---@field values Tensor|nil  [padded], while they are here
---@field shard Tensor|nil   [part], of parameters that go away
---@field gradient Tensor|nil  [padded], while it is being filled or, of whole gradients, always
---@field own_gradient Tensor|nil  [part], of divided gradients, from the backward pass to the step
---@field trained boolean
local Flat = {}
Flat.__index = Flat

local function empty(n, like) return ty.keep(ty.empty({ n }, { dtype = like.dtype, device = like.device })) end
local function zeros(n, like) return ty.keep(ty.zeros({ n }, { dtype = like.dtype, device = like.device })) end

-- Frees a tensor of a flat by its name.
local function drop(self, name)
  if self[name] then self[name]:free() end
  self[name] = nil
end

-- Calls visit(part of a flat tensor in the parameter's shape, parameter, place) for all.
local function each(self, flat, visit)
  for i, p in ipairs(self.parameters) do
    visit(flat:narrow(0, self.offsets[i], p:numel()):view(p.shape), p, i)
  end
end

--- The parameters' values one after the other in a tensor of a dtype.
function Flat:copied(dtype)
  local flat = ty.keep(ty.zeros({ self.padded }, { dtype = dtype, device = self.device }))
  ty.no_grad(ty.scope, each, self, flat, function(part, p) part:copy_(p) end)
  return flat
end

--- The rank's own part of a flat tensor.
function Flat:own(flat) return ty.keep(flat:narrow(0, self.place * self.part, self.part)) end

-- The parameters change their memory with the parts of a flat tensor.
local function exchange(self, flat)
  ty.no_grad(ty.scope, each, self, flat, function(part, p) tier.exchange(p, part) end)
end

--- layout: parts (in which gradients and what the optimizer has are divided) and place (the rank's own, from 0);
-- shards and shard, the same of parameters that go away, where these are divided in another way; multiple(count), of
-- which the elements of a part are one.
---@param parameters Tensor[]  of one dtype
---@param layout { parts: integer, place: integer, shards?: integer, shard?: integer, multiple?: function }
function Flat.new(parameters, layout)
  local count, first, offsets = 0, parameters[1], {}
  for i, p in ipairs(parameters) do
    offsets[i] = count
    count = count + p:numel()
  end
  local parts, multiple = layout.parts, layout.multiple and layout.multiple(count) or 1
  local part = (count + parts * multiple - 1) // (parts * multiple) * multiple
  return setmetatable({ parameters = parameters, count = count, part = part, padded = part * parts, multiple = multiple,
    place = layout.place, shards = layout.shards or parts, own_shard = layout.shard or layout.place,
    offsets = offsets, dtype = first.dtype, device = first.device, trained = first.requires_grad, missing = 0,
    seen = {} }, Flat)
end

--- The parameters' memory becomes that of a flat tensor, for good.
function Flat:stay()
  self.values = self:copied(self.dtype)
  exchange(self, self.values)
end

--- The parameters' memory goes; this rank keeps its part. ways.gather(flat, values) begins to fill the values from the
-- ranks' shards; here(flat, boolean) is told when they have come and gone.
---@param ways { gather: function }
---@param here fun(flat: RankFlat, is: boolean)
---@param ask fun(flat: RankFlat)  an op has met parameters that are away
function Flat:go(ways, here, ask)
  self.ways, self.here, self.ask = ways, here, ask
  local whole = self:copied(self.dtype)
  local wide = self.padded // self.shards
  self.shard = ty.keep(ty.scope(function() return whole:narrow(0, self.own_shard * wide, wide):clone() end))
  whole:free()
  self.away = {}
  for i, p in ipairs(self.parameters) do
    local nothing = ty.keep(ty.empty(p.shape, { dtype = p.dtype, device = "meta" }))
    tier.exchange(p, nothing)
    nothing:free() -- it has what was the parameter's now
    self.away[i] = tier.memory_of(p)
    absent.left(self.away[i], self)
  end
end

--- Begins to bring the values.
function Flat:fetch()
  if not self.shard or self.values or self.work then return end
  self.coming = empty(self.padded, self.shard)
  self.work = self.ways.gather(self, self.coming)
end

--- The values are there when it returns.
function Flat:need()
  if not self.shard or self.values then return end
  self:fetch()
  self.work:wait()
  self.values, self.coming, self.work = self.coming, nil, nil
  self.held = {}
  for _, memory in ipairs(self.away) do absent.returned(memory) end
  ty.no_grad(each, self, self.values, function(part, p, i)
    tier.exchange(p, part)
    self.held[i] = ty.keep(part) -- the memory that stands for what is away
  end)
  self.here(self, true)
end

function Flat:bring_back() self.ask(self) end

--- The values go. Those that are on their way are waited for: all ranks have begun it.
function Flat:release()
  if self.work then self:need() end
  if not self.shard or not self.values then return end
  self.here(self, false)
  for i, p in ipairs(self.parameters) do
    tier.exchange(p, self.held[i])
    self.held[i]:free()
    absent.left(self.away[i], self)
  end
  self.held = nil
  drop(self, "values")
end

--- The parameters have memory of their own again.
function Flat:leave()
  if self.shard then
    self:need()
    for _, part in ipairs(self.held) do part:free() end
    self.held = nil
    self.here(self, false)
    if rawequal(self.master, self.shard) then self.master = nil end
    drop(self, "shard")
  end
  if rawequal(self.master, self.values) then self.master = nil end
  for _, name in ipairs { "values", "gradient", "own_gradient", "master" } do drop(self, name) end
end

-- ---- gradients ----

--- Room for gradients that stay whole.
function Flat:whole_gradients() self.gradient = zeros(self.padded, self.parameters[1]) end

--- A backward pass begins.
function Flat:begin() self.missing, self.seen = #self.parameters, {} end

--- Takes a parameter's gradient.
---@param place integer  of the parameter in the list
---@param g Tensor
function Flat:take(place, g)
  self.gradient = self.gradient or zeros(self.padded, g)
  ty.scope(function() self.gradient:narrow(0, self.offsets[place], g:numel()):view(g.shape):copy_(g) end)
  self.seen[place] = true
  self.missing = self.missing - 1
end

--- What got no gradient has zeros.
function Flat:complete()
  if self.missing == 0 then return end
  if not self.gradient then
    self.gradient = zeros(self.padded, self.shard or self.values)
  else
    ty.scope(each, self, self.gradient, function(part, _, i) if not self.seen[i] then part:zero_() end end)
  end
  self.missing = 0
end

return Flat
