--- Guidance: what is made of the network's predictions for several conditions. A guidance is a value with
--
--     guide(run, x, point)    the output that the step goes on with, of the network's kind
--
-- and run:evaluate(x, point, { "condition", "null" }) is how it asks: one call of the network on the batches of all
-- these branches, which returns a table of outputs by name. "condition" is what was asked for, "null" the null
-- condition, further names are those of the sampler's option `branches`. A new guidance is a file beside this one.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local adaptive = require "tycho.diffusion.guidance.adaptive"

local M = {}

local function inside(interval, point)
  if not interval then return true end
  local ratio = point.sigma / point.alpha
  return ratio > interval[1] and ratio <= interval[2]
end

local function read_interval(who, interval)
  if interval == nil then return end
  local low, high = type(interval) == "table" and interval[1], type(interval) == "table" and interval[2]
  if type(low) ~= "number" or type(high) ~= "number" or low > high or low ~= low or high ~= high then
    arguments.fail("%s: interval: expected { low, high } of sigma / alpha, got %s", who, type(interval) == "table"
      and ("{ %s, %s }"):format(arguments.describe(low), arguments.describe(high)) or arguments.describe(interval))
  end
end

-- Standard deviation of each sample, [n, 1, ...].
local function deviation(x)
  local shape = { x.shape[1] }
  for i = 2, x.ndim do shape[i] = 1 end
  return x:flatten(1):std(1):reshape(shape)
end

--- `guided` brought towards the standard deviation of `plain`, which large scales overshoot: a share `amount` of the
-- way. Lin et al. 2024, section 3.4.
---@param guided Tensor
---@param plain Tensor
---@param amount number
---@return Tensor
function M.rescale(guided, plain, amount)
  return guided * (deviation(plain) / deviation(guided) * amount + (1 - amount))
end

local ClassifierFree = {}
ClassifierFree.__index = ClassifierFree

--- Classifier-free guidance: null + scale (condition - null), in one call on twice the batch. Ho and Salimans 2022.
-- Scale 1 is the plain conditional prediction and scale 0 that of the null condition, each in a call on the batch
-- itself. options: scale (1; a number, or a function of the point); interval ({ low, high } of sigma / alpha: outside
-- of it the plain conditional prediction; Kynkäänniemi et al. 2024), rescale (0: see guidance.rescale).
function M.classifier_free(options)
  local self = ty.nn.options("guidance.classifier_free", options, { scale = 1, interval = ty.nn.none, rescale = 0 },
    { scale = false })
  if type(self.scale) ~= "number" and type(self.scale) ~= "function" then
    error("guidance.classifier_free: scale: expected a number or a function, got " .. type(self.scale), 2)
  end
  read_interval("guidance.classifier_free", self.interval)
  return setmetatable(self, ClassifierFree)
end

function ClassifierFree:guide(run, x, point)
  local scale = self.scale
  if type(scale) == "function" then scale = scale(point) end
  if scale == 1 or not run:has_condition() or not inside(self.interval, point) then
    return run:evaluate(x, point, { "condition" }).condition
  end
  if scale == 0 then return run:evaluate(x, point, { "null" }).null end
  local outputs = run:evaluate(x, point, { "condition", "null" })
  local guided = outputs.null + (outputs.condition - outputs.null) * scale
  return self.rescale > 0 and M.rescale(guided, outputs.condition, self.rescale) or guided
end

local Sum = {}
Sum.__index = Sum

--- Any number of directions: base + sum of scale (branch - from). Text and a picture to edit, each with its scale, as
-- InstructPix2Pix (Brooks et al. 2023) has them, with branches = { picture = { text = nothing, picture = picture } }:
--
--     guidance.sum { base = "null", terms = { { branch = "picture", from = "null", scale = 1.5 },
--       { branch = "condition", from = "picture", scale = 7 } } }
--
-- options: base ("null"), terms (a list of { branch, from (the base), scale, interval }).
function M.sum(options)
  local self = ty.nn.options("guidance.sum", options, { base = "null", terms = {} },
    { terms = "a list of tables" })
  for i, term in ipairs(self.terms) do
    if type(term.branch) ~= "string" or type(term.scale) ~= "number" then
      error(("guidance.sum: terms[%d]: expected { branch = name, scale = number }, got branch = %s, scale = %s"):format(
        i, tostring(term.branch), tostring(term.scale)), 2)
    end
    read_interval("guidance.sum", term.interval)
  end
  return setmetatable(self, Sum)
end

function Sum:guide(run, x, point)
  local names, seen, active = {}, {}, {}
  local function want(name)
    if not seen[name] then
      seen[name] = true
      names[#names + 1] = name
    end
  end
  want(self.base)
  for _, term in ipairs(self.terms) do
    if term.scale ~= 0 and inside(term.interval, point) then
      active[#active + 1] = term
      want(term.branch)
      want(term.from or self.base)
    end
  end
  local outputs = run:evaluate(x, point, names)
  local y = outputs[self.base]
  for _, term in ipairs(active) do
    y = y + (outputs[term.branch] - outputs[term.from or self.base]) * term.scale
  end
  return y
end

--- A number as classifier-free guidance of that scale; a guidance as it is; nil as none.
function M.read(who, given)
  if given == nil then return M.classifier_free() end
  if type(given) == "number" then return M.classifier_free { scale = given } end
  if type(given) == "table" and given.guide then return given end
  error(("%s: guidance: expected a number or a value of diffusion.guidance, got %s"):format(who, type(given)), 3)
end

-- Guidance that asks for less.
M.adaptive, M.trace = adaptive.adaptive, adaptive.trace
M.recorder, M.linear = adaptive.recorder, adaptive.linear

return M
