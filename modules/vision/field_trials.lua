--- Fits of fields that are compared: tasks, ways, and races between them.
--
--     local task = trials.picture(image, { batch = 8192 })
--     local ways = trials.race(task, { { name = "hash", make = models.HashField, rate = 1e-2 }, ... }, 20)
local ty = require "tycho"
local arguments = require "tycho.arguments"
local fields = require "tycho.vision.fields"

local M = {}

local kinds = { batch = "an integer >= 1", device = "a string", seed = "an integer", places = "an integer >= 2" }

--- Colours of a picture, learnt from seven pixels of eight, `batch` (8192) at a time; the score is the PSNR at the
-- others.
---@param image Tensor  u8 [c, h, w]
---@param options? {batch: integer, seed: integer, device: string}
---@return table task  { inputs, outputs, image, loss = fn(field, batch), score = fn(field) }
function M.picture(image, options)
  local o = arguments.read("field_trials.picture", options, { batch = 8192, seed = 0, device = "cpu" }, kinds)
  local known = fields.pixels(image, { seed = o.seed })
  local rest = known.rest
  for _, part in ipairs { known, rest } do
    part.places, part.colours = part.places:to(o.device), part.colours:to(o.device)
  end
  return { inputs = 2, outputs = image.shape[1], image = image,
    loss = function(field, batch)
      local at = ty.randint(0, known.places:size(0), { batch or o.batch }):to(o.device)
      return (field(known.places:index_select(0, at)) - known.colours:index_select(0, at)):square():mean()
    end,
    score = function(field) return fields.psnr(field(rest.places), rest.colours) end }
end

--- Signed distances of fields.still_life, learnt from samples that are new in each step, by errors relative to the
-- distance; the score is the mean error in sides at `places` (20000) held-out samples, negative.
---@param options? {batch: integer, places: integer, seed: integer, device: string}
---@return table task  { inputs, outputs, places, loss = fn(field, batch), score = fn(field) }
function M.shape(options)
  local o = arguments.read("field_trials.shape", options, { batch = 8192, places = 20000, seed = 0, device = "cpu" },
    kinds)
  ty.manual_seed(o.seed)
  local places, wanted = fields.shape_samples(o.places, { device = o.device })
  return { inputs = 3, outputs = 1, places = places,
    loss = function(field, batch)
      local p, d = fields.shape_samples(batch or o.batch, { device = o.device })
      return ((field(p):squeeze(1) - d):abs() / (d:abs() + 0.01)):mean()
    end,
    score = function(field) return -(field(places):squeeze(1) - wanted):abs():mean():item() end }
end

--- Mean degrees between a field's normals and those of fields.still_life.
---@param field fun(places: Tensor): Tensor
---@param places Tensor  [n, 3]
---@return number
function M.angle(field, places)
  local mine, true_ones = fields.normals(field, places), fields.normals(fields.signed_distance, places)
  return (mine * true_ones):sum(1):clamp(-1, 1):acos():mean():item() * 180 / math.pi
end

--- Lets candidates fit a task for the same processor time each (fields.race), by Adam at a rate of their own. A
-- candidate is { make = class of fields, o = its options besides inputs and outputs, rate =, batch = (the task's) }.
-- Returns for each in turn { candidate, field, score, steps, curve }.
---@param task table
---@param candidates table[]
---@param seconds number
---@param options? {seed: integer, device: string}
---@return table[]
function M.race(task, candidates, seconds, options)
  arguments.expect("field_trials.race", "task", task, "a table")
  arguments.expect("field_trials.race", "candidates", candidates, "a list of tables")
  local o = arguments.read("field_trials.race", options, { seed = 0, device = "cpu" }, kinds)
  local ways, result = {}, {}
  for i, candidate in ipairs(candidates) do
    ty.manual_seed(o.seed)
    local given = { inputs = task.inputs, outputs = task.outputs }
    for key, value in pairs(candidate.o or {}) do given[key] = value end
    local field = candidate.make(given):to(o.device)
    local optimizer = ty.optim.Adam(field:parameters(), { lr = candidate.rate, beta2 = 0.99, eps = 1e-15 })
    result[i] = { candidate = candidate, field = field }
    ways[i] = {
      step = function() ty.scope(function() optimizer:step(task.loss(field, candidate.batch)) end) end,
      score = function() return ty.no_grad(function() return ty.scope(task.score, field) end) end,
    }
  end
  for i, way in ipairs(fields.race(ways, seconds)) do
    result[i].score, result[i].steps, result[i].curve = ways[i].score(), way.steps, way.curve
  end
  return result
end

return M
