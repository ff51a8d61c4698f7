--- What the routers of a mixture of experts chose, recorded: how many tokens a layer sends to which expert, how much
-- its router wants each, and what the routers of the next layers would say of what this layer sees.
local ty = require "tycho"
local arguments = require "tycho.arguments"

-- A layer of experts is a module with a router `gate` and a list `experts`, and of what it takes of them `chosen`.
local function layers_of(who, model)
  local found = {}
  for _, module in model:named_modules() do
    local chosen = rawget(module, "chosen")
    local ok, gate, experts = pcall(function() return module.gate, module.experts end)
    if ok and gate and experts and math.type(chosen) == "integer" then found[#found + 1] = module end
  end
  if #found == 0 then
    arguments.fail("%s: model: expected layers of experts (a router `gate`, `experts` and `chosen`), found none", who)
  end
  return found
end

-- Of shares [tokens, experts]: tokens by expert and mean share by expert, of rows first to last.
local function entry_of(shares, chosen, first, count)
  local part = shares:narrow(0, first, count)
  local _, experts = part:topk(chosen)
  return { load = experts:flatten():one_hot(shares.shape[2]):sum(0):tolist(), score = part:mean(0):tolist() }
end

--- Runs the model once over a text and records its routers, as if the first `prompt` tokens came at once and the others
-- one by one: since attention looks back alone, each token is routed as it would be then. Returns a trace:
--   experts, chosen   of a layer, and of a token
--   steps             the prompt, then each token: { tokens, layers = { { load, score, ahead } ... } }, where load and
--                     score are lists by expert (tokens, and the mean share of the router's softmax), and ahead[j] the
--                     load and score of the layer j further on by this layer's input
-- options: prompt (1), ahead (3: layers that are foretold).
---@param model Module
---@param tokens Tensor  i64 [1, t]
---@param options? { prompt?: integer, ahead?: integer }
---@return table trace
return function(model, tokens, options)
  local who = "offload.record_routing"
  arguments.expect(who, "model", model, "a module")
  arguments.expect(who, "tokens", tokens, "a tensor")
  local o = arguments.read(who, options, { prompt = 1, ahead = 3 },
    { prompt = "an integer >= 1", ahead = "an integer >= 0" })
  if tokens.ndim ~= 2 or tokens.shape[1] ~= 1 or tokens.shape[2] < o.prompt then
    arguments.fail("%s: tokens: expected [1, t] with t of at least %d, got %s", who, o.prompt,
      arguments.describe(tokens))
  end
  local layers = layers_of(who, model)
  local shares, undo = {}, {}
  for l, layer in ipairs(layers) do
    shares[l] = {}
    undo[l] = layer:register_forward_pre_hook(function(_, given)
      local x = ty.is_tensor(given) and given or given[1]
      x = x:reshape(-1, x.shape[#x.shape])
      for j = 0, math.min(o.ahead, #layers - l) do
        shares[l][j] = ty.keep(layers[l + j].gate(x):to("f32"):softmax(-1))
      end
    end)
  end
  local ok, problem = pcall(ty.no_grad, function() ty.scope(function() model(tokens) end) end)
  for _, fn in ipairs(undo) do fn() end
  if not ok then error(problem, 0) end
  local trace = { experts = shares[1][0].shape[2], chosen = layers[1].chosen, steps = {} }
  local first = 0
  while first < tokens.shape[2] do
    local count = first == 0 and o.prompt or 1
    local step = { tokens = count, layers = {} }
    for l, layer in ipairs(layers) do
      local entry = entry_of(shares[l][0], layer.chosen, first, count)
      entry.ahead = {}
      for j = 1, math.min(o.ahead, #layers - l) do
        entry.ahead[j] = entry_of(shares[l][j], layers[l + j].chosen, first, count)
      end
      step.layers[l] = entry
    end
    trace.steps[#trace.steps + 1] = step
    first = first + count
  end
  return trace
end
