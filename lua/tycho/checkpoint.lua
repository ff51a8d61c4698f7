--- Gradient checkpointing: ty.checkpoint(fn, ...) keeps the arguments instead of what fn's ops would keep for the
-- backward pass, and runs fn again when the first of those is wanted. Chen et al. 2016.
--
-- The means are saved-tensor hooks. While fn runs, each tensor that a node would keep is replaced by its number; the
-- first number that is asked for runs fn once more with the generator's state of the first run, and the tensors then
-- kept are handed out by their numbers. A checkpoint inside a checkpoint gives its arguments to the outer one.
local ty = require "tycho"
local expect = require("tycho.arguments").expect

-- The tensor handed to the engine last. The engine holds a reference of its own by the time it asks for the next, so it
-- is released then instead of waiting for the collector.
local handed = setmetatable({}, { __mode = "v" })

-- A frame is one run of a checkpointed function. `keep` (nil in the first run) receives the tensors by number.
local current

local function pack_in(frame, tensor)
  local number = frame.count + 1
  frame.count = number
  if frame.keep then frame.keep[number] = ty.keep(tensor:detach()) end
  return number
end

local function run_in(frame, fn, ...)
  local outer = current
  current = frame
  local result = table.pack(pcall(fn, ...))
  current = outer
  if not result[1] then error(result[2], 0) end
  return table.unpack(result, 2, result.n)
end

-- A stored argument as a leaf that wants a gradient where the original did, so that the same nodes are recorded again.
local function leaf_of(tensor, wants)
  local leaf = tensor:detach()
  return wants and leaf:requires_grad_() or leaf
end

local function recompute(self)
  local frame = { count = 0, keep = {} }
  local outer = self.outer
  local before = ty.rng_state()
  ty.rng_state(self.rng)
  local arguments = {}
  for i = 1, self.arguments.n do
    local a = self.arguments[i]
    if self.wants[i] == nil then
      arguments[i] = a
    else
      arguments[i] = leaf_of(outer and outer.fetch(a) or a, self.wants[i])
    end
  end
  local ok, problem = pcall(ty.enable_grad, function()
    ty.scope(ty.autocast, self.autocast, function()
      run_in(frame, ty.saved_tensor_hooks, function(t) return pack_in(frame, t) end, function()
        error("checkpoint: a recomputed graph is not walked", 0)
      end, self.fn, table.unpack(arguments, 1, self.arguments.n))
    end)
  end)
  ty.rng_state(before)
  if not ok then error(problem, 0) end
  if frame.count ~= self.frame.count then
    error(("checkpoint: the function kept %d tensors when it ran first and %d when it ran again; it must do the same "
      .. "both times"):format(self.frame.count, frame.count), 0)
  end
  self.kept = frame.keep
end

--- Runs fn(...) so that the backward pass runs it again instead of keeping its intermediate results. fn must compute
-- the same each time it gets the same arguments (random numbers are replayed); tensors among the arguments and results
-- are found at the top level and inside result tables. It runs in a ty.scope: tensors that it puts elsewhere need
-- ty.keep.
---@param fn function
---@return any ... what fn returns
local function checkpoint(fn, ...)
  expect("checkpoint", "fn", fn, "a function")
  if not ty.is_grad_enabled() then return fn(...) end
  local outer = current
  local self = { fn = fn, rng = ty.rng_state(), autocast = ty.autocast_dtype(), arguments = table.pack(...), wants = {},
    frame = { count = 0 } }
  local inputs = table.pack(...)
  if outer then self.outer = { fetch = outer.fetch } end
  for i = 1, self.arguments.n do
    local a = self.arguments[i]
    if ty.is_tensor(a) then
      self.wants[i] = a.requires_grad
      self.arguments[i] = outer and pack_in(outer, a) or ty.keep(a:detach())
    end
  end
  local function fetch(number)
    if not (self.kept and self.kept[number]) then recompute(self) end
    return self.kept[number]
  end
  self.frame.fetch = fetch
  local function unpack(number)
    local tensor = fetch(number)
    self.kept[number] = nil
    if handed[1] then handed[1]:free() end
    handed[1] = tensor
    return tensor
  end
  -- In a scope of its own: what fn made on the way is not to wait for the collector, or for the end of the step.
  return run_in(self.frame, ty.saved_tensor_hooks, function(t) return pack_in(self.frame, t) end, unpack, ty.scope, fn,
    table.unpack(inputs, 1, inputs.n))
end

return checkpoint
