--- What a teacher makes for students: pairs of noise and the sample that its solver leads to, and trajectories with the
-- guided predictions on them. Both are tables of tensors for distill.store, with the number of evaluations they took.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local conditions = require "tycho.diffusion.condition"
local guidances = require "tycho.diffusion.guidance"
local new_teacher = require "tycho.distill.teacher"

local expect, fail, none = arguments.expect, arguments.fail, arguments.none
local M = {}

local PREFIX = "condition."

--- A condition as tensors by name, "condition.text.embeddings" say, as a store keeps them.
---@param condition table
---@return table<string, Tensor>
function M.flatten(condition)
  expect("distill.flatten", "condition", condition, "a table")
  local flat = {}
  for _, entry in ipairs(conditions.tensors(condition)) do flat[PREFIX .. entry[1]] = entry[2] end
  return flat
end

--- The condition that flatten() made names of, out of a batch.
---@param batch table<string, Tensor>
---@return table condition
function M.condition(batch)
  expect("distill.condition", "batch", batch, "a table")
  local condition = {}
  for name, tensor in pairs(batch) do
    if type(name) == "string" and name:sub(1, #PREFIX) == PREFIX then
      local place, path = condition, name:sub(#PREFIX + 1)
      for key in path:gmatch "([^.]+)%." do
        place[key] = place[key] or {}
        place = place[key]
      end
      place[path:match "[^.]+$"] = tensor
    end
  end
  return condition
end

-- Conditions of one batch after the other through fn, whose tables of tensors are put together.
local function in_batches(o, count, fn)
  local lists = {}
  for start = 0, count - 1, o.batch do
    local n = math.min(o.batch, count - start)
    local found = ty.unscoped(function()
      return ty.scope(function()
        local made = fn(conditions.narrow(o.condition, start, n), n, start)
        for name, tensor in pairs(made) do made[name] = ty.keep(tensor) end
        return made
      end)
    end)
    for name, tensor in pairs(found) do
      lists[name] = lists[name] or {}
      table.insert(lists[name], tensor)
    end
  end
  local result = {}
  for name, list in pairs(lists) do result[name] = ty.concat(list, 0) end
  return result
end

local function check(who, teacher, sampler, shape, condition)
  if type(sampler) ~= "table" or type(sampler.sample) ~= "function" or sampler.schedule == nil then
    fail("%s: sampler: expected a Sampler, got %s", who, arguments.describe(sampler))
  end
  expect(who, "shape", shape, "a list of integers >= 1")
  conditions.check_batch(who, condition, shape[1])
  return new_teacher(teacher)
end

--- Pairs of noise and the sample that a sampler makes of it: { noise, sample [n, ...], condition.* }, and the
-- evaluations of the teacher. options: condition ({}; of n samples), null, keep (as of Sampler.sample), batch (256).
---@param teacher Module|Teacher
---@param sampler Sampler
---@param shape integer[]  [n, ...]
---@param options? table
---@return table<string, Tensor> pairs
---@return integer evaluations
function M.pairs(teacher, sampler, shape, options)
  local who = "distill.pairs"
  local o = arguments.read(who, options, { condition = {}, null = none, keep = none, batch = 256 },
    { null = "a table", keep = "a table", batch = "an integer >= 1" })
  teacher = check(who, teacher, sampler, shape, o.condition)
  local before = teacher.evaluations
  local made = in_batches(o, shape[1], function(condition, n)
    local size = table.move(shape, 1, #shape, 1, {})
    size[1] = n
    local result = M.flatten(condition)
    result.noise = ty.randn(size, { device = teacher:device() })
    result.sample = sampler:sample(teacher, size, { condition = condition, null = o.null, keep = o.keep,
      noise = result.noise })
    return result
  end)
  return made, teacher.evaluations - before
end

-- A sampler with other guidance and one part more.
local function sampler_with(sampler, guidance, part)
  local copy = {}
  for key, value in pairs(sampler) do copy[key] = value end
  copy.guidance = guidance
  copy.parts = table.move(sampler.parts, 1, #sampler.parts, 1, {})
  table.insert(copy.parts, part)
  return setmetatable(copy, getmetatable(sampler))
end

--- Guided trajectories: every state that the sampler asked the network about, as items { x [n, ...], time (the
-- network's), scale, target (the guided prediction, of the network's kind), condition.* }, and the evaluations. Each
-- sample has a scale of its own, drawn evenly from `scales`. options: condition, null, keep, batch (256), scales ({ 1,
-- 6 }), noised (nil; clean samples [n, ...]: states are these with fresh noise at the same times in the place of those
-- of trajectories).
---@param teacher Module|Teacher
---@param sampler Sampler  its guidance is not used
---@param shape integer[]  [n, ...]: trajectories
---@param options? table
---@return table<string, Tensor> items
---@return integer evaluations
function M.trajectories(teacher, sampler, shape, options)
  local who = "distill.trajectories"
  local o = arguments.read(who, options, { condition = {}, null = none, keep = none, batch = 256, scales = { 1, 6 },
    noised = none }, { null = "a table", keep = "a table", batch = "an integer >= 1",
    scales = "a pair of finite numbers", noised = "a tensor" })
  teacher = check(who, teacher, sampler, shape, o.condition)
  if o.scales[1] > o.scales[2] then
    fail("%s: scales: expected the smaller one first, got %g and %g", who, o.scales[1], o.scales[2])
  end
  if o.noised and table.concat(o.noised.shape, ",") ~= table.concat(shape, ",") then
    fail("%s: noised: expected [%s], got %s", who, table.concat(shape, ", "), arguments.describe(o.noised))
  end
  local before, device = teacher.evaluations, teacher:device()
  local made = in_batches(o, shape[1], function(condition, n, start)
    local size, wide = table.move(shape, 1, #shape, 1, {}), { n }
    size[1] = n
    for i = 2, #size do wide[i] = 1 end
    local scale = ty.rand({ n }, { device = device }) * (o.scales[2] - o.scales[1]) + o.scales[1]
    local guidance = guidances.classifier_free { scale = function() return scale:reshape(wide) end }
    local x, times, targets = {}, {}, {}
    local clean = o.noised and o.noised:narrow(0, start, n):to { device = device }
    local sampling = sampler_with(sampler, guidance, { predict = function(_, _, next, state, point)
      if clean then state = sampler.schedule:mix(clean, ty.randn_like(clean), point.alpha, point.sigma) end
      local prediction = next(state, point)
      x[#x + 1], targets[#targets + 1] = ty.keep(state), ty.keep(prediction.output)
      times[#times + 1] = ty.keep(ty.full({ n }, point.time, { device = device }))
      return prediction
    end })
    sampling:sample(teacher, size, { condition = condition, null = o.null, keep = o.keep })
    local copies, scales = {}, {}
    for i = 1, #x do copies[i], scales[i] = condition, scale end
    local result = M.flatten(conditions.concat(copies))
    result.x, result.target = ty.concat(x, 0), ty.concat(targets, 0)
    result.time, result.scale = ty.concat(times, 0), ty.concat(scales, 0)
    return result
  end)
  return made, teacher.evaluations - before
end

return M
