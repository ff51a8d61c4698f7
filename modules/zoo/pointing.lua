--- Where the things are that questions name, and how many, as labels of the questions' own tokens: how a model that
-- answers questions about scenes learns to find them.
--
-- Whether an answer is right says little of where to look, and one in seven questions asks where something is. So such
-- a model learnt from answers alone in 9,000 steps where something is, but not where the thing is that it was asked
-- for: of scenes of two objects it got 0.58 of the places right, though its features tell them to 0.97. Here a linear
-- layer reads from the hidden state of each word that names a thing, in any question, in which of the picture's places
-- that is; after 600 steps so 0.80 are right. And it reads how many there are. The layer is thrown away.
--
--     local pointer = zoo.pointing.new(tokenizer)
--     pointer:attach(model, { layer = 2 })            -- model.pointer, trained with the model
--     local answers, points = pointer:loss(model, dialogue:packed(batch.questions), batch, { features = features })
--     pointer:detach(model)
local ty = require "tycho"
local arguments = require "tycho.arguments"
local datasets = require "tycho.datasets"
local judge = require "tycho.zoo.judge"
local vlm = require "tycho.vlm"

local nn = ty.nn
local M = {}

local COUNTS = 6 -- that are told apart: none, one, and so on to five or more

--- What points, by the words of a tokenizer, and the layer that it gave a model.
---@class Pointer
---@field object_of table<integer, integer>  the number, from 0, of the object that a token names
---@field layer integer
---@field side integer
local Pointer = {}
Pointer.__index = Pointer
Pointer.__name = "Pointer"

--- What points by the words of a tokenizer of scenes. The last token of a name, or of its plural, stands for the object
-- unless another object's name ends so too.
---@param tokenizer Tokenizer
---@return Pointer
function M.new(tokenizer)
  if not pcall(ty.tokenizer.fields, tokenizer) then
    arguments.fail("pointing.new: tokenizer: expected a tokenizer, got %s", arguments.describe(tokenizer))
  end
  local object_of, shared = {}, {}
  for i, object in ipairs(datasets.scenes.objects) do
    for _, word in ipairs { object.name, object.plural } do
      local ids = tokenizer:encode(" " .. word):tolist()
      local last = ids[#ids]
      if object_of[last] and object_of[last] ~= i - 1 then shared[last] = true end
      object_of[last] = i - 1
    end
  end
  for id in pairs(shared) do object_of[id] = nil end
  return setmetatable({ object_of = object_of }, Pointer)
end

--- Gives a model the layer that reads places and counts from the hidden states of layer `layer`, as model.pointer, so
-- that it is trained and kept in checkpoints with the model. options: layer (2), side (8: of the picture's places).
---@param model Llava
---@param options? { layer?: integer, side?: integer }
function Pointer:attach(model, options)
  local who = "Pointer:attach"
  arguments.expect(who, "model", model, "a module")
  local o = arguments.read(who, options, { layer = 2, side = 8 },
    { layer = "an integer >= 1", side = "an integer >= 1" })
  local layers = model.language_model and model.language_model.model.layers or {}
  if not layers[o.layer] then
    arguments.fail("%s: layer: expected one of the model's %d, got %d", who, #layers, o.layer)
  end
  self.layer, self.side = o.layer, o.side
  local width = model.language_model.config.hidden_size
  model.pointer = nn.Linear(width, o.side * o.side + 1 + COUNTS):to(model:device())
end

--- Takes it away again.
---@param model Llava
function Pointer:detach(model)
  arguments.expect("Pointer:detach", "model", model, "a module")
  if model.pointer then nn.surgery.remove(model, "pointer") end
  self.layer = nil
end

-- Of the tokens of a packed batch those that name objects: where they are in the flat batch, of each the row of all
-- scenes' objects that is its own, and how many of them the scene has.
local function nouns(self, tokens, scenes, objects)
  local at, rows, counts, length = {}, {}, {}, tokens.shape[2]
  for i, row in ipairs(tokens:tolist()) do
    local count = {}
    for _, object in ipairs(scenes[i].objects) do count[object.object] = (count[object.object] or 0) + 1 end
    for t, id in ipairs(row) do
      local object = self.object_of[id]
      if object then
        at[#at + 1], rows[#rows + 1] = (i - 1) * length + t - 1, (i - 1) * objects + object
        counts[#counts + 1] = math.min(count[object] or 0, COUNTS - 1)
      end
    end
  end
  return at, rows, counts
end

--- The labels of the words of a packed batch that name objects: where they are in its tokens [n, t], flat, i64 [m]; in
-- which places of the picture what they name is, as shares, f32 [m, side * side + 1], of which the last says that it is
-- nowhere; and how many of it there are, at most five, i64 [m]. nil where no word names an object.
---@param packed table  of Dialogue:packed()
---@param batch table   the scenes of its rows: owner, boxes, scene
---@param side integer
---@return Tensor? at
---@return Tensor? places
---@return Tensor? counts
function Pointer:labels(packed, batch, side)
  arguments.expect("Pointer:labels", "packed", packed, "a table")
  arguments.expect("Pointer:labels", "batch", batch, "a table")
  local cells = judge.cells(batch, side) -- [n, places, objects + 1]
  local objects = cells.shape[3]
  local at, rows, counts = nouns(self, packed.tokens, batch.scene, objects)
  if #at == 0 then return nil end
  local function indices(list) return ty.tensor(list, { dtype = "i64" }):to { device = cells.device } end
  local shown = cells:transpose(1, 2):flatten(0, 1):index_select(0, indices(rows))
  local all = shown:sum(1, true)
  return indices(at), ty.concat({ shown / all:clamp(1e-6), all:eq(0):to "f32" }, 1), indices(counts)
end

--- The loss of the answers of a packed batch (Dialogue.loss), and that of where, and at how many, the words of its
-- questions and answers point; 0 where none names an object. options: as of Dialogue.loss().
---@param model Llava  with the layer that attach() gave it
---@param packed table
---@param batch table
---@param options? table
---@return Tensor answers
---@return Tensor points
function Pointer:loss(model, packed, batch, options)
  local who = "Pointer:loss"
  arguments.expect(who, "model", model, "a module")
  if not self.layer or not model.pointer then
    arguments.fail("%s: model: expected one with the layer of Pointer:attach(), got one without", who)
  end
  local hidden
  local unhook = model.language_model.model.layers[self.layer]:register_forward_hook(function(_, outputs)
    hidden = outputs[1]
  end)
  local ok, answers = pcall(vlm.Dialogue.loss, model, packed, options)
  unhook()
  if not ok then error(answers, 0) end
  local at, places, counts = self:labels(packed, batch, self.side)
  if not at then return answers, answers:detach() * 0 end
  local said, all = model.pointer(hidden:flatten(0, 1):index_select(0, at)), places.shape[2]
  local found = -(places * said:narrow(1, 0, all):log_softmax(-1)):sum(-1):mean()
  return answers, found + nn.cross_entropy(said:narrow(1, all, COUNTS), counts)
end

return M
