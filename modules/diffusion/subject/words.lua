--- How far words are found in a picture, by a painter itself: the error of its predictions under the words, against
-- that under other words. Li et al. 2023, "Your Diffusion Model is Secretly a Zero-Shot Classifier".
local ty = require "tycho"
local arguments = require "tycho.arguments"
local predictions = require "tycho.diffusion.prediction"

--- The share of other prompts under which a painter's error is larger than under the prompt, f32 [n], for pictures u8
-- [n, 3, h, w]; others: a list of other prompts for each. options: draws (3: of noise, the same for all prompts), at
-- (0.6: the schedule's unit of time), seed (0).
---@param painter TextToImage
---@param pictures Tensor
---@param prompts string[]
---@param others string[][]
---@param options? { draws?: integer, at?: number, seed?: integer }
---@return number[]
return function(painter, pictures, prompts, others, options)
  local who = "subject.words"
  arguments.expect(who, "painter", painter, "a table")
  arguments.expect(who, "pictures", pictures, "a tensor")
  arguments.expect(who, "prompts", prompts, "a list of strings")
  arguments.expect(who, "others", others, "a list of tables")
  local o = arguments.read(who, options, { draws = 3, at = 0.6, seed = 0 }, { draws = "an integer >= 1",
    at = "a number in (0, 1)", seed = "an integer" })
  local objective, n = painter.process.objective, #prompts
  local x0 = painter:encode(pictures)
  local t = painter.process.schedule:from_unit(ty.full({ n }, o.at, { device = x0.device }))
  local function errors(words) -- f32 [n]
    local condition, sum = painter:condition(words), 0
    for draw = 1, o.draws do
      local noise = ty.data.with_seed(o.seed + draw, function() return ty.randn_like(x0) end)
      local noisy = objective:noisy(x0, t, noise)
      local wanted = predictions.target(objective.predict, x0, noise, noisy.alpha, noisy.sigma, objective.data)
      local said = objective:output(painter.network, noisy, condition)
      sum = sum + (said - wanted):square():flatten(1):mean { 1 }
    end
    return sum
  end
  return ty.no_grad(function()
    local own, won = errors(prompts), ty.zeros({ n }, { device = x0.device })
    local count = #others[1]
    for k = 1, count do
      local words = {}
      for i = 1, n do words[i] = others[i][k] end
      won = won + errors(words):gt(own):to "f32"
    end
    return (won / count):tolist()
  end)
end
