--- What of a picture a question asks for, as one vector: the features that its words attend to in the decoder's first
-- layer. Wu et al. 2026, "ScalSelect" (arXiv 2602.11636), and its reference code, which has the first layer's attention
-- and the states after that layer.
local ty = require "tycho"
local arguments = require "tycho.arguments"

--- The vector of each turn of a packed batch (vlm.Dialogue:packed), f32 [turns, hidden], turns in their order, or with
-- the option `whole` that of each row, by the words of all of its questions. The weights that a question's tokens give
-- to the picture's, averaged over heads and tokens, are made to sum to 1; of the largest of them as many are taken as
-- have the share `mass`, with the one that passes it, and the hidden states of these tokens after the first layer are
-- averaged. One forward pass gives those of all turns. options: mass (0.9), whole (false), and forward (options of the
-- model's forward(): pictures or features).
---@param model Llava
---@param batch table
---@param options { mass?: number, whole?: boolean, forward: table }
---@return Tensor vectors
---@return Tensor taken  bool [turns, features], which of the picture's tokens
return function(model, batch, options)
  local who = "vlm.attended"
  arguments.expect(who, "model", model, "a module")
  arguments.expect(who, "batch", batch, "a table")
  local o = arguments.read(who, options, { mass = 0.9, whole = false, forward = {} }, { mass = "a number in [0, 1]",
    forward = "a table" })
  local decoder = model.language_model
  local layer = decoder and decoder.model and decoder.model.layers and decoder.model.layers[1]
  if not layer or not layer.self_attn or not layer.self_attn.weights then
    arguments.fail("%s: model: expected a Llava whose layers have self_attn, got %s", who, arguments.describe(model))
  end
  local device = model:device()
  local turn = batch.turn:to { device = device }
  return ty.no_grad(function()
    local weights, states
    local remove = layer:register_forward_hook(function(_, outputs, stream, more, at)
      local x = layer.input_layernorm(more and stream + more or stream)
      weights = layer.self_attn:weights(x, at):to("f32"):mean { 1 } -- [n, t, t]
      local after, added = outputs, nil
      if type(outputs) == "table" then after, added = outputs[1], outputs[2] end
      states = added and after + added or after
    end)
    local with = { mask = batch.options.mask:to { device = device },
      positions = batch.options.positions:to { device = device }, places = batch.at:to { device = device } }
    for key, value in pairs(o.forward) do with[key] = value end
    local ok, problem = pcall(model.hidden, model, batch.tokens:to { device = device }, with)
    remove()
    if not ok then error(problem, 0) end
    -- Which tokens ask: of a turn, and no target.
    local n, t = turn.shape[1], turn.shape[2]
    local answers = ty.concat({ ty.zeros({ n, 1 }, { dtype = "bool", device = device }),
      batch.targets:to({ device = device }):ne(-100):narrow(1, 0, t - 1) }, 1)
    local most = turn:max():item()
    local asks = ty.arange(1, most + 1, { device = device }):reshape(1, most, 1):eq(turn:unsqueeze(1))
      :logical_and(answers:logical_not():unsqueeze(1)):to "f32" -- [n, turns, t]
    local counts = turn:max({ 1 }):tolist()
    if o.whole then
      asks, most = asks:sum({ 1 }, true), 1
      for i = 1, n do counts[i] = math.min(counts[i], 1) end
    end
    local features = turn:eq(0):to("i64"):sum({ 1 }):max():item()
    local given = asks:matmul(weights:narrow(2, 0, features)) -- the picture is at the front of each row
    given = given / given:sum({ -1 }, true):clamp(1e-30)
    local sorted, order = given:sort(2, true)
    local before = sorted:cumsum(2) - sorted
    local taken = ty.zeros(given.shape, { device = device }):scatter(2, order, before:le(o.mass):to "f32")
    local vectors = (taken / taken:sum({ -1 }, true)):matmul(states:narrow(1, 0, features):to "f32")
    -- Rows have different numbers of turns.
    local present = {}
    for i, count in ipairs(counts) do
      for k = 1, count do present[#present + 1] = (i - 1) * most + k - 1 end
    end
    local index = ty.tensor(present, { dtype = "i64" }):to { device = device }
    return vectors:flatten(0, 1):index_select(0, index), taken:flatten(0, 1):index_select(0, index):to "bool"
  end)
end
