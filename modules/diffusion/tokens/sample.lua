--- The loop of generators over tokens: see tycho.diffusion.tokens.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local conditions = require "tycho.diffusion.condition"

local expect, none = arguments.expect, arguments.none
local WHO = "tokens.sample"

local function halves(x, n) return x:narrow(0, 0, n), x:narrow(0, n, n) end

--- Draws tokens in the steps of a way, one sample for each of the condition. options: guidance (1: a number, or a
-- function of how far the steps have got, from 0 to 1, that returns one; Ho and Salimans 2022), draw (what makes tokens
-- of what a network says: tokens.categorical() unless the way has one of its own), null (the condition that means
-- anything, as condition.null takes it), seed (of what is drawn; none: the generator goes on).
---@param way table
---@param condition table
---@param options? table
---@return any  what the way ends with
local function sample(way, condition, options)
  expect(WHO, "way", way, "a table")
  for _, name in ipairs { "begin", "predict", "take", "finish" } do
    expect(WHO, "way." .. name, way[name], "a function")
  end
  expect(WHO, "condition", condition, "a table")
  local o = arguments.read(WHO, options, { guidance = 1, draw = none, null = none, seed = none },
    { guidance = "a finite number or a function", draw = "a function", null = "a table", seed = "an integer" })
  local first = conditions.tensors(condition)[1]
  if not first then arguments.fail("%s: condition: expected at least one tensor, got an empty table", WHO) end
  local n, draw = first[2].shape[1], o.draw or way.draw or require("tycho.diffusion.tokens.draw").categorical()
  conditions.check_batch(WHO, condition, n)
  local guided = o.guidance ~= 1 and conditions.concat { condition,
    conditions.null(way.model, condition, o.null) } or nil
  local function run()
    local state = way:begin(n)
    for step = 1, way.steps do
      local scale = o.guidance
      if type(scale) == "function" then scale = scale(way.steps == 1 and 1 or (step - 1) / (way.steps - 1)) end
      state = ty.scope(function()
        local said, other = way:predict(state, step, guided or condition), nil
        if guided then said, other = halves(said, n) end
        return way:take(state, step, draw(said, other, scale, step))
      end)
    end
    return way:finish(state)
  end
  return ty.no_grad(function() return o.seed and ty.data.with_seed(o.seed, run) or run() end)
end

return sample
