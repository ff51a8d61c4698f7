--- Which pairs of a picture and a text to learn from, where many texts are not of their picture: scores of several
-- judges, what each of them would keep, and the union of that. Wang et al. 2025, "Open-Qwen2VL: Compute-Efficient
-- Pre-Training of Fully-Open Multimodal LLMs on Academic Resources" (arXiv 2504.00595) unites what a CLIP's scores keep
-- (Hessel et al. 2021, "CLIPScore") with what a tuned vision-language model grades well (tycho.vlm.grader).
--
--     local kept = pairs.union { pairs.best(clip_scores, 0.3), pairs.best(grades, 0.3) }
local ty = require "tycho"
local arguments = require "tycho.arguments"

local M = {}

--- Cosines of pairs of features, row by row, f32 [n]: with a CLIP's features the score by which it would filter.
---@param image Tensor  [n, d]
---@param text Tensor   [n, d]
---@return Tensor
function M.similarity(image, text)
  local who = "curation.pairs.similarity"
  arguments.expect(who, "image", image, "a tensor")
  arguments.expect(who, "text", text, "a tensor")
  local a, b = image.shape, text.shape
  if #a ~= 2 or #b ~= 2 or a[1] ~= b[1] or a[2] ~= b[2] then
    arguments.fail("%s: expected image and text [n, d], got %s and %s", who, arguments.describe(image),
      arguments.describe(text))
  end
  return (ty.nn.normalize(image) * ty.nn.normalize(text)):sum(-1)
end

--- Positions, from 0 and rising, of the share of pairs with the highest scores; of equal ones the first are kept.
---@param scores Tensor  [n]
---@param share number
---@return integer[]
function M.best(scores, share)
  local who = "curation.pairs.best"
  arguments.expect(who, "scores", scores, "a tensor")
  if scores.ndim ~= 1 or not scores:is_floating_point() then
    arguments.fail("%s: scores: expected a float tensor [n], got %s", who, arguments.describe(scores))
  end
  arguments.expect(who, "share", share, "a number in [0, 1]")
  local list, order = scores:tolist(), {}
  for i in ipairs(list) do order[i] = i end
  table.sort(order, function(a, b)
    if list[a] ~= list[b] then return list[a] > list[b] end
    return a < b
  end)
  local kept = {}
  for k = 1, math.floor(share * #list + 0.5) do kept[k] = order[k] - 1 end
  table.sort(kept)
  return kept
end

--- Positions that are in one of several lists or more, each once and rising.
---@param lists integer[][]
---@return integer[]
function M.union(lists)
  local who = "curation.pairs.union"
  arguments.expect(who, "lists", lists, "a list of tables")
  local seen, kept = {}, {}
  for i, list in ipairs(lists) do
    for _, place in ipairs(list) do
      if math.type(place) ~= "integer" then
        arguments.fail("%s: list %d: expected integers, got %s", who, i, arguments.describe(place))
      end
      if not seen[place] then seen[place], kept[#kept + 1] = true, place end
    end
  end
  table.sort(kept)
  return kept
end

--- The share of pairs at some positions (all of them without these) of which it is known that their text is another's.
---@param wrong Tensor  [n], 1 where it is
---@param positions? integer[]
---@return number
function M.noise(wrong, positions)
  local who = "curation.pairs.noise"
  arguments.expect(who, "wrong", wrong, "a tensor")
  arguments.expect(who, "positions", positions, "a list or nil")
  if wrong.ndim ~= 1 then arguments.fail("%s: wrong: expected [n], got %s", who, arguments.describe(wrong)) end
  local list, sum, count = wrong:tolist(), 0, 0
  for k = 1, positions and #positions or #list do
    local place = positions and positions[k] or k - 1
    if not list[place + 1] then
      arguments.fail("%s: positions: expected integers in [0, %d], got %s", who, #list - 1, tostring(place))
    end
    sum, count = sum + list[place + 1], count + 1
  end
  return count > 0 and sum / count or 0
end

return M
