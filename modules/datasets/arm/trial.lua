--- Trials: a policy in many environments at once, on episodes that are the same every time.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local M = {}

local none = arguments.none

-- The actions that a policy gave for n environments, as a list of lists of four numbers each.
local function plans_of(given, n)
  if ty.is_tensor(given) then
    if given.ndim ~= 3 or given.shape[1] ~= n or given.shape[2] < 1 or given.shape[3] ~= 4 then
      arguments.fail("datasets.arm.trial: act: expected actions [%d, k, 4], got %s", n, arguments.describe(given))
    end
    return given:tolist()
  end
  if type(given) ~= "table" or #given ~= n then
    arguments.fail("datasets.arm.trial: act: expected a tensor or a list of %d tensors, got %s", n,
      arguments.describe(given))
  end
  local plans = {}
  for k, plan in ipairs(given) do
    if not ty.is_tensor(plan) or plan.ndim ~= 2 or plan.shape[1] < 1 or plan.shape[2] ~= 4 then
      arguments.fail("datasets.arm.trial: act: expected actions [k, 4] as element %d, got %s", k,
        arguments.describe(plan))
    end
    plans[k] = plan:tolist()
  end
  return plans
end

--- What datasets.arm.trial does. Lets a policy act in the first episodes of a split, all at once, and says how often
-- the task was done: { success (share), by_kind (shares), episodes (booleans), steps (mean), looks (how often a policy
-- looked, mean), strips (pictures u8 [k, 3, size, size] of the first episodes, as they were looked at) }.
--
-- act(seen) gets images u8 [n, 3, size, size], states f32 [n, 4], before f32 [n, 4] (the states at the last look; at
-- the first these), tasks (a list of words), episodes (which they are, from 0) and worlds (ArmEnv) of those that go on,
-- and returns the actions of each up to the next look: [n, k, 4] or a list of [k, 4].
-- options: split ("validation"), episodes (200), first (0), tasks (kinds; all five), size (64), seed (0), looks (120:
-- after so many an episode is over), strips (0: of how many), change (a function of the pictures before the policy sees
-- them).
---@param arm table  datasets.arm
---@param act fun(seen: table): Tensor|Tensor[]
---@param options? table
---@return table
function M.run(arm, act, options)
  arguments.expect("datasets.arm.trial", "arm", arm, "a table")
  arguments.expect("datasets.arm.trial", "act", act, "a function")
  local o = arguments.read("datasets.arm.trial", options, { split = "validation", episodes = 200, first = 0,
    tasks = none, size = 64, seed = 0, looks = arm.limit, strips = 0, change = none }, { split = "a string",
    episodes = "an integer >= 1", first = "an integer >= 0", tasks = "a list of strings",
    size = "32 or 64 or 128", seed = "an integer", looks = "an integer >= 1", strips = "an integer >= 0",
    change = "a function" })
  local envs, open, looks, strips, round, before = {}, {}, 0, {}, 0, {}
  for k = 1, o.episodes do
    envs[k] = arm.env { split = o.split, seed = o.seed, size = o.size, tasks = o.tasks }
    envs[k]:begin(o.first + k - 1)
    open[k] = k
  end
  local function look()
    local list = {}
    for i, k in ipairs(open) do list[i] = envs[k] end
    local seen = arm.observe(list)
    if o.change then seen.images = o.change(seen.images) end
    seen.worlds, seen.episodes = list, {}
    local now, last = seen.states:tolist(), {}
    for i, k in ipairs(open) do last[i], before[k] = before[k] or now[i], now[i] end
    seen.before = ty.tensor(last, { dtype = "f32" })
    for i, k in ipairs(open) do
      seen.episodes[i] = o.first + k - 1
      if k <= o.strips then
        strips[k] = strips[k] or {}
        table.insert(strips[k], ty.keep(seen.images:select(0, i - 1):clone()))
      end
    end
    return seen
  end
  while #open > 0 and round < o.looks do
    round = round + 1
    ty.scope(function()
      local plans, left = plans_of(act(look()), #open), {}
      looks = looks + #open
      for i, k in ipairs(open) do
        for _, action in ipairs(plans[i]) do
          if envs[k]:done() then break end
          envs[k]:advance(action)
        end
        if not envs[k]:done() then left[#left + 1] = k end
      end
      open = left
    end)
  end
  local result = { episodes = {}, by_kind = {}, steps = 0, success = 0, looks = looks / o.episodes, strips = {} }
  local counts = {}
  for k, env in ipairs(envs) do
    local done, kind = env:success(), env.task.kind
    result.episodes[k] = done
    result.success = result.success + (done and 1 / o.episodes or 0)
    result.steps = result.steps + env.world.steps / o.episodes
    local count = counts[kind] or { 0, 0 }
    counts[kind] = { count[1] + (done and 1 or 0), count[2] + 1 }
  end
  for kind, count in pairs(counts) do result.by_kind[kind] = count[1] / count[2] end
  for k, pictures in ipairs(strips) do result.strips[k] = ty.stack(pictures, 0) end
  return result
end

return M
