-- Pruning: masks and what keeps to them, retraining by few parameters, and layers that leave inputs out.
local here = (arg and arg[0]:match ".*/" or "tests/modules/prune/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local llm = require "tycho.llm"
local prune = require "tycho.prune"

local function llama(more)
  ty.manual_seed(3)
  local config = { vocab_size = 50, hidden_size = 32, intermediate_size = 64, num_hidden_layers = 2,
    num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 64 }
  for key, value in pairs(more or {}) do config[key] = value end
  local model = llm.Llama(config)
  ty.no_grad(function() -- far from where layers begin, so that no two weights are alike
    for _, p in ipairs(model:parameters()) do p:add_(ty.randn(p.shape) * 0.1) end
  end)
  return model
end

local function gpt2()
  ty.manual_seed(3)
  return llm.GPT2 { vocabulary = 50, context = 64, width = 32, layers = 2, heads = 4 }
end

local tokens = ty.tensor { { 3, 14, 15, 9, 2, 6, 5, 35, 8, 9, 7, 9 }, { 3, 2, 38, 46, 26, 43, 38, 32, 7, 9, 5, 0 } }

local function logits(model) return ty.no_grad(function() return model(tokens) end) end

local function off(a, b) return ((a - b):abs():max() / b:abs():max()):item() end

local function zeros_of(weight) return weight:detach():eq(0):to("i64"):sum():item() end

local function train(model, parameters, steps)
  local opt = ty.optim.AdamW(parameters, { lr = 1e-2, weight_decay = 0.1 })
  local first, last
  for _ = 1, steps or 6 do
    local loss = model:loss(tokens)
    opt:step(loss)
    opt:zero_grad()
    first, last = first or loss:item(), loss:item()
  end
  return first, last
end

check.test("magnitude: the smallest weights of each layer, or of all", function()
  local model, dense = prune.magnitude(llama(), { sparsity = 0.5 }), llama()
  for name, p in dense:named_parameters() do
    local q = model:get(name)
    if name:find "proj" then
      check.equal(zeros_of(q), p:numel() // 2, name)
      local gone = p:detach():masked_select(q:detach():eq(0)):abs():max():item()
      local least = p:detach():masked_select(q:detach():ne(0)):abs():min():item()
      check.ok(gone <= least, name .. ": what is gone is smaller than what stays")
    else
      check.ok(p:eq(q):all():item(), name .. " is left alone")
    end
  end
  check.close(prune.sparsity(model), 0.5, 1e-6)
  model = prune.magnitude(llama(), { sparsity = 0.6, scope = "global" })
  check.close(prune.sparsity(model), 0.6, 1e-3)
  local down, q = model:get "model.layers.0.mlp.down_proj.weight", model:get "model.layers.0.self_attn.q_proj.weight"
  check.ok(zeros_of(down) / down:numel() ~= zeros_of(q) / q:numel(), "shares differ between layers")
  model = prune.magnitude(llama(), { sparsity = 0.25, targets = "mlp" })
  check.equal(zeros_of(model:get "model.layers.0.self_attn.q_proj.weight"), 0, "not a target")
  check.equal(zeros_of(model:get "model.layers.0.mlp.up_proj.weight"), 512, "a target")
end)

check.test("2:4", function()
  for _, make in ipairs { llama, gpt2 } do
    local model = prune.magnitude(make(), { pattern = "2:4" })
    local weight = model.h and model:get("h.1.mlp.c_fc.weight"):transpose(0, 1)
      or model:get "model.layers.1.mlp.down_proj.weight"
    local kept = weight:detach():ne(0):to("i64"):reshape(-1, 4):sum(1)
    check.ok(kept:eq(2):all():item(), "two of four neighbouring inputs stay")
  end
end)

check.test("zeros stay zeros in training, whatever is trained", function()
  for _, make in ipairs { llama, gpt2 } do
    local model = prune.magnitude(make(), { sparsity = 0.5 })
    local first, last = train(model, model:parameters())
    check.ok(last < first, "it learns")
    check.equal(prune.sparsity(model), 0.5)
    local before = logits(model)
    prune.release(model)
    check.ok(logits(model):eq(before):all():item(), "the released model is the same")
    prune.zeros(model)
    check.equal(prune.sparsity(model), 0.5, "masks of the zeros")
  end
end)

for _, variant in ipairs { "mask", "scale", "prune" } do
  check.test("perp: " .. variant, function()
    for _, make in ipairs { llama, gpt2 } do
      local model = prune.magnitude(make(), { sparsity = 0.5 })
      local before, total = logits(model), model:count_parameters()
      local parameters, share = prune.perp(model, { rank = 2, variant = variant })
      check.ok(off(logits(model), before) < 1e-5, "nothing changes at first")
      local count = 0
      for _, p in ipairs(parameters) do count = count + p:numel() end
      check.close(share, count / total, 1e-9)
      local frozen = {}
      for name, p in model:named_parameters() do
        if not p.requires_grad then frozen[name] = p:detach():clone() end
      end
      local first, last = train(model, parameters)
      check.ok(last < first, "it learns")
      for name, p in pairs(frozen) do check.ok(model:get(name):eq(p):all():item(), name .. " is frozen") end
      before = logits(model)
      prune.merge(model)
      check.equal(prune.sparsity(model), 0.5, "merged, the zeros stand")
      check.equal(model:count_parameters(), total, "and nothing is left of the matrices")
      if variant ~= "prune" then check.ok(off(logits(model), before) < 1e-5, "merging changes nothing") end
      prune.release(model)
      check.ok(model:parameters()[1].requires_grad, "all is trained again")
    end
  end)
end

check.test("perp: what is trained", function()
  local function names(options, config)
    local model = prune.magnitude(llama(config), { sparsity = 0.5 })
    local parameters = prune.perp(model, options)
    local list, known = {}, {}
    for _, p in ipairs(parameters) do known[p] = true end
    for name, p in model:named_parameters() do
      if p.requires_grad then
        list[#list + 1] = name:match "[^.]+%.[^.]+$"
        check.ok(known[p], name)
      end
    end
    return table.concat(list, " "), model
  end
  check.ok(names { biases = false }:find "norm" and not names { biases = false }:find "proj", "norms alone")
  check.equal(names { biases = false, norms = false, head = true }, "lm_head.weight")
  local list, model = names { norms = false, add_biases = true }
  check.equal(select(2, list:gsub("proj%.bias", "")), 14, "a bias for each linear layer")
  check.equal({ model.config.attention_bias, model.config.mlp_bias }, { true, true })
  -- And it can be saved and loaded.
  local folder = scratch.file "biases"
  ty.no_grad(function() model:get("model.layers.0.mlp.up_proj.bias"):fill_(0.5) end)
  prune.release(model):save(folder)
  check.ok(off(logits(llm.load(folder)), logits(model)) < 1e-5, "biases that were added are saved")
end)

check.test("wina: with all inputs it is the model itself", function()
  for _, make in ipairs { llama, gpt2 } do
    local model = make()
    local before, state = logits(model), model:state_dict()
    local greedy = model:generate(tokens, 5, { temperature = 0 })
    prune.wina(model, { sparsity = 0 })
    check.ok(off(logits(model), before) < 1e-5, "logits")
    check.ok(model:generate(tokens, 5, { temperature = 0 }):eq(greedy):all():item(), "tokens")
    for name, p in pairs(model:state_dict()) do check.ok(p:eq(state[name]):all():item(), name) end
    prune.wina(prune.unwina(model), { sparsity = 0.5 })
    check.ok(off(logits(model), before) > 1e-3, "with half of them it is not")
    check.ok(off(logits(prune.unwina(model)), before) < 1e-6, "and taken away it is again")
  end
end)

check.test("wina: one token and several give the same; what is chosen", function()
  local model = prune.wina(llama(), { sparsity = 0.5 })
  local whole = logits(model):narrow(0, 0, 1)
  local cache = model:cache()
  ty.no_grad(function()
    for i = 0, tokens.shape[2] - 1 do
      local one = model(tokens:narrow(0, 0, 1):narrow(1, i, 1), { cache = cache })
      check.ok(off(one, whole:narrow(1, i, 1)) < 1e-4, "token " .. i)
    end
  end)
  local layer = llama():get "model.layers.0.mlp.down_proj"
  local w = layer.weight:detach()
  local x = ty.randn(1, 64)
  local chosen = (x:abs() * w:norm(2, 0)):topk(16, 1)
  local least = chosen:min():item()
  local want = ty.linear(ty.where((x:abs() * w:norm(2, 0)):ge(least), x, 0), w)
  local small = ty.nn.Sequential(layer)
  prune.wina(small, { sparsity = 0.75 })
  check.ok(off(ty.no_grad(small.forward, small, x), want) < 1e-5, "the largest by |x| times the norm of the weights")
end)

check.test("wina: thresholds from calibration, and errors of outputs", function()
  local ids = ty.randint(0, 50, { 8, 40 })
  local function run(model) return function() model(ids) end end
  local means = {}
  for _, criterion in ipairs { "wina", "teal" } do
    local model = prune.wina(llama(), { sparsity = 0.5, criterion = criterion, selection = "threshold" })
    check.fails(function() model(ids) end, "prune.calibrate first")
    prune.calibrate(model, run(model))
    local kept, all = 0, 0
    for _, module in model:named_modules() do
      local w = rawget(module, "_wina")
      if w then
        w.watch = function(x)
          kept = kept + ty.sparsify(x, w.scale, 0, w.threshold):ne(0):to("i64"):sum():item()
          all = all + x:numel()
        end
      end
    end
    ty.no_grad(run(model))
    check.close(kept / all, 0.5, 0.01, "half of the inputs on average")
    for _, module in model:named_modules() do
      if rawget(module, "_wina") then rawget(module, "_wina").watch = nil end
    end
    local errors, mean = prune.output_errors(model, run(model))
    check.ok(mean > 0 and mean < 1, "mean error " .. mean)
    check.ok(errors["model.layers.1.mlp.down_proj"] > 0, "by name")
    means[criterion] = mean
  end
  check.ok(means.wina < means.teal, "by the weights it is less")
end)

check.test("mistakes", function()
  local function fails(text, fn, ...)
    local ok, message = pcall(fn, ...)
    check.ok(not ok and tostring(message):find(text, 1, true), ("%s: %s"):format(text, tostring(message)))
  end
  fails("prune.magnitude: model: expected a module, got 3", prune.magnitude, 3, { sparsity = 0.5 })
  fails("expected sparsity or pattern", prune.magnitude, llama(), {})
  fails("sparsity must be a number within [0, 1), got 1", prune.magnitude, llama(), { sparsity = 1 })
  fails("pattern must be kept:group", prune.magnitude, llama(), { pattern = "4:2" })
  fails("multiple of 5", prune.magnitude, llama(), { pattern = "2:5" })
  fails("scope must be", prune.magnitude, llama(), { sparsity = 0.5, scope = "row" })
  fails("no linear layer matches nothing", prune.magnitude, llama(), { sparsity = 0.5, targets = "nothing" })
  fails("has masks already", prune.magnitude, prune.magnitude(llama(), { sparsity = 0.5 }), { sparsity = 0.5 })
  fails("has no masks", prune.perp, llama())
  local pruned = prune.magnitude(llama(), { sparsity = 0.5 })
  fails("variant must be mask, scale or prune, got low", prune.perp, pruned, { variant = "low" })
  fails("rank must be an integer", prune.perp, pruned, { rank = 1.5 })
  fails("nothing is left to train", prune.perp, pruned, { biases = false, norms = false })
  prune.perp(pruned, { rank = 1 })
  fails("prune.merge ends that", prune.perp, pruned)
  fails("prune.merge the adapters first", prune.release, pruned)
  fails("criterion must be wina or teal, got x", prune.wina, llama(), { sparsity = 0.5, criterion = "x" })
  fails("selection must be", prune.wina, llama(), { sparsity = 0.5, selection = "x" })
  fails("sparsity must be a number", prune.wina, llama(), {})
  fails("sparse layers already", prune.wina, prune.wina(llama(), { sparsity = 0.5 }), { sparsity = 0.5 })
  fails("has no sparse layers", prune.calibrate, llama(), function() end)
  for _, name in ipairs { "perp", "wina", "unwina", "release", "merge", "sparsity" } do
    local options = name == "wina" and { sparsity = 0.5 } or nil
    fails(("prune.%s: model: expected a module, got nil"):format(name), prune[name], nil, options)
  end
end)

scratch.clean()
check.test("2:4 keeps what torch's WeightNormSparsifier keeps; reports; what is refused", function()
  local fixture = ty.io.load_npz(check.root .. "tests/fixtures/fp4.npz")
  local function with(x)
    local model = ty.nn.Sequential { ty.nn.Linear(256, 6) }
    ty.no_grad(function() model[1].weight:copy_(x) end)
    return model
  end
  local model, report = prune.magnitude(with(fixture.x), { pattern = "2:4", targets = "" })
  check.equal(model[1].weight:detach():ne(0):to "u8":tolist(), fixture.mask24:tolist())
  check.equal(report.parameters, 1536)
  check.equal({ report.sparsity, report[1].sparsity, report[1].name }, { 0.5, 0.5, "0" })
  check.equal({ report.dense, report.bytes }, { 3072, 1536 + 192 })
  local broken = fixture.x:clone()
  broken["3, 7"] = 0 / 0
  check.fails(function() prune.magnitude(with(broken), { sparsity = 0.5, targets = "" }) end,
    "prune.magnitude: 0: a weight is not finite")
end)

check.finish()
