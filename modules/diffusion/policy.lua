--- Diffusion policies: what is seen gives a distribution of what to do, which a diffusion process draws from. Chi et
-- al. 2023, "Diffusion Policy: Visuomotor Policy Learning via Action Diffusion".
--
-- A network of a policy has two parts:
--
--     encode(observation)         the condition, computed once for all samples and steps; observation is a table
--     denoise(x, t, condition)    what the process predicts of samples x [n * m, ...] at times t [n * m], where each m
--                                 in a row belong to one of the n observations
--
-- It is trained with policy.loss and drawn from with policy.draw, by a process of tycho.diffusion and its sampler.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local seeds = require "tycho.diffusion.seeds"

local M = {}

local function check(who, process, network, observation)
  arguments.expect(who, "process", process, "a table")
  if type(process.loss) ~= "function" or type(process.sample) ~= "function" then
    arguments.fail("%s: process: expected a process such as diffusion.DDPM(), got %s", who,
      arguments.describe(process))
  end
  arguments.expect(who, "network", network, "a table")
  if type(network.encode) ~= "function" or type(network.denoise) ~= "function" then
    arguments.fail("%s: network: expected one with encode and denoise, got %s", who, arguments.describe(network))
  end
  arguments.expect(who, "observation", observation, "a table")
end

-- Each of n rows m times in a row.
local function repeated(x, m)
  if m == 1 then return x end
  local shape = x.shape
  local wide, flat = { shape[1], m }, { shape[1] * m }
  for i = 2, #shape do wide[i + 1], flat[i] = shape[i], shape[i] end
  return x:unsqueeze(1):expand(wide):reshape(flat)
end

--- The training loss of actions [n, ...] that were done where `observation` was seen, each under m pairs of noise and
-- time: two-level minibatches (Hu et al. 2025, "Train a Multi-Task Diffusion Policy on RLBench-18 in One Day with One
-- GPU", section 3.1). The condition is computed once. given: samples (m, 1), t and noise, of n * m rows (drawn), in
-- which each m in a row belong to one action. Returns the loss and the condition.
---@param process Process
---@param network table
---@param observation table
---@param actions Tensor
---@param given? {samples?: integer, t?: Tensor, noise?: Tensor}
---@return Tensor loss
---@return any condition
function M.loss(process, network, observation, actions, given)
  check("policy.loss", process, network, observation)
  arguments.expect("policy.loss", "actions", actions, "a tensor")
  local none = arguments.none
  local o = arguments.read("policy.loss", given, { samples = 1, t = none, noise = none },
    { samples = "an integer >= 1", t = "a tensor", noise = "a tensor" })
  local condition = network:encode(observation)
  local loss = process:loss(function(x, t) return network:denoise(x, t, condition) end,
    repeated(actions, o.samples), {}, { t = o.t, noise = o.noise })
  return loss, condition
end

--- Actions for n observations, each of `shape` (without the batch): [n * m, ...], of which each m in a row belong to
-- one observation. options: samples (m, 1) and those of Process:sample (steps, solver, seeds, noise ...). Returns the
-- condition as well.
---@param process Process
---@param network table
---@param observation table
---@param shape integer[]
---@param options? table
---@return Tensor actions
---@return any condition
function M.draw(process, network, observation, shape, options)
  check("policy.draw", process, network, observation)
  arguments.expect("policy.draw", "shape", shape, "a list of integers")
  arguments.expect("policy.draw", "options", options, "a table or nil")
  local how, samples = {}, 1
  for key, value in pairs(options or {}) do
    if key == "samples" then samples = value else how[key] = value end
  end
  arguments.expect("policy.draw", "samples", samples, "an integer >= 1")
  return ty.no_grad(function()
    local first
    for _, x in pairs(observation) do first = first or ty.is_tensor(x) and x end
    if not first then arguments.fail("policy.draw: observation: expected tensors, got none") end
    local condition, size = network:encode(observation), { first.shape[1] * samples }
    table.move(shape, 1, #shape, 2, size)
    -- The sampler sees a function, which does not say where the network is: the observation does.
    if not how.noise and not how.x then
      local there = { device = first.device }
      how.noise = how.seeds and seeds.noise(how.seeds)(0, ty.empty(size, there)) or ty.randn(size, there)
    end
    return process:sample(function(x, t) return network:denoise(x, t, condition) end, size, how), condition
  end)
end

-- ---- words ----

local Words = {}
Words.__index = Words

--- Texts as numbers of words: i64 [n, longest]; 0 is padding, 1 a word that the vocabulary lacks.
---@param texts string[]
---@param longest integer
---@return Tensor
function Words:encode(texts, longest)
  arguments.expect("Words:encode", "texts", texts, "a list of strings")
  arguments.expect("Words:encode", "longest", longest, "an integer >= 1")
  local list = {}
  for k, text in ipairs(texts) do
    local at = 0
    for word in text:lower():gmatch "%a+" do
      if at < longest then
        at = at + 1
        list[(k - 1) * longest + at] = self.number[word] or 1
      end
    end
    for i = at + 1, longest do list[(k - 1) * longest + i] = 0 end
  end
  return ty.tensor(list, { dtype = "i64" }):reshape(#texts, longest)
end

--- The vocabulary of texts: { count, number = { word = 2 ... }, encode(texts, longest) }, words in the order of the
-- alphabet.
---@param texts string[]
---@return table
function M.words(texts)
  arguments.expect("policy.words", "texts", texts, "a list of strings")
  local seen, list, number = {}, {}, {}
  for _, text in ipairs(texts) do
    for word in text:lower():gmatch "%a+" do
      if not seen[word] then seen[word], list[#list + 1] = true, word end
    end
  end
  table.sort(list)
  for i, word in ipairs(list) do number[word] = i + 1 end
  return setmetatable({ count = #list + 2, number = number }, Words)
end

return M
