--- How many questions about pictures a model answers, by kind, and how two models compare on the same questions.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local Dialogue = require "tycho.vlm.dialogue"

local M = {}

--- Asks a model all questions of a list of batches { pictures = f32 [n, channels, h, w], or features = [n, features,
-- hidden] in their place, questions = n lists of { question, answer, kind } }. An answer is right when the greedy one
-- is, word for word. Returns the questions in their order, as a list of { kind = string, right = boolean }. options:
-- forward (more options of the model's forward()).
---@param model LanguageModel
---@param dialogue Dialogue
---@param batches table[]
---@param options? { forward?: table }
---@return { kind: string, right: boolean }[]
function M.ask(model, dialogue, batches, options)
  local who = "vlm.answers.ask"
  arguments.expect(who, "model", model, "a module")
  arguments.expect(who, "dialogue", dialogue, "a table")
  arguments.expect(who, "batches", batches, "a list of tables")
  local o = arguments.read(who, options, { forward = {} }, { forward = "a table" })
  local found, device, training = {}, model:device(), model.training
  model:eval()
  for _, batch in ipairs(batches) do
    local with = {}
    for key, value in pairs(o.forward) do with[key] = value end
    if dialogue.features > 0 then
      local key = batch.features and "features" or "pictures"
      with[key] = batch[key]:to { device = device }
    end
    local right = ty.scope(function() return Dialogue.right(model, dialogue:packed(batch.questions), with) end)
    for i, questions in ipairs(batch.questions) do
      for k, question in ipairs(questions) do
        found[#found + 1] = { kind = question.kind or "question", right = right[i][k] == true }
      end
    end
  end
  model:train(training)
  return found
end

local function check(who, what, found)
  arguments.expect(who, what, found, "a list of tables")
  for i, answer in ipairs(found) do
    if type(answer.kind) ~= "string" then
      arguments.fail("%s: %s: expected { kind = string, right = boolean }, got %s as number %d", who, what,
        arguments.describe(answer), i)
    end
  end
end

--- Shares of right answers of what ask() returned: by kind, and `all`, the mean of the kinds' shares, so that those
-- that are asked more often do not count for more.
---@param found { kind: string, right: boolean }[]
---@return table<string, number>
function M.shares(found)
  check("vlm.answers.shares", "found", found)
  local right, asked = {}, {}
  for _, answer in ipairs(found) do
    asked[answer.kind] = (asked[answer.kind] or 0) + 1
    right[answer.kind] = (right[answer.kind] or 0) + (answer.right and 1 or 0)
  end
  local shares, sum, kinds = {}, 0, 0
  for kind, count in pairs(asked) do
    shares[kind] = right[kind] / count
    sum, kinds = sum + shares[kind], kinds + 1
  end
  shares.all = kinds > 0 and sum / kinds or 0
  return shares
end

--- Two models on the same questions: by how much the second's mean of the kinds' shares is above the first's, and the
-- standard error of that difference. Questions are paired, so what both get right or wrong adds no noise.
---@param first { kind: string, right: boolean }[]
---@param second { kind: string, right: boolean }[]
---@return number difference
---@return number error
function M.paired(first, second)
  local who = "vlm.answers.paired"
  check(who, "first", first)
  check(who, "second", second)
  if #first ~= #second then
    arguments.fail("%s: expected answers to the same questions, got %d and %d", who, #first, #second)
  end
  local n, sum, squares, kinds = {}, {}, {}, 0
  for i, answer in ipairs(first) do
    local kind = answer.kind
    if kind ~= second[i].kind then
      arguments.fail("%s: expected the same questions, got the kinds %s and %s at %d", who, kind, second[i].kind, i)
    end
    local d = (second[i].right and 1 or 0) - (answer.right and 1 or 0)
    if not n[kind] then n[kind], sum[kind], squares[kind], kinds = 0, 0, 0, kinds + 1 end
    n[kind], sum[kind], squares[kind] = n[kind] + 1, sum[kind] + d, squares[kind] + d * d
  end
  local difference, variance = 0, 0
  for kind, count in pairs(n) do
    local mean = sum[kind] / count
    difference = difference + mean / kinds
    if count > 1 then
      local spread = (squares[kind] - count * mean * mean) / (count - 1)
      variance = variance + spread / count / (kinds * kinds)
    end
  end
  return difference, math.sqrt(variance)
end

return M
