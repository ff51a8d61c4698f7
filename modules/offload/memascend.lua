-- MemAscend: what training from the disk takes of the host's memory besides what it must hold. Four savings, each with
-- the way of ZeRO-Infinity that it stands in for, so that they can be compared: buffers for parameters of the sizes
-- that the tensors have, in place of one size for all, which is that of the embedding; page-locked memory as large as
-- it was asked for, in place of the next power of two; one pass over the exponents of all gradients to see whether they
-- are finite, in place of operations that each make a tensor as long as these; a file past the page cache. Liaw and
-- Chen 2025, "MemAscend: System Memory Optimization for SSD-Offloaded LLM Fine-Tuning".
--
-- On a machine without a GPU the device's memory is the host's too, and page-locked memory is what the system promised
-- to keep there.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local Pool = require "tycho.offload.pool"
local superpipeline = require "tycho.offload.superpipeline"

local M = {}

--- How many buffers of which size are in use at a time, of what `window` units in a row have there: by default their
-- parameters, each once. uniform: all have the size of the largest.
---@param units ModuleUnit[]
---@param window integer
---@param uniform? boolean
---@param list? fun(unit: ModuleUnit): {nbytes: integer}[]
---@return table<integer, integer> counts by bytes
function M.buffers(units, window, uniform, list)
  local counts, largest, most = {}, 0, 0
  for first = 1, #units do
    local here, n, seen = {}, 0, {}
    for i = first, math.min(#units, first + window - 1) do
      for _, one in ipairs(list and list(units[i]) or units[i].cells) do
        if not seen[one] then
          seen[one] = true
          here[one.nbytes], n = (here[one.nbytes] or 0) + 1, n + 1
          largest = math.max(largest, one.nbytes)
        end
      end
    end
    most = math.max(most, n)
    for nbytes, count in pairs(here) do counts[nbytes] = math.max(counts[nbytes] or 0, count) end
  end
  return uniform and { [largest] = most } or counts
end

--- Moments in f32 for the parameters of an optimizer that are in half precision, before its first step.
---@param optimizer Optimizer
function M.wide_states(optimizer)
  arguments.expect("offload.wide_states", "optimizer", optimizer, "a table")
  local rules = optimizer.rules
  if type(rules) ~= "table" then
    arguments.fail("offload.wide_states: optimizer: expected one of ty.optim, got %s", arguments.describe(optimizer))
  end
  optimizer.rules = setmetatable({ place = function(group, p, made)
    local placed = rules.place and rules.place(group, p, made) or made
    if placed.dtype ~= "bf16" and placed.dtype ~= "f16" then return placed end
    -- Nearly all begin at zero: then the narrow ones go first, so that a large embedding's do not lie beside the wide.
    local zero, shape, device = not placed:any():item(), placed.shape, placed.device
    local wide = not zero and placed:to "f32"
    placed:free()
    return wide or ty.zeros(shape, { dtype = "f32", device = device })
  end }, { __index = rules })
end

-- Bytes of two moments in f32 of each parameter of a unit that is not small.
local function moments_of(unit, smallest)
  local list = {}
  for _, p in ipairs(unit.params) do
    local nbytes = 4 * p:numel()
    if p.requires_grad and nbytes >= smallest then
      list[#list + 1], list[#list + 2] = { nbytes = nbytes }, { nbytes = nbytes }
    end
  end
  return list
end

-- Moments that the optimizer makes begin in buffers, too.
local function place_moments(engine)
  local rules, pool = engine.optimizer.rules, engine.pools.moments
  engine.optimizer.rules = setmetatable({ place = function(group, p, made)
    local placed = rules.place and rules.place(group, p, made) or made
    if engine.closed or not pool:fits(placed) then return placed end
    local there = engine:room(function() return pool:take(placed) end):copy_(placed)
    placed:free()
    return there
  end }, { __index = rules })
end

-- One piece of memory for all gradients, each in a place of its own.
local function place_gradients(engine, round)
  local counts, tensors = {}, {}
  for _, unit in ipairs(engine.units) do
    for _, p in ipairs(unit.params) do
      if p.requires_grad then
        tensors[#tensors + 1] = p
        counts[p:nbytes()] = (counts[p:nbytes()] or 0) + 1
      end
    end
  end
  local pool, places = Pool.new(counts, round), {}
  for _, p in ipairs(tensors) do places[p] = ty.keep(pool:take(p)) end
  return pool, places
end

--- Whether all of the tensors are finite, written with operations of which each makes a tensor: what finite_list() does
-- in one pass.
---@param tensors Tensor[]
---@return boolean
function M.finite_composed(tensors)
  for _, t in ipairs(tensors) do
    if ty.scope(function() return t:isinf():logical_or(t:isnan()):any():item() end) then return false end
  end
  return true
end

-- The gradients as one tensor, where they have one dtype.
local function all_of(pool, tensors)
  for _, t in ipairs(tensors) do if t.dtype ~= tensors[1].dtype then return tensors end end
  return tensors[1] and { pool:flat(tensors[1].dtype) } or tensors
end

--- A policy for offload.engine, for a plan with parameters and moments on "file" and direct as below. Gradients are
-- gathered in one piece of memory; a step whose gradients are not all finite is left out, and policy.left_out counts
-- it. options, by default all as MemAscend has them:
--   adaptive  buffers by the sizes of the tensors, for parameters and for two f32 moments of each; false: those of
--             parameters are all as large as the largest, and moments are in memory that is taken when they come
--   exact     memory as large as it was asked for; false: the next power of two
--   fused     one pass over the gradients; false: operations that make tensors
--   window, ahead  of superpipeline (2, 1)
-- The fourth saving is the plan's: direct (true; false: through the page cache).
---@param options? { adaptive?: boolean, exact?: boolean, fused?: boolean, window?: integer, ahead?: integer }
---@return table policy
function M.policy(options)
  local o = arguments.read("offload.memascend", options, { adaptive = true, exact = true, fused = true, window = 2,
    ahead = 1 }, { window = "an integer >= 1", ahead = "an integer >= 0" })
  local policy = superpipeline { window = o.window, ahead = o.ahead }
  local after_backward, round = policy.after_backward, not o.exact and Pool.power or nil
  policy.left_out = 0
  local places, here -- of gradients, and those that are there

  --- Takes the memory, before anything leaves.
  function policy.begin(engine)
    if engine.plan.gradients ~= "device" then
      arguments.fail('offload.memascend: plan.gradients: expected "device", where it gathers them, got "%s"',
        engine.plan.gradients)
    end
    if engine.device ~= "cpu" then
      arguments.fail("offload.memascend: expected a model on the CPU, of whose memory the buffers are, got %s",
        engine.device)
    end
    engine.pools.parameters = Pool.new(M.buffers(engine.units, o.window, not o.adaptive), round)
    here = {}
    if engine.optimizer and o.adaptive then
      local smallest = engine.plan.smallest
      engine.pools.moments = Pool.new(M.buffers(engine.units, 1 + o.ahead, false, function(unit)
        return moments_of(unit, smallest)
      end), round)
      place_moments(engine)
    end
    if engine.optimizer then policy.gradient_pool, places = place_gradients(engine, round) end
  end

  function policy.gradients(_, unit)
    for _, p in ipairs(unit.params) do
      local g = p.grad
      if g then
        ty.no_grad(function() places[p]:copy_(g) end)
        p:set_grad(places[p])
        g:free()
        here[#here + 1] = places[p]
      end
    end
  end

  function policy.after_backward(engine)
    local tensors = here
    here = {}
    if not o.fused then tensors = all_of(policy.gradient_pool, tensors) end
    if (o.fused and ty.finite_list(tensors):item()) or (not o.fused and M.finite_composed(tensors)) then
      return after_backward(engine)
    end
    policy.left_out = policy.left_out + 1
    engine:leave_out()
    for _, t in ipairs(tensors) do t:zero_() end
  end

  return policy
end

return M
