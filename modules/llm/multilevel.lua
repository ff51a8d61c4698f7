--- Multi-level training: a model is coalesced to half its width and depth, the small one is trained, de-coalesced, and
-- the large one goes on from between the two. Zou, Zhang and Deng 2024, "A Multi-Level Framework for Accelerating
-- Training Transformer Models". For decoders with the parameter names of Llama whose head is not tied.
--
--     local small = multilevel.coalesce(model)
--     train(small)
--     multilevel.interpolate(model, multilevel.decoalesce(small, model), 0.25)
--     train(model)
local ty = require "tycho"
local arguments = require "tycho.arguments"

local fail = arguments.fail
local M = {}

-- What the dimensions of a parameter are: "hidden", "heads", "groups" (of keys and values) and "inner" are halved;
-- where a dimension is that of inputs, its pairs are added, elsewhere averaged, so that neurons which are alike in
-- pairs are one neuron afterwards and the function is the same.
local roles = {
  { "embed_tokens%.weight$", { false, "hidden" } },
  { "lm_head%.weight$", { false, "hidden", inputs = true } },
  { "q_proj%.weight$", { "heads", "hidden", inputs = true } },
  { "[kv]_proj%.weight$", { "groups", "hidden", inputs = true } },
  { "o_proj%.weight$", { "hidden", "heads", inputs = true } },
  { "gate_proj%.weight$", { "inner", "hidden", inputs = true } },
  { "up_proj%.weight$", { "inner", "hidden", inputs = true } },
  { "down_proj%.weight$", { "hidden", "inner", inputs = true } },
  { "q_proj%.bias$", { "heads" } }, { "[kv]_proj%.bias$", { "groups" } }, { "[og]_proj%.bias$", { "hidden" } },
  { "down_proj%.bias$", { "hidden" } }, { "gate_proj%.bias$", { "inner" } }, { "up_proj%.bias$", { "inner" } },
  { "norm%.weight$", { "hidden" } },
}

local function role_of(who, name)
  for _, entry in ipairs(roles) do
    if name:find(entry[1]) then return entry[2] end
  end
  fail("%s: model: expected the parameter names of Llama, got %s", who, name)
end

local function config_of(who, what, model)
  if not arguments.is_module(model) or type(model.config) ~= "table" or not model.config.num_hidden_layers then
    fail("%s: %s: expected a decoder with the parameter names of Llama, got %s", who, what, arguments.describe(model))
  end
  if model.config.tie_word_embeddings then
    fail("%s: %s: its head is tied to the embeddings, which would be averaged and added at once; expected "
      .. "tie_word_embeddings = false", who, what)
  end
  return model.config
end

-- The places of a dimension that go together: neurons one by one, heads as a whole.
local function unit(config, role) return (role == "heads" or role == "groups") and config.head_dim or 1 end

-- Halves or doubles dimension `dim` of t: its units 2i and 2i + 1 become unit i, or the other way round.
local function halve(t, dim, size, inputs)
  local count = t:size(dim) // size
  local pairs_ = t:unflatten(dim, { count // 2, 2, size })
  local joined = inputs and pairs_:sum(dim + 1) or pairs_:mean(dim + 1)
  return joined:flatten(dim, dim + 1)
end

local function double(t, dim, size, inputs)
  local count = t:size(dim) // size
  local units = t:unflatten(dim, { count, size }):unsqueeze(dim + 1)
  local copies = ty.concat({ units, units }, dim + 1):flatten(dim, dim + 2)
  return inputs and copies * 0.5 or copies
end

local function each_dimension(who, name, t, config, change)
  local role = role_of(who, name)
  for k, what in ipairs(role) do
    if what then t = change(t, k - 1, unit(config, what), role.inputs and k == 2) end
  end
  return t
end

-- A new model of the class with some keys of the config changed; heads stay as wide as they are.
local function made(model, config, changes)
  local copy = {}
  for key, value in pairs(config.given) do copy[key] = value end
  copy.head_dim = config.head_dim
  for key, value in pairs(changes) do copy[key] = value end
  local new = getmetatable(model)(copy)
  local p = model:parameters()[1]
  return new:to { device = p.device, dtype = p.dtype }
end

-- "model.layers.3.mlp" to 3 and "model.layers.%d.mlp".
local function place(name)
  local before, index, after = name:match "^(.-layers%.)(%d+)(%..*)$"
  if not index then return nil, name end
  return math.tointeger(index), before .. "%d" .. after
end

-- Fills `new`: parameter `name` of layer i is fn(i, the name with %d in place of the layer), of others fn(nil, name).
local function fill(new, fn)
  ty.no_grad(function()
    for name, p in new:named_parameters() do
      ty.scope(function() p:copy_(fn(place(name))) end)
    end
  end)
  return new
end

local function parameters_by_name(model)
  local list = {}
  for name, p in model:named_parameters() do list[name] = p:detach() end
  return list
end

local switches = { width = true, depth = true }

local function even(who, config, o)
  local wanted = { num_hidden_layers = o.depth, hidden_size = o.width, intermediate_size = o.width,
    num_attention_heads = o.width, num_key_value_heads = o.width }
  local changes = {}
  for key, is_halved in pairs(wanted) do
    if is_halved then
      if config[key] % 2 ~= 0 then fail("%s: model: %s: expected an even number, got %d", who, key, config[key]) end
      changes[key] = config[key] // 2
    end
  end
  return changes
end

--- A model of half the width and half the depth whose neurons, heads and layers are pairs of neighbours of `model`:
-- outputs averaged, inputs added, layers averaged (section 3.1, with F averaging pairs and R neighbouring layers).
-- options: width (true), depth (true): what is halved.
---@param model LanguageModel
---@param options? {width?: boolean, depth?: boolean}
---@return LanguageModel
function M.coalesce(model, options)
  local who = "multilevel.coalesce"
  local config = config_of(who, "model", model)
  local o = arguments.read(who, options, switches)
  local new = made(model, config, even(who, config, o))
  local from = parameters_by_name(model)
  local function halved(name)
    return o.width and each_dimension(who, name, from[name], config, halve) or from[name]
  end
  return fill(new, function(layer, name)
    if not layer then return halved(name) end
    if not o.depth then return halved(name:format(layer)) end
    return (halved(name:format(2 * layer)) + halved(name:format(2 * layer + 1))) * 0.5
  end)
end

--- A model of the size of `like` from one that has half its width, depth or both: neurons, heads and layers are copied,
-- weights from a copied neuron halved (section 3.2). What coalesce() makes of it is `small` again; the function is that
-- of `small` where only the width is doubled.
---@param small LanguageModel
---@param like LanguageModel
---@return LanguageModel
function M.decoalesce(small, like)
  local who = "multilevel.decoalesce"
  local config, goal = config_of(who, "small", small), config_of(who, "like", like)
  local width, depth = goal.hidden_size ~= config.hidden_size, goal.num_hidden_layers ~= config.num_hidden_layers
  local expected = even(who, goal, { width = width, depth = depth })
  for key, value in pairs(expected) do
    if config[key] ~= value then
      fail("%s: small: %s: expected half of %d, got %d", who, key, goal[key], config[key])
    end
  end
  local from = parameters_by_name(small)
  return fill(made(like, goal, {}), function(layer, name)
    if layer then name = name:format(depth and layer // 2 or layer) end
    return width and each_dimension(who, name, from[name], config, double) or from[name]
  end)
end

--- Moves `model` towards another of its size: (1 - alpha) of its own weights and alpha of the other's (equation 9),
-- which tells the copied neurons apart.
---@param model LanguageModel
---@param other LanguageModel
---@param alpha number
---@return LanguageModel model
function M.interpolate(model, other, alpha)
  local who = "multilevel.interpolate"
  arguments.expect(who, "model", model, "a module")
  arguments.expect(who, "other", other, "a module")
  arguments.expect(who, "alpha", alpha, "a number in [0, 1]")
  local theirs = parameters_by_name(other)
  ty.no_grad(function()
    for name, p in model:named_parameters() do
      local q = theirs[name]
      if not q or table.concat(q.shape, ",") ~= table.concat(p.shape, ",") then
        fail("%s: other: %s: expected [%s], got %s", who, name, table.concat(p.shape, ", "),
          q and "[" .. table.concat(q.shape, ", ") .. "]" or "none")
      end
      p:lerp_(q, alpha)
    end
  end)
  return model
end

--- A model of twice the depth: the layers, and the layers once more on top of them. Gong et al. 2019, "Efficient
-- Training of BERT by Progressively Stacking": what multi-level training is compared with.
---@param model LanguageModel
---@return LanguageModel
function M.stack(model)
  local config = config_of("multilevel.stack", "model", model)
  local count, from = config.num_hidden_layers, parameters_by_name(model)
  return fill(made(model, config, { num_hidden_layers = 2 * count }), function(layer, name)
    return from[layer and name:format(layer % count) or name]
  end)
end

--- Floating-point operations of a training step on `tokens` tokens in rows of `length`, from shapes: two for each
-- weight of a matrix that a token is multiplied with, and those of attention over all positions of a row; three times
-- that with the backward pass.
---@param model LanguageModel
---@param tokens integer
---@param length integer
---@return integer
function M.flops(model, tokens, length)
  local who = "multilevel.flops"
  local config = config_of(who, "model", model)
  arguments.expect(who, "tokens", tokens, "an integer >= 1")
  arguments.expect(who, "length", length, "an integer >= 1")
  local weights = 0
  for name, p in model:named_parameters() do
    if p.ndim == 2 and not name:find "embed_tokens" then weights = weights + p:numel() end
  end
  local attention = 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * length
  return 3 * 2 * tokens * (weights + attention)
end

--- A V-cycle of two levels: `model` is trained for `before` steps, what it is coalesced to for `small`, and then, moved
-- towards the de-coalesced one by alpha, for `after` (Algorithm 1). train(model, steps, stage) does the training, stage
-- being "before", "small" or "after". Returns the small model.
---@param model LanguageModel
---@param train fun(model: LanguageModel, steps: integer, stage: string)
---@param options {before: integer, small: integer, after: integer, alpha?: number, width?: boolean, depth?: boolean}
---@return LanguageModel small
function M.vcycle(model, train, options)
  local who = "multilevel.vcycle"
  arguments.expect(who, "train", train, "a function")
  local o = arguments.read(who, options, { before = 0, small = 0, after = 0, alpha = 0.25, width = true, depth = true },
    { before = "an integer >= 0", small = "an integer >= 0", after = "an integer >= 0", alpha = "a number in [0, 1]" })
  train(model, o.before, "before")
  local small = M.coalesce(model, { width = o.width, depth = o.depth })
  train(small, o.small, "small")
  M.interpolate(model, M.decoalesce(small, model), o.alpha)
  train(model, o.after, "after")
  return small
end

return M
