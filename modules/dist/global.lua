--- Tensors of all ranks together: a script computes with whole tensors, and says of some of them how they lie on the
-- ranks. Yuan et al. 2021, "OneFlow". Along an axis of the ranks a tensor is split along a dimension, "S(0)", the same
-- on all ranks, "B", or the sum of what they have, "P". An op takes the form in which the fewest bytes have to go over
-- the links, and brings its arguments into it (dist.boxing).
--
--     local axis = dist.global.axes(group)                  -- or axes(group, { 2, 2 }): rank = 2 * i + j
--     local x = axis:tensor(batch, { "S(0)" })              -- data parallel ...
--     local w = axis:parameter(weight, { "B" })
--     local w2 = axis:parameter(weight2, { "S(0)" })        -- ... and a layer that is divided by its outputs
--     local loss = x:linear(w):relu():linear(w2):cross_entropy(labels)
--     loss:backward { w, w2 }                               -- their .part.grad
--     print(loss:whole():item())
local arguments = require "tycho.arguments"
local boxing = require "tycho.dist.boxing"
local Group = require "tycho.dist.group"
local signatures = require "tycho.dist.signatures"

local expect, fail, describe = arguments.expect, arguments.fail, arguments.describe
local M = {}

--- Axes of ranks, on which tensors lie.
---@class RankAxes
---@field groups RankGroup[]  of the ranks along each axis
local Axes = {}
Axes.__index = Axes
Axes.__name = "RankAxes"

--- A tensor of all ranks. Its ops, as methods (dist/signatures.lua): relu, silu, gelu, scale, softmax, transpose,
-- unflatten, flatten, sum, rms_norm, add, mul, linear, matmul, attention, embedding, cross_entropy.
---@class GlobalTensor
---@field shape integer[]
---@field sbp string[]   its form along each axis: "S(0)", "B", "P"
---@field part Tensor    what this rank has of it
---@field axes RankAxes
local Global = {}
Global.__index = Global
Global.__name = "GlobalTensor"

--- The ranks of a group along axes, the last of which changes fastest.
---@param group RankGroup
---@param sizes? integer[]  ranks along each axis, all of the group together (one axis)
---@return RankAxes
function M.axes(group, sizes)
  local who = "dist.global.axes"
  Group.expect(who, group)
  expect(who, "sizes", sizes, "a list of integers or nil")
  local self = setmetatable({ groups = {} }, Axes)
  if not sizes then
    self.groups[1] = group
    return self
  end
  local all = 1
  for _, n in ipairs(sizes) do all = all * n end
  if all ~= group.size then
    fail("%s: sizes: expected %d ranks together, got %s", who, group.size, table.concat(sizes, " x "))
  end
  local stride = group.size
  for i, n in ipairs(sizes) do -- ranks that differ in their place along this axis alone
    local outer = group.rank // stride * stride
    stride = stride // n
    self.groups[i] = group:split(outer + group.rank % stride)
  end
  return self
end

-- ---- forms ----

-- A form that fits: known words, one split of a dimension at most, sizes that can be divided.
local function check_form(who, axes, shape, sbp)
  expect(who, "sbp", sbp, "a list of strings")
  if #sbp ~= #axes.groups then
    fail("%s: sbp: expected %d forms, one for each axis, got %d", who, #axes.groups, #sbp)
  end
  local taken = {}
  for i, form in ipairs(sbp) do
    local d = boxing.dim(form)
    if not d and form ~= "B" and form ~= "P" then
      fail('%s: sbp: expected "S(d)", "B" or "P", got %s', who, describe(form))
    elseif d and d >= #shape then
      fail("%s: sbp: expected a split of one of the %d dimensions, got %s", who, #shape, form)
    elseif d and taken[d] then
      fail("%s: sbp: dimension %d is split along two axes", who, d)
    elseif d and shape[d + 1] % axes.groups[i].size ~= 0 then
      fail("%s: sbp: %s of [%s] cannot be divided by %d ranks", who, form, table.concat(shape, ", "),
        axes.groups[i].size)
    end
    if d then taken[d] = true end
  end
end

-- Whether it would fit, without an error.
local function fits(axes, shape, sbp)
  local taken = {}
  for i, form in ipairs(sbp) do
    local d = boxing.dim(form)
    if d and (d >= #shape or taken[d] or shape[d + 1] % axes.groups[i].size ~= 0) then return false end
    if d then taken[d] = true end
  end
  return true
end

local function new(axes, shape, sbp, part)
  return setmetatable({ axes = axes, shape = shape, sbp = sbp, part = part }, Global)
end

local function copy(list) return table.move(list, 1, #list, 1, {}) end

--- A tensor of which every rank has the whole value; the rank keeps its part.
---@param value Tensor
---@param sbp string[]
---@return GlobalTensor
function Axes:tensor(value, sbp)
  local who = "RankAxes:tensor"
  expect(who, "value", value, "a tensor")
  check_form(who, self, value.shape, sbp)
  local part = value:detach()
  for i, form in ipairs(sbp) do part = boxing.box(self.groups[i], part, "B", form) end
  return new(self, copy(value.shape), copy(sbp), part)
end

--- The same for a parameter: its part is a leaf that wants a gradient, for an optimizer of this rank.
---@param value Tensor
---@param sbp string[]  without "P"
---@return GlobalTensor
function Axes:parameter(value, sbp)
  local who = "RankAxes:parameter"
  expect(who, "value", value, "a tensor")
  check_form(who, self, value.shape, sbp)
  for _, form in ipairs(sbp) do
    if form == "P" then fail('%s: sbp: a parameter is split or broadcast, got "P"', who) end
  end
  local x = self:tensor(value, sbp)
  x.part = x.part:clone():requires_grad_()
  return x
end

-- ---- boxing ----

-- Bytes of what the ranks along one axis share: what is split along other axes is not among them.
local function bytes_along(x, sbp, axis)
  local bytes = x.part:nbytes()
  if boxing.dim(x.sbp[axis]) then bytes = bytes * x.axes.groups[axis].size end
  for i, form in ipairs(sbp) do
    local n = i ~= axis and x.axes.groups[i].size or 1
    bytes = bytes * (boxing.dim(x.sbp[i]) and n or 1) // (boxing.dim(form) and n or 1)
  end
  return bytes
end

local function check_global(who, name, x)
  if getmetatable(x) ~= Global then fail("%s: %s: expected a tensor of all ranks, got %s", who, name, describe(x)) end
end

--- The same tensor in another form.
---@param sbp string[]
---@return GlobalTensor
function Global:to(sbp)
  local who = "GlobalTensor:to"
  check_global(who, "x", self)
  check_form(who, self.axes, self.shape, sbp)
  local now, part = copy(self.sbp), self.part
  local function go(i, form)
    part = boxing.box(self.axes.groups[i], part, now[i], form)
    now[i] = form
  end
  for i, form in ipairs(sbp) do -- first what sets dimensions free
    if not boxing.dim(form) then go(i, form) end
  end
  for i, form in ipairs(sbp) do
    local next_form = copy(now)
    next_form[i] = form
    if form ~= now[i] and not fits(self.axes, self.shape, next_form) then -- another axis has the dimension: that first
      for other = 1, #now do
        if other ~= i and now[other] == form then go(other, "B") end
      end
    end
    go(i, form)
  end
  return new(self.axes, self.shape, copy(sbp), part)
end

--- The whole value, on every rank.
---@return Tensor
function Global:whole()
  check_global("GlobalTensor:whole", "x", self)
  local all = {}
  for i = 1, #self.sbp do all[i] = "B" end
  return self:to(all).part
end

--- Adds to the gradients of parameters what a loss of one number has of them; the ranks' shares of what is broadcast
-- are summed.
---@param parameters GlobalTensor[]
function Global:backward(parameters)
  local who = "GlobalTensor:backward"
  check_global(who, "loss", self)
  expect(who, "parameters", parameters, "a list")
  for i, p in ipairs(parameters) do check_global(who, ("parameters[%d]"):format(i), p) end
  local loss, first = self:whole(), 1
  if loss:numel() ~= 1 then fail("%s: loss: expected one number, got %s", who, describe(loss)) end
  for _, group in ipairs(self.axes.groups) do
    if group.rank > 0 then first = 0 end -- the gradient of what is broadcast is partial: one rank has it
  end
  (loss * first):backward()
  for _, p in ipairs(parameters) do
    if not p.part.grad then p.part:set_grad(p.part:zeros_like()) end
    for i, form in ipairs(p.sbp) do
      if form == "B" then p.axes.groups[i]:all_reduce(p.part.grad) end
    end
  end
end

-- ---- ops ----

-- Of candidates { forms of the arguments ..., form of the result } along an axis the one for which the fewest bytes go
-- over the links, and among those alike the one that changes the fewest arguments.
local function choose(axes, axis, list, args, forms, shape, result)
  local best, least, fewest = nil, math.huge, math.huge
  for _, candidate in ipairs(list) do
    local cost, changed, ok = 0, 0, true
    for k, x in ipairs(args) do
      local wanted = copy(forms[k])
      wanted[axis] = candidate[k]
      if fits(axes, x.shape, wanted) then
        cost = cost + boxing.cost(forms[k][axis], candidate[k], axes.groups[axis].size, bytes_along(x, forms[k], axis))
        changed = changed + (forms[k][axis] ~= candidate[k] and 1 or 0)
      else
        ok = false
      end
    end
    local out = copy(result)
    out[axis] = candidate[#args + 1]
    if ok and fits(axes, shape, out) and (cost < least or cost == least and changed < fewest) then
      best, least, fewest = candidate, cost, changed
    end
  end
  return best
end

-- An op: rule = { candidates, shape of the result, compute(parts of the arguments ..., axes, forms) }.
local function apply(who, args, rule)
  local axes = args[1].axes
  for _, x in ipairs(args) do
    if x.axes ~= axes then fail("%s: expected tensors on the same axes of ranks", who) end
  end
  local forms, result = {}, {}
  for k, x in ipairs(args) do forms[k] = copy(x.sbp) end
  for i = 1, #axes.groups do result[i] = "B" end
  for axis = 1, #axes.groups do
    local best = choose(axes, axis, rule.candidates, args, forms, rule.shape, result)
    if not best then fail("%s: no way to divide it over the ranks", who) end
    for k in ipairs(args) do forms[k][axis] = best[k] end
    result[axis] = best[#args + 1]
  end
  local parts = {}
  for k, x in ipairs(args) do parts[k] = x:to(forms[k]).part end
  return new(axes, rule.shape, result, rule.compute(parts, axes, forms))
end

for name, rule_of in pairs(signatures) do
  Global[name] = function(x, ...)
    local who = "GlobalTensor:" .. name
    check_global(who, "x", x)
    local args, rule = { x }, nil
    for _, value in ipairs { ... } do
      if getmetatable(value) == Global then args[#args + 1] = value end
    end
    local ok, problem = pcall(function(...) rule = rule_of(x, ...) end, ...)
    if not ok then arguments.raise(problem, who .. ": ") end
    return apply(who, args, rule)
  end
end

return M
