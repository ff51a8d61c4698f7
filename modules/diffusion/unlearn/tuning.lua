--- Training some weights of a network that draws, with a report of what changed and the way back: what methods of
-- unlearning share.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local conditions = require "tycho.diffusion.condition"
local predictions = require "tycho.diffusion.prediction"

local expect, fail = arguments.expect, arguments.fail
local M = {}

--- Which weights of a U-Net there are to choose from, by the names that papers have for them.
M.parts = {
  all = function() return true end,
  cross = function(name) return name:find("attn2.", 1, true) ~= nil end,
  cross_keys = function(name) return name:find "attn2%.to_[kv]%.weight$" ~= nil end,
  no_cross = function(name) return name:find("attn2.", 1, true) == nil end,
}

---@class UnlearnReport
---@field method string
---@field names string[]      weights that may have changed
---@field numbers integer     how many numbers these are
---@field changed integer     how many of them did change
---@field bytes integer       what has to be stored of them, as f32
---@field losses number[]
---@field before table<string, Tensor>

--- Raises an error unless there are a painter and, where it is asked for, a task.
---@param who string
---@param painter TextToImage
---@param task? UnlearnTask|false  false: none is asked for
function M.check(who, painter, task)
  expect(who, "painter", painter, "a table")
  expect(who, "painter.network", painter.network, "a module")
  expect(who, "painter.condition", painter.condition, "a function")
  if task == false then return end
  expect(who, "task", task, "a table")
  for _, part in ipairs { "forget", "anchor", "retain" } do
    expect(who, "task." .. part, task[part], "a list of strings")
  end
  expect(who, "task.positions", task.positions, "a tensor")
end

--- The weights of a network that a part means: names in order, and tensors by name.
---@param who string
---@param network Module
---@param part string
---@return string[] names
---@return table<string, Tensor> weights
function M.chosen(who, network, part)
  local wanted = M.parts[part]
  if not wanted then
    fail('%s: part: expected "all", "cross", "cross_keys" or "no_cross", got %s', who, arguments.describe(part))
  end
  local names, weights = {}, {}
  for name, p in network:named_parameters() do
    if wanted(name) then
      names[#names + 1], weights[name] = name, p
    end
  end
  if #names == 0 then fail("%s: part: expected weights of the network, '%s' names none of it", who, part) end
  return names, weights
end

--- A copy of weights, by name.
function M.copies(names, weights)
  local list = {}
  for _, name in ipairs(names) do list[name] = ty.keep(weights[name]:detach():clone()) end
  return list
end

-- Completes a report: how many numbers changed.
local function finish(report, weights)
  report.numbers, report.changed = 0, 0
  for _, name in ipairs(report.names) do
    local now = weights[name]:detach()
    report.numbers = report.numbers + now:numel()
    report.changed = report.changed + math.tointeger(now:ne(report.before[name]):to("i64"):sum():item())
  end
  report.bytes = 4 * report.changed
  return report
end

--- What a method did that sets weights itself, without training.
---@param method string
---@param network Module
---@param part string
---@param set fun(name: string, weight: Tensor): Tensor  the new weight
---@return UnlearnReport
function M.replace(method, network, part, set)
  local names, weights = M.chosen("unlearn." .. method, network, part)
  local report = { method = method, names = names, losses = {}, before = M.copies(names, weights) }
  ty.no_grad(function()
    for _, name in ipairs(names) do weights[name]:copy_(set(name, weights[name]:detach())) end
  end)
  return finish(report, weights)
end

--- The options that methods which train share, with a method's own defaults over them.
---@param who string
---@param options? table
---@param own table
---@param kinds? table
---@return table
function M.options(who, options, own, kinds)
  local defaults = { part = "cross", steps = 40, batch = 8, lr = 1e-3, seed = 0, every = 0, look = arguments.none }
  local all = { part = "a string", steps = "an integer >= 0", batch = "an integer >= 1", lr = "a finite number > 0",
    seed = "an integer", every = "an integer >= 0", look = "a function" }
  for key, value in pairs(own) do defaults[key] = value end
  for key, value in pairs(kinds or {}) do all[key] = value end
  return arguments.read(who, options, defaults, all)
end

--- Trains the weights of o.part for o.steps by Adam at o.lr: loss(network) is called once a step. masks: by name, 1
-- where a number may change (all). o.look(step, report) is called every o.every steps.
---@param method string
---@param painter TextToImage
---@param o table
---@param loss fun(network: Module): Tensor
---@param masks? table<string, Tensor>
---@return UnlearnReport
function M.train(method, painter, o, loss, masks)
  local network = painter.network
  local names, weights = M.chosen("unlearn." .. method, network, o.part)
  local report, asked = { method = method, names = names, losses = {}, before = M.copies(names, weights) }, {}
  for name, p in network:named_parameters() do
    asked[name] = p.requires_grad
    p:requires_grad_(weights[name] ~= nil)
  end
  if o.steps > 0 then
    local loader = ty.data.DataLoader(ty.data.TensorDataset { at = ty.arange(1) }, { batch_size = 1 })
    local ok, losses = pcall(ty.data.with_seed, o.seed, function()
      return ty.train.fit(network, loader, { steps = o.steps, lr = o.lr, warmup = 0, final = 1, weight_decay = 0,
        beta2 = 0.99, quiet = true, title = method, every = o.every,
        evaluate = o.look and function(step)
          network:eval()
          return o.look(step, report) or {}
        end,
        backward = function(model, next)
          next()
          local value = loss(model)
          value:backward()
          for name, mask in pairs(masks or {}) do
            local p = weights[name]
            if p.grad then p.grad:copy_(p.grad * mask) end
          end
          return { loss = value }
        end })
    end)
    if ok then report.losses = losses end
    network:eval()
    if not ok then
      for name, p in network:named_parameters() do p:requires_grad_(asked[name]) end
      error(losses, 0)
    end
  end
  for name, p in network:named_parameters() do p:requires_grad_(asked[name]) end
  return finish(report, weights)
end

--- Takes back what a method did to a painter's network.
---@param painter TextToImage
---@param report UnlearnReport
function M.undo(painter, report)
  expect("unlearn.undo", "report", report, "a table")
  M.use(painter, expect("unlearn.undo", "report.before", report.before, "a table"))
end

--- The weights of a painter's network that a report names, as they are now: what has to be kept of a method.
---@param painter TextToImage
---@param report UnlearnReport
---@return table<string, Tensor>
function M.state(painter, report)
  M.check("unlearn.state", painter, false)
  expect("unlearn.state", "report", report, "a table")
  expect("unlearn.state", "report.names", report.names, "a list of strings")
  local weights = {}
  for name, p in painter.network:named_parameters() do weights[name] = p end
  return M.copies(report.names, weights)
end

--- Gives a painter's network weights by name.
---@param painter TextToImage
---@param state table<string, Tensor>
function M.use(painter, state)
  M.check("unlearn.use", painter, false)
  expect("unlearn.use", "state", state, "a table")
  local left = {}
  for name in pairs(state) do left[name] = true end
  ty.no_grad(function()
    for name, p in painter.network:named_parameters() do
      if state[name] then
        p:copy_(state[name])
        left[name] = nil
      end
    end
  end)
  local name = next(left)
  if name then fail("unlearn.use: state: expected weights of the network, got '%s'", name) end
end

-- ---- what losses are made of ----

--- A function that gives the conditions of some of a list of prompts, by positions i64 [m]; they are read once.
---@param painter TextToImage
---@param prompts string[]
---@return fun(at: Tensor): table
function M.conditions(painter, prompts)
  local all = conditions.map(painter:condition(prompts), function(tensor) return ty.keep(tensor) end)
  return function(at) return conditions.select(all, at:to { device = painter:device() }) end
end

--- What a network says of noisy samples (objective:noisy), [n, ...].
function M.say(painter, network, noisy, condition)
  return painter.process.objective:output(network, noisy, condition)
end

--- What a network is to say of them, for clean samples x0.
function M.target(objective, x0, noisy)
  return predictions.target(objective.predict, x0, noisy.noise, noisy.alpha, noisy.sigma, objective.data)
end

--- Latents of pictures of one of a task's parts, "forget", "anchor" or "retain", and the prompts' positions of each,
-- i64 [m]: those that were given, or drawn by the painter as it is, for at most task.most prompts.
---@param painter TextToImage
---@param task UnlearnTask
---@param part string
---@return Tensor latents
---@return Tensor at
function M.pictures(painter, task, part)
  if task.drawn[part] then return task.drawn[part].x, task.drawn[part].at end
  local prompts, at = task[part], {}
  local count = math.min(task.most, #prompts)
  for i = 1, count do at[i] = (i - 1) * #prompts // count end
  local pictures
  if task.all and task.at[part] then
    local rows = {}
    for i, k in ipairs(at) do rows[i] = task.at[part][k + 1] end
    pictures = task.all:index_select(0, ty.tensor(rows))
  else
    local some = {}
    for i, k in ipairs(at) do some[i] = prompts[k + 1] end
    pictures = painter:paint(some, task.paint)
  end
  local made = { x = ty.keep(painter:encode(pictures)), at = ty.keep(ty.tensor(at, { dtype = "i64" })) }
  task.drawn[part] = made
  return made.x, made.at
end

--- Some of them, drawn at random: latents [n, ...] and the prompts' positions.
function M.some(painter, task, part, n)
  local x, at = M.pictures(painter, task, part)
  local index = ty.randint(0, at.shape[1], { n })
  return x:index_select(0, index:to { device = x.device }), at:index_select(0, index)
end

return M
