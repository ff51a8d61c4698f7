--- Training a model that sees in stages, each mixed with text alone so that language is kept: pictures with what is to
-- be written of them, then questions. The order and the share of text are those of Chen et al. 2024, "A Single
-- Transformer for Scalable Vision-Language Modeling" (SOLO): classes, captions, instructions.
--
--     curriculum.run(model, dialogue, { { words = names, seen = pictures, steps = 60 },
--       { words = captions, seen = pictures, steps = 60 }, { questions = batches, steps = 60 } }, options)
local ty = require "tycho"
local answerer = require "tycho.zoo.answerer"
local arguments = require "tycho.arguments"
local captioner = require "tycho.zoo.captioner"
local models = require "tycho.models"
local vlm = require "tycho.vlm"

local expect = arguments.expect
local M = {}

local defaults = { project = arguments.none, texts = arguments.none, share = 0.0, room = 1024, lr = 2e-3, batch = 16,
  tune_lr = 2e-3, seed = 0 }
local kinds = { project = "a function", texts = "a list of tables", share = "a number in [0, 1)",
  room = "an integer > 0", lr = "a number > 0", batch = "an integer > 0", tune_lr = "a number > 0",
  seed = "an integer" }

local function read(who, model, dialogue, stages, options)
  expect(who, "model", model, "a module")
  expect(who, "dialogue", dialogue, "a table")
  expect(who, "stages", stages, "a list of tables")
  local o = arguments.read(who, options, defaults, kinds)
  expect(who, "project", o.project, "a function")
  if o.share > 0 then expect(who, "texts", o.texts, "a list of tables") end
  for i, stage in ipairs(stages) do
    expect(who, ("steps of stage %d"):format(i), stage.steps, "an integer >= 0")
    if type(stage.words) ~= "table" and type(stage.questions) ~= "table" then
      arguments.fail("%s: stage %d: expected words or questions, got %s", who, i, arguments.describe(stage))
    end
  end
  return o
end

-- The sequences of a stage with words.
local function sequences_of(dialogue, stage, o)
  local list = captioner.described(dialogue, stage.words)
  return o.share > 0 and captioner.mixed(list, o.texts, o.share) or list
end

-- Rows of text alone that go beside questions: their loss by their share of the tokens of both.
local function beside_of(o, per_step)
  if o.share == 0 then return nil end
  local room = math.max(128, math.floor(per_step * o.share / (1 - o.share)))
  local loader = vlm.packing.loader(o.texts, { room = room })
  return function(m) return vlm.Dialogue.loss(m, loader:next()) * (o.share / (1 - o.share)) end
end

-- The questions of so many pictures, one batch, and what is seen.
local function first_questions(stage, count)
  local batch = stage.questions[1]
  count = math.min(count, #batch.questions)
  return table.move(batch.questions, 1, count, 1, {}), batch.seen and batch.seen:narrow(0, 0, count)
end

--- Trains what is not frozen of a model through stages, of so many steps: { words = list, seen = [n, ...], steps }: a
-- text for each picture, or { questions = batches as answerer.seen() gives them, steps }. options: project (a function
-- of the model and what is seen that gives features), texts (sequences of text alone, as captioner.verses() gives them)
-- and share (0: of all tokens that are theirs), room (1024: tokens of a packed row, one a step), lr (2e-3), batch (16:
-- pictures with their questions of a step), tune_lr (2e-3), seed. Returns the loss that each stage ended with; one
-- without steps is left out.
---@param model LanguageModel
---@param dialogue Dialogue
---@param stages table[]
---@param options table
---@return number[]
function M.run(model, dialogue, stages, options)
  local o, losses = read("curriculum.run", model, dialogue, stages, options), {}
  for _, stage in ipairs(stages) do
    local loss
    if stage.steps > 0 and stage.words then
      local _
      _, loss = captioner.fit(model, sequences_of(dialogue, stage, o), { steps = stage.steps, lr = o.lr, room = o.room,
        seen = stage.seen, project = o.project })
    elseif stage.steps > 0 then
      local tokens = dialogue:packed((first_questions(stage, o.batch))).tokens:numel()
      loss = answerer.tune(model, dialogue, stage.questions, { steps = stage.steps, batch = o.batch, lr = o.tune_lr,
        seed = o.seed, project = o.project, beside = beside_of(o, tokens) })
    end
    losses[#losses + 1] = loss
  end
  return losses
end

--- Operations of a step of each of such stages, as step_operations() counts them: of one with words the mean of some
-- rows.
---@param model LanguageModel
---@param dialogue Dialogue
---@param stages table[]
---@param options table
---@return number[]
function M.operations(model, dialogue, stages, options)
  local o, list = read("curriculum.operations", model, dialogue, stages, options), {}
  for i, stage in ipairs(stages) do
    if stage.words then
      -- Rows differ: some are text, all of which is learnt, others pictures.
      local loader, rows = vlm.packing.loader(sequences_of(dialogue, stage, o), { room = o.room }), 16
      local sum = 0
      for _ = 1, rows do
        sum = sum + M.step_operations(model, function()
          return captioner.loss(model, loader, loader:next(), stage.seen, o.project)
        end)
      end
      list[i] = sum / rows
    else
      local questions, seen = first_questions(stage, o.batch)
      local packed = dialogue:packed(questions)
      local beside = beside_of(o, packed.tokens:numel())
      list[i] = M.step_operations(model, function()
        local loss = vlm.Dialogue.loss(model, packed, { features = seen and o.project(model, seen) })
        return beside and loss + beside(model) or loss
      end)
    end
  end
  return list
end

--- A residual network as the zoo's scene-resnet, new, that learns labels of pictures for as many operations as are
-- given, counted on its own steps: the encoder of a model that has one, where its training counts as well. labels:
-- several kinds, i64 [n] each. options: operations, features (0: of how many pictures the features are taken off the
-- operations, each once), channels ({ 8, 16, 32, 64 }), batch (32), lr (2e-3). Returns the network, its steps and the
-- mean loss of the last ten.
---@param pictures Tensor  f32 [n, 3, side, side]
---@param labels Tensor[]
---@param options { operations: number, features?: integer, channels?: integer[], batch?: integer, lr?: number }
---@return ResNet
---@return integer steps
---@return number loss
function M.encoder(pictures, labels, options)
  local who = "curriculum.encoder"
  expect(who, "pictures", pictures, "a tensor")
  expect(who, "labels", labels, "a list")
  local o = arguments.read(who, options, { operations = 0.0, features = 0, channels = { 8, 16, 32, 64 }, batch = 32,
    lr = 2e-3 }, { operations = "a number >= 0", features = "an integer >= 0", channels = "a list of integers",
    batch = "an integer > 0", lr = "a number > 0" })
  local sizes, placed, sum = {}, {}, 0
  for k, list in ipairs(labels) do
    expect(who, ("labels %d"):format(k), list, "a tensor")
    if pictures.ndim ~= 4 or list.ndim ~= 1 or list.shape[1] ~= pictures.shape[1] or list.shape[1] == 0 then
      arguments.fail("%s: expected pictures [n, 3, side, side] and labels [n], got %s and %s", who,
        arguments.describe(pictures), arguments.describe(list))
    end
    sizes[k], placed[k] = list:max():item() + 1, list:to { device = pictures.device }
    sum = sum + sizes[k]
  end
  if sum == 0 then arguments.fail("%s: labels: expected at least one kind, got none", who) end
  local network = models.ResNet { channels = o.channels, blocks = { 1, 1, 2, 1 }, small = true, classes = sum }
    :to(pictures.device)
  local loader = { next = function()
    return ty.randint(0, pictures.shape[1], { o.batch }):to { device = pictures.device }
  end }
  local function loss_of(net, at)
    local logits, first, loss = net(pictures:index_select(0, at)), 0, nil
    for k, list in ipairs(placed) do
      local own = ty.nn.cross_entropy(logits:narrow(1, first, sizes[k]), list:index_select(0, at))
      loss, first = loss and loss + own or own, first + sizes[k]
    end
    return loss
  end
  local each = M.step_operations(network, function() return loss_of(network, loader.next()) end)
  local kept = o.features * each / (3 * o.batch) -- backward is twice forward
  local steps = math.max(1, math.floor((o.operations - kept) / each + 0.5))
  local losses = ty.train.fit(network, loader, { steps = steps, lr = o.lr, loss = loss_of, warmup = 10, quiet = true })
  return network:eval(), steps, ty.stats.mean(table.move(losses, math.max(1, steps - 9), steps, 1, {}))
end

-- What counts: attention does not, of which packed rows compute little and the profile counts all.
local counted = { matmul = true, conv2d = true, conv2d_backward_input = true, conv2d_backward_weight = true }

--- Operations of one step: of the loss that a function gives, and of its gradients; products with weights and
-- convolutions, 2 for a multiplication and an addition, as ty.profile has them.
---@param model Module
---@param loss fun(): Tensor
---@return number
function M.step_operations(model, loss)
  expect("curriculum.step_operations", "model", model, "a module")
  expect("curriculum.step_operations", "loss", loss, "a function")
  local run, sum = ty.profile(function() loss():backward() end, { limits = { flops = 1, bandwidth = 1 } }), 0
  for _, event in ipairs(run.events) do sum = sum + (counted[event.op] and event.flops or 0) end
  model:zero_grad()
  return sum
end

return M
