--- A dense decoder as a mixture of experts: the neurons of each feed-forward network are divided among thin experts, of
-- which a router chooses some for each token. Zhang et al. 2022, "MoEfication: Transformer Feed-forward Layers are
-- Mixtures of Experts": neurons whose weights lie close together share an expert (balanced k-means), and a router looks
-- at the mean of these weights. What results is a Mixtral, or a Llava around one, that is trained on as any other.
--
--     local sparse = prune.moefy(model, { experts = 16, chosen = 8 })
local ty = require "tycho"
local arguments = require "tycho.arguments"
local models = require "tycho.models"
local vector = require("tycho.quant").vector

local M = {}

local WHO = "prune.moefy"

--- Divides the rows of a matrix [n, d] into groups of n / count, such that rows of a group point the same way: k-means
-- of the normalised rows, and then each row, those first that have most to lose, goes to the nearest centre with room.
-- Returns for each group the positions of its rows, from 0. options: rounds (15) and seed (0) of k-means.
---@param rows Tensor
---@param count integer
---@param options? { rounds?: integer, seed?: integer }
---@return integer[][]
function M.groups(rows, count, options)
  local who = "prune.moefy_groups"
  arguments.expect(who, "rows", rows, "a tensor")
  arguments.expect(who, "count", count, "an integer >= 1")
  local o = arguments.read(who, options, { rounds = 15, seed = 0 }, { rounds = "an integer >= 0",
    seed = "an integer" })
  if rows.ndim ~= 2 or rows.shape[1] % count ~= 0 or rows.shape[1] == 0 then
    arguments.fail("%s: rows: expected [n, d] with n a multiple of %d, got %s", who, count, arguments.describe(rows))
  end
  local distance = ty.no_grad(ty.scope, function()
    local x = rows:detach():to "f32"
    x = x / x:norm(2, 1, true):clamp(1e-12)
    local centres = vector.kmeans(x, { codewords = count, rounds = o.rounds, seed = o.seed })
    return (x:square():sum(1, true) - x:matmul(centres:transpose(0, 1)) * 2 + centres:square():sum(1)):tolist()
  end)
  local order, loss, groups = {}, {}, {}
  for g = 1, count do groups[g] = {} end
  for i, row in ipairs(distance) do
    local sorted = { table.unpack(row) }
    table.sort(sorted)
    order[i], loss[i] = i, (sorted[2] or sorted[1]) - sorted[1]
  end
  table.sort(order, function(a, b)
    if loss[a] ~= loss[b] then return loss[a] > loss[b] end
    return a < b
  end)
  local room = #distance // count
  for _, i in ipairs(order) do
    local best
    for g = 1, count do
      if #groups[g] < room and (not best or distance[i][g] < distance[i][best]) then best = g end
    end
    table.insert(groups[best], i - 1)
  end
  for _, group in ipairs(groups) do table.sort(group) end
  return groups
end

-- Fills a layer's experts and router with the weights of a feed-forward network.
local function fill(mixture, mlp, o)
  local gate, up, down = mlp.gate_proj.weight:detach(), mlp.up_proj.weight:detach(), mlp.down_proj.weight:detach()
  for e, group in ipairs(M.groups(gate, o.experts, { rounds = o.rounds, seed = o.seed })) do
    local index, expert = ty.tensor(group, { dtype = "i64" }):to { device = gate.device }, mixture.experts[e]
    expert.w1.weight:copy_(gate:index_select(0, index))
    expert.w3.weight:copy_(up:index_select(0, index))
    -- Where a router is undecided, a token's experts weigh 1 / chosen each, and together what they weighed before.
    expert.w2.weight:copy_(down:index_select(1, index) * o.chosen)
    mixture.gate.weight:narrow(0, e - 1, 1):copy_(gate:index_select(0, index):mean(0, true) * o.sharp)
  end
end

--- A copy of a model (a Llama or Mistral, or a Llava around one) whose feed-forward networks are mixtures of experts.
-- options: experts (16), chosen (8: of each token), sharp (1: of the router's logits, which are that often the mean of
-- an expert's gates), rounds (15) and seed (0) of the division. With all experts chosen and sharp = 0 it computes what
-- the model did.
---@param model LanguageModel
---@param options? { experts?: integer, chosen?: integer, sharp?: number, rounds?: integer, seed?: integer }
---@return LanguageModel
function M.moefy(model, options)
  arguments.expect(WHO, "model", model, "a module")
  local o = arguments.read(WHO, options, { experts = 16, chosen = 8, sharp = 1.0, rounds = 15, seed = 0 },
    { experts = "an integer >= 1", chosen = "an integer >= 1", sharp = "a finite number", rounds = "an integer >= 0",
      seed = "an integer" })
  local decoder = model.language_model or model
  local layers = decoder.model and decoder.model.layers
  local mlp = layers and layers[1] and layers[1].mlp
  if not mlp or not mlp.gate_proj or mlp.gate_proj.bias then
    arguments.fail("%s: model: expected a decoder with gated feed-forward networks without biases, got %s", WHO,
      arguments.describe(model))
  end
  local config = decoder:published_config()
  if o.chosen > o.experts then
    arguments.fail("%s: chosen: expected at most the %d experts, got %d", WHO, o.experts, o.chosen)
  end
  if config.intermediate_size % o.experts ~= 0 then
    arguments.fail("%s: experts: expected a number that divides the %d neurons of a layer, got %d", WHO,
      config.intermediate_size, o.experts)
  end
  config.architectures, config.attention_bias, config.mlp_bias = nil, nil, nil
  config.model_type, config.num_local_experts, config.num_experts_per_tok = "mixtral", o.experts, o.chosen
  config.intermediate_size = config.intermediate_size // o.experts
  local result
  if model.language_model then
    local whole = model:published_config()
    whole.text_config, whole.architectures = config, nil
    result = models.Llava(whole)
  else
    result = models.Mixtral(config)
  end
  result:to { device = model:device() }
  ty.no_grad(function()
    local old = model:state_dict()
    for name, tensor in pairs(result:state_dict()) do
      if old[name] then tensor:copy_(old[name]) end
    end
    local own = (result.language_model or result).model.layers
    for i, layer in ipairs(layers) do fill(own[i].block_sparse_moe, layer.mlp, o) end
  end)
  return result:train(model.training)
end

return M
