--- Trials of forgetting: what is to be forgotten and what may be kept, the ways that are compared, each with settings
-- to choose from, and how far a network is from one that never learnt it.
--
--     local case = forgetting.case(model, learnt, whole, unseen, { class = 3 })
--     local got = forgetting.measure(case, forgetting.apply(way, case, setting))
local ty = require "tycho"
local arguments = require "tycho.arguments"
local dampening = require "tycho.curation.dampening"
local fisher = require "tycho.curation.fisher"
local labelled = require "tycho.curation.labelled"
local unlearning = require "tycho.curation.unlearning"

local M = {}

--- A case: model, forget and retained (parts of what a network learnt), unseen (samples of a forgotten class that it
-- did not learn; nil where samples are forgotten), kept (the others of these), whole (the diagonal of the Fisher
-- information of all that it learnt). what: class, or positions in what it learnt.
---@param model Module
---@param learnt { image: Tensor, label: Tensor }
---@param whole table<string, Tensor>
---@param others { image: Tensor, label: Tensor }  that it did not learn
---@param what { class?: integer, positions?: integer[]|Tensor }
---@return table case
function M.case(model, learnt, whole, others, what)
  local who = "curation.forgetting.case"
  arguments.expect(who, "model", model, "a module")
  labelled(who, "learnt", learnt)
  labelled(who, "others", others)
  arguments.expect(who, "whole", whole, "a table")
  local o = arguments.read(who, what, { class = arguments.none, positions = arguments.none },
    { class = "an integer >= 0" })
  if (o.class == nil) == (o.positions == nil) then
    arguments.fail("%s: what: expected a class or positions, got %s", who, o.class and "both" or "none")
  end
  local case = { model = model, whole = whole, kept = others }
  case.forget, case.retained = unlearning.part(learnt, o.positions or unlearning.of_class(learnt, o.class))
  if o.class then case.unseen, case.kept = unlearning.part(others, unlearning.of_class(others, o.class)) end
  return case
end

--- What a network does in a case: shares right of what is to be forgotten, of the unseen of its class, and of what is
-- to be kept; members: the share of what is to be forgotten that unlearning.membership takes for learnt.
---@param case table
---@param model Module
---@return { forgotten: number, unseen?: number, kept: number, members: number }
function M.measure(case, model)
  local who = "curation.forgetting.measure"
  arguments.expect(who, "case", case, "a table")
  arguments.expect(who, "model", model, "a module")
  for _, part in ipairs { "forget", "retained", "kept" } do labelled(who, "case." .. part, case[part]) end
  return { forgotten = unlearning.accuracy(model, case.forget), kept = unlearning.accuracy(model, case.kept),
    unseen = case.unseen and unlearning.accuracy(model, case.unseen) or nil,
    members = unlearning.membership(model, case.retained, case.kept, case.forget) }
end

--- The mean of how far accuracies and membership are apart. Fan et al. 2024, "SalUn", compare with a network that is
-- trained anew so.
---@param a table  as measure() gives it
---@param b table
---@return number
function M.gap(a, b)
  local who, sum = "curation.forgetting.gap", 0
  arguments.expect(who, "a", a, "a table")
  arguments.expect(who, "b", b, "a table")
  for _, key in ipairs { "forgotten", "kept", "members" } do
    arguments.expect(who, "a." .. key, a[key], "a number")
    arguments.expect(who, "b." .. key, b[key], "a number")
    sum = sum + math.abs(a[key] - b[key]) / 3
  end
  return sum
end

--- Ways to forget, by name, each with twelve settings to choose from: dampening (alpha 2 to 7, lambda 0.1 or 1),
-- fine-tuning, wrong labels and ascent (six rates in even steps of their logarithms, two numbers of steps).
---@param steps? integer  of fine-tuning and wrong labels, the larger number (100)
---@return { name: string, tries: table[], apply: fun(model: Module, case: table, setting: table) }[]
function M.ways(steps)
  local most = arguments.expect("curation.forgetting.ways", "steps", steps, "an integer >= 1 or nil") or 100
  local function grid(low, high, numbers)
    local tries = {}
    for i = 0, 5 do
      for _, n in ipairs(numbers) do tries[#tries + 1] = { lr = low * (high / low) ^ (i / 5), steps = n } end
    end
    return tries
  end
  local thresholds = {}
  for alpha = 2, 7 do
    for _, lambda in ipairs { 0.1, 1 } do thresholds[#thresholds + 1] = { alpha = alpha, lambda = lambda } end
  end
  local trained = { (most + 2) // 3, most }
  return {
    { name = "dampening", tries = thresholds, apply = function(model, case, setting)
      dampening.apply(model, fisher.diagonal(model, case.forget), case.whole, setting)
    end },
    { name = "fine-tuning", tries = grid(3e-4, 3e-2, trained), apply = function(model, case, setting)
      unlearning.finetune(model, case.retained, setting)
    end },
    { name = "wrong labels", tries = grid(1e-4, 1e-2, trained), apply = function(model, case, setting)
      unlearning.mislabel(model, case.retained, case.forget, setting)
    end },
    { name = "ascent", tries = grid(3e-5, 3e-3, { 3, 10 }), apply = function(model, case, setting)
      unlearning.ascend(model, case.forget, setting)
    end },
  }
end

--- A copy of a case's network that has forgotten by one of ways().
---@param way table
---@param case table
---@param setting table  one of way.tries
---@return Module
function M.apply(way, case, setting)
  local who = "curation.forgetting.apply"
  arguments.expect(who, "way", way, "a table")
  arguments.expect(who, "way.apply", way.apply, "a function")
  arguments.expect(who, "case", case, "a table")
  arguments.expect(who, "case.model", case.model, "a module")
  arguments.expect(who, "setting", setting, "a table")
  local copy = case.model:clone()
  way.apply(copy, case, setting)
  return copy
end

--- The setting of a way by which classes fall to chance and the most of the others is kept, in all of some cases: the
-- largest sum of what is kept less what is above chance of the forgotten class.
---@param way table
---@param cases table[]
---@param tries table[]  of the way's settings those that are tried
---@param chance number
---@return table setting
function M.strongest(way, cases, tries, chance)
  local who = "curation.forgetting.strongest"
  arguments.expect(who, "cases", cases, "a list of tables")
  arguments.expect(who, "tries", tries, "a list of tables")
  arguments.expect(who, "chance", chance, "a number in [0, 1]")
  return (select(3, ty.stats.best(tries, function(setting)
    local sum = 0
    for _, case in ipairs(cases) do
      local got = M.measure(case, M.apply(way, case, setting))
      sum = sum + got.kept - math.max(0, (got.forgotten + (got.unseen or got.forgotten)) / 2 - chance)
    end
    return setting, sum
  end)))
end

--- The setting of a way that comes nearest to networks that were trained anew, by the sum of gap() over cases.
---@param way table
---@param cases table[]
---@param tries table[]
---@param anew table[]  what measure() says of the network of each case that was trained anew
---@return table setting
function M.nearest(way, cases, tries, anew)
  local who = "curation.forgetting.nearest"
  arguments.expect(who, "cases", cases, "a list of tables")
  arguments.expect(who, "tries", tries, "a list of tables")
  arguments.expect(who, "anew", anew, "a list of tables")
  if #anew ~= #cases then
    arguments.fail("%s: anew: expected one for each of %d cases, got %d", who, #cases, #anew)
  end
  return (select(3, ty.stats.best(tries, function(setting)
    local sum = 0
    for i, case in ipairs(cases) do sum = sum + M.gap(M.measure(case, M.apply(way, case, setting)), anew[i]) end
    return setting, -sum
  end)))
end

return M
