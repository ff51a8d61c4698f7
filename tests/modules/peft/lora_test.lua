-- Adapters of all ways against the Python library peft: those that it saved (tests/fixtures/peft, make_peft.py), logits
-- with them, merged and without, gradients; adapters of our own; files; errors.
local here = (arg and arg[0]:match ".*/" or "tests/modules/peft/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local llm = require "tycho.llm"
local peft = require "tycho.peft"

local nn = ty.nn
local llm_root, root = check.root .. "tests/fixtures/llm/", check.root .. "tests/fixtures/peft/"
local TOLERANCE = 1e-4

local function base(name, dtype) return llm.load(llm_root .. name, { dtype = dtype or "f32" }) end

local function logits(model, tokens) return ty.no_grad(function() return model(tokens) end) end

local function compare(got, want, what, tolerance)
  check.equal(got.shape, want.shape, what .. " shape")
  local off = (got:to "f64" - want:to "f64"):abs():max():item() / math.max(want:abs():max():item(), 1e-30)
  check.ok(off <= (tolerance or TOLERANCE), ("%s: relative error %.2g"):format(what, off))
end

local function same(a, b) return a:eq(b):all():item() end

local function wave(t) return (ty.arange(t:numel(), { dtype = "f64" }) * 0.37 + 1):sin():reshape(t.shape) end

local function count(t)
  local n = 0
  for _ in pairs(t) do n = n + 1 end
  return n
end

for _, name in ipairs { "llama", "llama_patterns", "llama_dora", "gpt2", "gpt2_dora", "llama_loha", "llama_lokr",
  "llama_lokr_both", "llama_ia3" } do
  check.test(name, function()
    local want, notes = ty.io.load_safetensors(root .. name .. "/expected.safetensors")
    local model = base(notes.base)
    local before = model:state_dict()
    local plain = logits(model, want.tokens)
    peft.load(model, root .. name, { train = true })
    local with = logits(model, want.tokens)
    compare(with, want.logits, name .. " logits")
    local loss = model:loss(want.tokens)
    check.close(loss:item(), want.loss:item(), TOLERANCE, name .. " loss")
    loss:backward()
    local compared = 0
    for key, pair in pairs(want) do
      local path = key:match "^grad%.base_model%.model%.(.*)$"
      if path then
        local p = model:get((path:gsub("^transformer%.", ""):gsub("base_layer%.", "")))
        if check.ok(p and p.grad, "a gradient of " .. path) then
          local norm, product = pair:tolist()[1], pair:tolist()[2]
          local g = p.grad:to "f64"
          check.ok(math.abs(g:norm():item() - norm) <= TOLERANCE * norm + 1e-6, "norm of the gradient of " .. path)
          check.ok(math.abs((g * wave(g)):sum():item() - product) <= TOLERANCE * norm + 1e-6, "product of " .. path)
          compared = compared + 1
        end
      end
    end
    check.equal(compared, #peft.parameters(model), "as many gradients as there are trained parameters")
    check.ok(same(peft.disable(model, logits, model, want.tokens), plain), "without the adapter, to the bit")

    local report = peft.merge(model, { check = function(m) return m(want.tokens) end })
    compare(logits(model, want.tokens), want.merged, name .. " merged logits")
    check.ok(report.max_change > 0.01 and report.max_error < 1e-6 and report.output.max < 1e-3, tostring(report))
    check.ok(tostring(report):find "merged %d+ modules", "the report in words")
    check.ok(same(peft.disable(model, logits, model, want.tokens), plain), "without the merged adapter, to the bit")
    check.fails(function() peft.merge(model) end, "merged already")
    peft.unmerge(model)
    check.fails(function() peft.unmerge(model) end, "not merged")
    check.ok(same(logits(model, want.tokens), with), "after unmerge, to the bit")

    local folder = scratch.file(name)
    peft.save(model, folder, { base = notes.base })
    local ours, theirs = ty.io.load_safetensors(folder .. "/adapter_model.safetensors"),
      ty.io.load_safetensors(root .. name .. "/adapter_model.safetensors")
    for key, tensor in pairs(theirs) do
      check.ok(ours[key] and same(ours[key], tensor), "the file has " .. key)
    end
    check.equal(count(ours), count(theirs), "names in the file")
    peft.remove(model)
    for key, tensor in pairs(model:state_dict()) do
      check.ok(before[key] and same(before[key], tensor), key .. " after remove")
    end
    check.equal(count(model:state_dict()), count(before), "names after remove")
    peft.load(model, folder)
    check.ok(same(logits(model, want.tokens), with), "saved and loaded, to the bit")
    for _, p in ipairs(model:parameters()) do check.ok(not p.requires_grad, "frozen when loaded") end
    peft.merge(model, { keep = false })
    check.fails(function() peft.unmerge(model) end, "keep = false")
    check.fails(function() peft.disable(model, logits) end, "keep = false")
    peft.remove(model)
    compare(logits(model, want.tokens), want.merged, name .. " merged and removed")
    check.equal(count(model:state_dict()), count(before), "names of the merged model")
  end)
end

check.test("training", function()
  ty.manual_seed(1)
  local model = base "llama"
  local tokens = ty.randint(0, 96, { 4, 10 })
  local plain = logits(model, tokens)
  local frozen = model:state_dict()
  peft.lora(model, { rank = 4, alpha = 8, dropout = 0.1, targets = { "q_proj", "v_proj", "embed_tokens" },
    rank_pattern = { ["layers.0.self_attn.q_proj"] = 2 } })
  check.ok(same(logits(model, tokens), plain), "a new adapter changes nothing")
  check.equal(model:get("model.layers.0.self_attn.q_proj").lora_A.weight.shape, { 2, 32 }, "rank by name")
  check.equal(#peft.parameters(model), 10, "trained parameters")
  check.ok(tostring(model):find("rank = 4", 1, true), "ranks are printed")
  local opt = ty.optim.AdamW(peft.parameters(model), { lr = 1e-2 })
  model:train()
  local first, last
  for _ = 1, 30 do
    last = model:loss(tokens)
    first = first or last:item()
    opt:step(last)
  end
  check.ok(last:item() < 0.8 * first, ("the loss falls: %.3f to %.3f"):format(first, last:item()))
  model:eval()
  for name, tensor in pairs(frozen) do check.ok(same(model:state_dict()[name], tensor), name .. " is frozen") end
  local copy = model:clone()
  peft.merge(copy)
  compare(logits(copy, tokens), logits(model, tokens), "a merged copy")
  check.ok(not same(logits(peft.remove(copy), tokens), plain), "the copy was merged")
  check.ok(same(logits(peft.remove(model), tokens), plain), "the original was not")
  check.ok(model:parameters()[1].requires_grad, "gradients are wanted again")
end)

check.test("bf16 weights", function()
  local want, notes = ty.io.load_safetensors(root .. "llama_dora/expected.safetensors")
  local model = base(notes.base, "bf16")
  peft.load(model, root .. "llama_dora")
  compare(logits(model, want.tokens), want.logits, "logits on bf16 weights", 0.05)
  local weight = model:get "lm_head.weight"
  local report = peft.merge(model)
  check.ok(report.max_error > 1e-5, "rounding to bf16 is reported")
  check.equal(model:get("lm_head.weight").dtype, "bf16")
  peft.unmerge(model)
  check.ok(same(model:get "lm_head.weight", weight), "unmerge is exact")
end)

check.test("modules of all kinds", function()
  local net = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
  local x = ty.randn { 5, 6 }
  peft.lora(net, { rank = 2, targets = "[02]", bias = "all", save = nil })
  check.equal(#peft.parameters(net), 6)
  ty.no_grad(function() for _, p in ipairs(peft.parameters(net)) do p:normal_() end end)
  local y = logits(net, x)
  peft.save(net, scratch.file "net")
  peft.load(peft.remove(net), scratch.file "net")
  compare(logits(net, x), y, "a Sequential", 1e-6)
  local bert = base "bert"
  local tokens = ty.randint(0, 90, { 2, 7 })
  local plain = logits(bert, tokens)
  -- Layers whose activation is taken in the product count too.
  for _, name in ipairs { "intermediate.dense", "position_embeddings", "token_type_embeddings" } do
    peft.lora(bert, { targets = { name }, rank = 2 })
    ty.no_grad(function() for _, p in ipairs(peft.parameters(bert)) do p:normal_() end end)
    local with = logits(bert, tokens)
    check.ok(not same(with, plain), name .. " counts")
    peft.merge(bert)
    compare(logits(bert, tokens), with, name .. " merged", 1e-3)
    peft.unmerge(bert)
    peft.remove(bert)
  end
end)

check.test("files of kohya and diffusers", function()
  local theirs = ty.io.load_safetensors(root .. "llama/adapter_model.safetensors")
  local want = ty.io.load_safetensors(root .. "llama/expected.safetensors")
  local kohya, diffusers = {}, {}
  for key, t in pairs(theirs) do
    local path, part = key:match "^base_model%.model%.(.*)%.lora_(.)%.weight$"
    local flat = "lora_te_" .. path:gsub("%.", "_")
    kohya[flat .. (part == "A" and ".lora_down.weight" or ".lora_up.weight")] = t
    kohya[flat .. ".alpha"] = ty.tensor(8.0)
    diffusers["transformer." .. path .. (part == "A" and ".lora.down.weight" or ".lora.up.weight")] = t
  end
  ty.io.save_safetensors(scratch.file "kohya.safetensors", kohya)
  ty.io.save_safetensors(scratch.file "diffusers.safetensors", diffusers)
  local model = base "llama"
  peft.load(model, scratch.file "kohya.safetensors")
  compare(logits(model, want.tokens), want.logits, "kohya")
  peft.remove(model)
  peft.load(model, scratch.file "diffusers.safetensors", { alpha = 8 })
  compare(logits(model, want.tokens), want.logits, "diffusers")
end)

-- PEFT writes the weights of embeddings that have an adapter where it thinks that they may have been resized.
check.test("weights beside the adapter", function()
  local want = ty.io.load_safetensors(root .. "llama_patterns/expected.safetensors")
  local state = ty.io.load_safetensors(root .. "llama_patterns/adapter_model.safetensors")
  local model = base "llama"
  local plain = logits(model, want.tokens)
  state["base_model.model.model.embed_tokens.base_layer.weight"] = model:get("model.embed_tokens.weight") * 2
  local folder = scratch.file "beside"
  ty.io.mkdir(folder)
  ty.io.save_safetensors(folder .. "/adapter_model.safetensors", state)
  ty.io.save_json(folder .. "/adapter_config.json", ty.io.load_json(root .. "llama_patterns/adapter_config.json"))
  peft.load(model, folder, { train = true })
  check.ok(not model:get("model.embed_tokens.weight").requires_grad, "weights under an adapter stay frozen")
  local with = logits(model, want.tokens)
  for _ = 1, 2 do
    peft.merge(model)
    check.ok(same(peft.disable(model, logits, model, want.tokens), plain), "without, to the bit")
    compare(logits(model, want.tokens), with, "merged")
    peft.unmerge(model)
    check.ok(same(logits(model, want.tokens), with), "unmerged, to the bit")
  end
  check.ok(same(logits(peft.remove(model), want.tokens), plain), "removed, to the bit")
end)

-- The adapter is the embedding's alone, and a tied head must not follow it.
check.test("an embedding that is the head as well is merged once the head has weights of its own", function()
  local embeddings = { gpt2 = "wte", llama3 = "embed_tokens", bert = "word_embeddings", t5 = "shared" }
  for name, target in pairs(embeddings) do
    local model = base(name)
    local function run(m)
      local tokens = ty.tensor { { 5, 9, 2, 31 } }
      return ty.no_grad(function() return m(tokens, name == "t5" and ty.tensor { { 0, 7 } } or nil) end)
    end
    local plain = run(model)
    peft.lora(model, { rank = 2, alpha = 4, targets = { target } })
    ty.manual_seed(1)
    for _, p in ipairs(peft.parameters(model)) do p:detach():copy_(ty.randn(p.shape)) end
    local with = run(model)
    check.ok((with - plain):abs():max():item() > 1e-2)
    check.fails(function() peft.merge(model) end, target .. ": expected an embedding that is not the head as well")
    check.ok(same(run(model), with), name .. " is as it was")
    model:untie()
    check.ok(same(run(model), with), name .. " with a head of its own")
    peft.merge(model)
    compare(run(model), with, name .. " merged")
    peft.remove(model)
    model:save(scratch.file("untied_" .. name))
    local again = llm.load(scratch.file("untied_" .. name))
    check.equal({ again.config.tie_word_embeddings, again:tied() }, { false, nil })
    compare(run(again), with, name .. " merged and saved")
  end
end)

check.test("errors", function()
  local model = base "llama"
  local function fails(options, text) check.fails(function() peft.lora(model, options) end, text) end
  fails({ targets = { "no_proj" } }, "no module is named 'no_proj'; there are model, embed_tokens")
  fails({ targets = { "input_layernorm" } }, "is RMSNorm; adapters go on")
  fails({ targets = "none%.of%.these" }, "nothing matches")
  fails({ rank = 4 }, "targets must be")
  fails({ targets = {} }, "targets: expected a list of names, got an empty one")
  fails({ targets = { "q_proj" }, rank = 0 }, "rank must be a positive integer, got 0")
  fails({ targets = { "q_proj" }, rank = 2.5 }, "rank must be")
  fails({ targets = "all-linear", rank = 4000 }, "peft.lora: rank: expected at most %d+, the smaller side of '")
  fails({ targets = { "q_proj" }, alpha = 0 / 0 }, "alpha must be a number")
  fails({ targets = { "q_proj" }, dropout = 1 }, "dropout must be within")
  fails({ targets = { "q_proj" }, bias = "some" }, "bias must be")
  fails({ targets = { "q_proj" }, ranks = {} }, "no option 'ranks'")
  fails({ targets = { "q_proj" }, rank_pattern = { ["q_.*"] = 2 } }, "is a regular expression")
  fails({ targets = { "q_proj" }, rank_pattern = { q_proj = 2, ["self_attn.q_proj"] = 3 } }, "both stand for")
  fails({ targets = { "q_proj" }, dtype = "i32" }, "dtype must be f32")
  fails({ targets = { "embed_tokens" }, dora = true }, "dora does not adapt")
  fails({ targets = { "lm_head" }, save = { "lm_head" } }, "among targets and save")
  check.fails(function() peft.lora({}, { targets = { "x" } }) end, "expected a module")
  local function other(module, targets, text)
    check.fails(function() peft.lora(module, { targets = targets }) end, text)
  end
  other(nn.Sequential(nn.Linear(4, 4), nn.GELU()), { "zzz" }, "named 'zzz'; there are 0 (Linear), 1 (GELU)")
  other(nn.Linear(4, 4), { "zzz" }, "no module is named 'zzz'; it is a single Linear")
  other(nn.Sequential(nn.Conv2d(1, 2, 3), nn.GELU()), "all-linear", "nothing matches all-linear; adapters go on Linear"
    .. ", Conv1D, Conv2d and Embedding, and the model has Sequential, Conv2d, GELU")
  check.fails(function() peft.parameters(model) end, "lora_test.lua:%d+: .*has no adapter")
  check.fails(function() peft.merge(model) end, "has no adapter")
  check.equal(rawget(model, "_adapter"), nil, "nothing is left of what failed")

  local state = ty.io.load_safetensors(root .. "llama/adapter_model.safetensors")
  local config = ty.io.load_json(root .. "llama/adapter_config.json")
  local one = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
  local function broken(text, changes, keys)
    local copy, settings = {}, {}
    for key, t in pairs(state) do copy[key] = t end
    for key, t in pairs(changes) do copy[key] = t or nil end
    for key, value in pairs(config) do settings[key] = value end
    for key, value in pairs(keys or {}) do settings[key] = value end
    local folder = scratch.file "broken"
    ty.io.mkdir(folder)
    ty.io.save_safetensors(folder .. "/adapter_model.safetensors", copy)
    ty.io.save_json(folder .. "/adapter_config.json", settings)
    check.fails(function() peft.load(model, folder) end, text)
    check.equal(rawget(model, "_adapter"), nil, "nothing is left of what failed")
  end
  broken("no_proj.lora_A.weight: the model has no such module",
    { ["base_model.model.model.layers.0.no_proj.lora_A.weight"] = ty.zeros { 4, 32 } })
  broken("q_proj: A and B: expected [rank, 32] and [32, rank], got [4", { [one .. "A.weight"] = ty.zeros { 4, 31 } })
  broken("expected [rank, 32] and [32, rank], got [3, 32] and [32, 4]", { [one .. "A.weight"] = ty.zeros { 3, 32 } })
  broken("q_proj: only one of A and B", { [one .. "B.weight"] = false })
  broken("q_proj: is among target_modules, but not in the file",
    { [one .. "A.weight"] = false, [one .. "B.weight"] = false })
  broken("expected floating point, got i32", { [one .. "A.weight"] = ty.zeros({ 4, 32 }, { dtype = "i32" }) })
  broken("the model has [96, 32], the file [97, 32]", { ["base_model.model.lm_head.weight"] = ty.zeros { 97, 32 } })
  broken("q_proj: the rank is 4, and 5 in adapter_config.json", {}, { r = 5 })
  broken("v_proj: the rank is 4, and 2 in adapter_config.json", {}, { rank_pattern = { v_proj = 2 } })
  broken("lm_head: is among modules_to_save, but not in the file", {}, { modules_to_save = { "lm_head" } })
  broken("alpha is 8, not a number", {}, { alpha_pattern = { q_proj = "8" } })
  broken("alpha_pattern must be a table by name", {}, { alpha_pattern = 3 })
  broken("is a regular expression", {}, { alpha_pattern = { [".*q_proj"] = 3 } })
  broken("no magnitudes", {}, { use_dora = true })
  broken("peft_type is VERA", {}, { peft_type = "VERA" })
  broken("lora_bias is not supported", {}, { lora_bias = true })
  broken("init_lora_weights 'pissa_niter_16'", {}, { init_lora_weights = "pissa_niter_16" })
  broken("rank must be a positive integer", {}, { r = -1 })
  broken("alpha must be a number", {}, { lora_alpha = "8" })
  check.fails(function() peft.load(model, scratch.file "nowhere") end, "is not there")
  peft.load(model, root .. "llama")
  check.fails(function() peft.load(model, root .. "llama") end, "has an adapter already")
  check.fails(function() peft.lora(model, { targets = { "q_proj" } }) end, "has an adapter already")
end)

check.test("damaged files", function()
  local model = base "gpt2"
  local folder = scratch.file "damaged"
  ty.io.mkdir(folder)
  local texts = { "adapter_config.json", "adapter_model.safetensors" }
  for _, name in ipairs(texts) do texts[name] = scratch.slurp(root .. "gpt2/" .. name) end
  for _, broken in ipairs(texts) do
    for _, name in ipairs(texts) do scratch.spit("damaged/" .. name, texts[name]) end
    local head = texts[broken]:sub(1, 1500) -- the header of the tensors
    scratch.flips(head, 200, function(text)
      scratch.spit("damaged/" .. broken, text .. texts[broken]:sub(1501))
      local ok, message = pcall(peft.load, model, folder)
      if ok then peft.remove(model) end
      check.ok(ok or message:find("peft.load", 1, true) and not message:find "attempt to", tostring(message))
      check.equal(rawget(model, "_adapter"), nil, "nothing is left of what failed")
    end)
  end
end)

scratch.clean()
check.finish()
