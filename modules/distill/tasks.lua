--- Small things to draw for methods that make a flow fast: data, a residual network that learns it in a minute,
-- samples, and their distance to the data. A map here is what has sample(shape, options), as a diffusion.FlowMap has.
--
--     local board = distill.tasks.checkerboard { count = 20000 }
--     local map = diffusion.FlowMap(board.network())
--     local distance, points = board.measure(map, { steps = 1 })
local ty = require "tycho"
local arguments = require "tycho.arguments"
local digits = require "tycho.distill.digits"
local models = require "tycho.models"
local points = require "tycho.distill.points"

local M = {}

--- A task of distill.tasks.
---@class DistillTask
---@field data fun(): TensorDataset  fields x and, where there are classes, label
---@field network fun(): Module
---@field sample fun(map: table, options: table): Tensor
---@field distance fun(x: Tensor): number
---@field measure fun(map: table, options: table): number, Tensor  the distance of samples from the same noise every
---  time, infinite where one of their numbers is; and the samples

local NOISE = 12345 -- of measure()

local function measured(task)
  function task.measure(map, options)
    arguments.expect("DistillTask.measure", "options", options, "a table")
    ty.manual_seed(NOISE)
    local x = task.sample(map, options)
    return x:isfinite():all():item() and task.distance(x) or math.huge, x
  end
  return task
end

local function with(options, more)
  for key, value in pairs(options) do if more[key] == nil then more[key] = value end end
  return more
end

--- Points of a checkerboard; the distance is the share that would have to move. options: count (20000: points to
-- measure with), points (100000: to train on), width (128: of the network), device ("cpu": of network and samples).
---@param options? { count?: integer, points?: integer, width?: integer, device?: string }
---@return DistillTask
function M.checkerboard(options)
  local count = "an integer >= 1"
  local o = arguments.read("distill.tasks.checkerboard", options, { count = 20000, points = 100000, width = 128,
    device = "cpu" },
    { count = count, points = count, width = count })
  return measured { distance = points.off_board,
    data = function() return ty.data.TensorDataset { x = points.checkerboard(o.points) } end,
    network = function() return models.TimeMLP { width = o.width, places = 6 }:to(o.device) end,
    sample = function(map, how) return map:sample({ o.count, 2 }, how) end }
end

--- The handwritten digits by class; the distance is Fréchet's, by a judge's features, to the held-out ones. folder:
-- where the judge is kept. options: count (1000: digits to measure with), width (192: of the network), judge_steps
-- (300), device ("cpu": of network and samples).
---@param folder string
---@param options? { count?: integer, width?: integer, judge_steps?: integer, device?: string }
---@return DistillTask
function M.digits(folder, options)
  local who, count = "distill.tasks.digits", "an integer >= 1"
  arguments.expect(who, "folder", folder, "a string")
  local o = arguments.read(who, options, { count = 1000, width = 192, judge_steps = 300, device = "cpu" },
    { count = count, width = count, judge_steps = count })
  local judge = digits.judge(folder, { steps = o.judge_steps })
  local labels = ty.arange(o.count, nil, 1, { device = o.device }) % 10
  return measured { distance = function(x) return judge:frechet(x) end,
    data = function()
      local all = digits.data():batch(ty.arange(#digits.data()))
      return ty.data.TensorDataset { x = all.image, label = all.label }
    end,
    network = function() return models.TimeMLP { features = 64, width = o.width, classes = 10 }:to(o.device) end,
    sample = function(map, how)
      return map:sample({ o.count, 1, 8, 8 }, with(how, { condition = { labels = labels } }))
    end }
end

return M
