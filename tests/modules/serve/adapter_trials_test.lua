-- Traces, and the ways to serve adapters that are compared on them.
local here = (arg and arg[0]:match ".*/" or "tests/modules/serve/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local llm = require "tycho.llm"
local peft = require "tycho.peft"
local serve = require "tycho.serve"

local traces, trials = serve.traces, serve.adapter_trials

local function make()
  ty.manual_seed(3)
  local model = llm.Llama { vocab_size = 61, hidden_size = 32, intermediate_size = 48, num_hidden_layers = 2,
    num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 256 }
  ty.no_grad(function()
    for _, parameter in model:named_parameters() do
      if parameter.ndim == 2 then parameter:mul_(6) end
    end
  end)
  return model:eval()
end

local text = ty.seeded_noise(ty.zeros { 500 }, 1, "uniform"):mul(61):to "i64"

check.test("times, lengths and adapters of a trace are what was asked for", function()
  for _, cv in ipairs { 1, 2, 0.5 } do
    local n = 4000
    local trace = traces.trace { text = text, requests = n, rate = 5, cv = cv, input = { 3, 9 }, output = { 2, 4 },
      adapters = 20, power = 1, seed = 4 }
    local gaps, inputs, outputs, asked, last = {}, {}, {}, {}, 0
    for i, arrival in ipairs(trace) do
      gaps[i], last = arrival.at - last, arrival.at
      inputs[#arrival.prompt] = (inputs[#arrival.prompt] or 0) + 1
      outputs[arrival.count] = (outputs[arrival.count] or 0) + 1
      asked[arrival.adapter] = (asked[arrival.adapter] or 0) + 1
    end
    local mean, spread = ty.stats.mean(gaps), 0
    for _, gap in ipairs(gaps) do spread = spread + (gap - mean) ^ 2 / n end
    check.close(mean, 0.2, 0.2 * 5 * cv / math.sqrt(n))
    check.close(math.sqrt(spread) / mean, cv, 0.15 * cv)
    for length = 3, 9 do check.close(inputs[length] / n, 1 / 7, 0.03) end
    for count = 2, 4 do check.close(outputs[count] / n, 1 / 3, 0.04) end
    local sum = 0
    for i = 1, 20 do sum = sum + 1 / i end
    for i = 1, 20 do check.close(asked[i] / n, 1 / i / sum, 0.03) end
  end
  -- Prompts and times do not depend on how many adapters there are.
  local a = traces.trace { text = text, adapters = 1, input = { 3, 9 } }
  local b = traces.trace { text = text, input = { 3, 9 } }
  for i = 1, #a do
    check.equal({ a[i].at, a[i].count, a[i].prompt }, { b[i].at, b[i].count, b[i].prompt })
    check.equal({ a[i].adapter, b[i].adapter or false }, { 1, false })
  end
end)

check.test("all ways say the same", function()
  local folder = os.tmpname()
  os.remove(folder)
  local model = make()
  local paths = trials.draw(model, folder, 5, { ranks = { 2, 5, 3 } })
  -- Peft reads them, and what they add has the size that was asked for.
  local weight = model.model.layers[1].self_attn.q_proj.weight:clone()
  peft.load(model, paths[2])
  check.equal(model.model.layers[1].self_attn.q_proj._lora.rank, 5)
  local before = weight:square():mean():sqrt():item()
  peft.merge(model)
  local change = model.model.layers[1].self_attn.q_proj.weight - weight
  check.close(change:square():mean():sqrt():item() / before, 0.5, 0.1)
  -- Merging by peft and by the comparison.
  local weights = trials.merged(make(), paths)
  weights:use(2)
  local merged = weights.model.model.layers[1].self_attn.q_proj.weight
  check.close(ty.recipe.apart(merged, model.model.layers[1].self_attn.q_proj.weight), 0, 1e-6)
  weights:use(3)
  weights:use()
  check.equal(ty.recipe.apart(merged, weight), 0)
  check.equal(weights.switches, 3)

  local trace = traces.trace { text = text, requests = 14, rate = 1000, input = { 3, 20 }, output = { 2, 9 },
    adapters = 5 }
  local ways = trials.ways({ "base", "together", "padded", "disk", "merged" }, { paths = paths, make = make, pad = 5,
    engine = { requests = 4, page = 4, prefixes = false, room = 400 } })
  local runs, steps = {}, {}
  for name, way in pairs(ways) do
    runs[name] = function(turn)
      return way.run(trace, true, function()
        steps[#steps + 1] = name
        turn()
      end)
    end
  end
  local results = traces.in_turns(runs)
  check.equal({ table.unpack(steps, 1, 6) }, { "base", "disk", "merged", "padded", "together", "base" })
  for _, name in ipairs { "together", "padded", "disk" } do
    local same, apart = trials.compare(results[name], results.merged)
    check.equal(same, 1, name)
    check.equal(apart < 1e-4, true, name)
    check.equal(results[name].tokens, results.base.tokens)
  end
  check.equal(trials.compare(results.together, results.base) < 0.8, true, "adapters matter")
  check.equal(ways.padded.set:usage().pages > ways.together.set:usage().pages, true)
  check.equal(ways.disk.set:usage().host_bytes < ways.together.set:usage().host_bytes, true)
  for _, result in pairs(results) do
    check.equal(result.seconds > 0 and result.first > 0 and result.latency >= result.first, true)
  end
  trials.discard(paths)
  os.remove(folder)
  check.equal(ty.io.stat(folder), nil)
end)

check.test("what is wrong", function()
  check.fails(function() traces.trace {} end, "serve.traces.trace: text: expected at least 64 tokens, i64 [n], got nil")
  check.fails(function() traces.trace { text = text, input = { 5, 2 } } end, "input: expected two numbers of tokens")
  check.fails(function() traces.serve(3, {}) end, "engine: expected a table")
  check.fails(function() traces.in_turns { a = 3 } end, "runs.a: expected a function, got 3")
  check.fails(function() traces.in_turns { a = function() error("broken", 0) end } end, "broken")
  check.fails(function() trials.ways({ "base" }, {}) end, "make: expected a function")
  check.fails(function() trials.ways({ "best" }, { make = make }) end, "names: expected base, together, padded")
  check.fails(function() trials.draw(make(), "x", 0) end, "count: expected an integer >= 1")
end)

check.finish()
