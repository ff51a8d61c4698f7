-- QLoRA: encoded linear weights with adapters on top, and what they take.
local here = (arg and arg[0]:match ".*/" or "tests/modules/peft/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local llm, peft, quant = require "tycho.llm", require "tycho.peft", require "tycho.quant"

local nn, optim = ty.nn, ty.optim

local function small(change)
  ty.manual_seed(3)
  local config = { vocab_size = 96, hidden_size = 64, intermediate_size = 128, num_hidden_layers = 2,
    num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 64 }
  for key, value in pairs(change or {}) do config[key] = value end
  return llm.Llama(config)
end

local function gpt2() return llm.GPT2 { vocabulary = 96, context = 32, width = 64, layers = 2, heads = 4 } end

local tokens = ty.randint(0, 96, { 4, 12 })

local function same(a, b) return a:eq(b):all():item() end
local function logits(model) return ty.no_grad(function() return model(tokens) end) end
local function off(a, b) return ((a:to "f64" - b:to "f64"):norm() / b:to("f64"):norm()):item() end

-- The same model with full weights that have the values of the codes.
local function decoded(model)
  local copy = model:clone()
  for _, module in copy:named_modules() do
    local w = rawget(module, "weight")
    if w and not w:is_floating_point() then
      w = w:to "f32"
      rawset(module, "weight", ty.keep(module.fan_in_fan_out and w:transpose(0, 1):contiguous() or w))
    end
  end
  return copy
end

check.test("quantize: what is encoded, and what it takes", function()
  local model = small()
  local plain = logits(model)
  local report = quant.quantize(model)
  check.equal(report.modules, 14)
  check.equal(#report.left, 0)
  -- rows of 64 or 128: a byte for 64 weights and 4 for the row
  local rows = 2 * (64 + 32 + 32 + 64 + 2 * 128)
  local bytes = rows * (4 + 33) + 2 * 64 * (4 + 66)
  check.equal(report.bytes, bytes)
  check.close(report.bits, 8 * bytes / report.parameters, 1e-12)
  check.ok(report.error > 0.05 and report.error < 0.12, report.error)
  check.equal(model:get("model.layers.0.mlp.up_proj.weight").dtype, "nf4")
  check.equal(model.lm_head.weight.dtype, "f32")
  check.ok(off(logits(model), plain) < 0.5, "the model is about what it was")
  check.ok(off(logits(model), logits(decoded(model))) < 1e-5, "it computes with the values of the codes")
  check.equal(quant.quantize(model).modules, 0, "what is encoded stays as it is")
  check.equal(quant.quantize(small(), { skip = { "q_proj", "layers.1.mlp.up_proj", "lm_head" } }).modules, 11)
  check.equal(quant.quantize(small(), { skip = {} }).modules, 15)
  check.equal(quant.quantize(small { intermediate_size = 96 }).left,
    { "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj" })
  check.equal(quant.quantize(gpt2()).modules, 8)
  local shared = nn.Linear(64, 64)
  local net = nn.Sequential(shared, nn.GELU(), shared)
  check.equal(quant.quantize(net).parameters, 4096, "a shared layer once")
end)

for name, make in pairs { Llama = small, ["GPT-2"] = gpt2 } do
  check.test("gradients and merging: " .. name, function()
    ty.manual_seed(4)
    local model = make()
    local _, report = peft.qlora(model, { rank = 4, alpha = 8 })
    check.ok(report.bits > 4.1 and report.bits < 5, report.bits)
    ty.no_grad(function() for _, p in ipairs(peft.parameters(model)) do p:normal_(0, 0.1) end end)
    local full = decoded(model)
    local function gradients(m, options)
      m:zero_grad()
      local loss = m:loss(tokens, nil, options)
      loss:backward()
      local list = {}
      for i, p in ipairs(peft.parameters(m)) do list[i] = p.grad end
      return list, loss:item()
    end
    local got, loss = gradients(model)
    local want, wanted_loss = gradients(full)
    check.close(loss, wanted_loss, 1e-5)
    check.equal(#got, #want)
    for i in ipairs(want) do check.ok(off(got[i], want[i]) < 1e-4, "gradient " .. i) end
    local again = gradients(model, { checkpoint = true })
    for i in ipairs(got) do check.ok(same(again[i], got[i]), "with checkpointing, to the bit: " .. i) end

    local with = logits(model)
    local merged = peft.merge(model, { dtype = "f32" })
    check.ok(off(logits(model), with) < 1e-5, "merged in full precision")
    check.ok(merged.max_error < 1e-6, tostring(merged))
    local place = name == "Llama" and "model.layers.0.self_attn.q_proj" or "h.0.attn.c_attn"
    check.equal(model:get(place .. ".weight").dtype, "f32")
    check.ok(not same(peft.disable(model, logits, model), with), "the adapter counts")
    peft.unmerge(model)
    check.ok(same(logits(model), with), "unmerged, to the bit")
    merged = peft.merge(model)
    check.ok(merged.mean_error > 1e-4, "encoding again is reported")
    check.ok(off(logits(model), with) < 0.3, "merged into codes")
    peft.unmerge(model)
    check.ok(same(logits(model), with), "unmerged, to the bit")

    local folder = scratch.file(name)
    peft.save(model, folder)
    ty.manual_seed(4)
    local other = make()
    quant.quantize(other)
    peft.load(other, folder)
    check.ok(same(logits(other), with), "the adapter of the file on a model encoded anew, to the bit")
    peft.merge(model, { dtype = "f32", keep = false })
    peft.remove(model):save(folder)
    check.ok(off(logits(llm.load(folder)), with) < 1e-5, "the merged model as a folder")
  end)
end

check.test("training on codes", function()
  local model = small()
  model:to "bf16"
  peft.qlora(model, { rank = 4, dropout = 0.05, dtype = "bf16" })
  local codes = ty.io.to_bytes(model:get "model.layers.0.self_attn.q_proj.weight")
  local opt = optim.AdamW(peft.parameters(model), { lr = 1e-2, paged = true, bits = 8 })
  model:train()
  local first, last
  for _ = 1, 30 do
    last = model:loss(tokens, nil, { checkpoint = true })
    first = first or last:item()
    opt:step(last)
  end
  check.ok(last:item() < 0.8 * first, ("the loss falls: %.3f to %.3f"):format(first, last:item()))
  check.equal(ty.io.to_bytes(model:get "model.layers.0.self_attn.q_proj.weight"), codes, "codes stay as they are")
end)

check.test("what it takes, on the meta device and for real", function()
  local function build(device)
    local model = nn.with_defaults({ device = device, dtype = "bf16" }, small)
    peft.qlora(model, { rank = 8 })
    local opt = optim.AdamW(peft.parameters(model), { bits = 8, paged = true })
    for _, p in ipairs(peft.parameters(model)) do p:set_grad(ty.zeros_like(p)) end
    opt:step()
    return peft.footprint(model, opt)
  end
  collectgarbage()
  local real = build "cpu"
  check.equal(build "meta", real)
  check.equal(real.total, real.frozen + 2 * real.adapter + real.state)
  check.ok(real.quantized > 0 and real.quantized < real.frozen, "codes and the rest")
  local config = { vocab_size = 96, hidden_size = 64, intermediate_size = 128, num_hidden_layers = 2,
    num_attention_heads = 4, max_position_embeddings = 64 }
  local told, made = peft.account(llm.Llama, config), peft.account(llm.Llama, config, "cpu")
  check.equal(told.footprint, made.footprint)
  check.equal(told.parameters, made.parameters)
  check.equal(made.parameters, llm.Llama(config):count_parameters())
  check.equal(made.footprint.state, 2 * made.footprint.adapter, "two moments in f32")
  check.equal(tostring(told.model:parameters()[1].device), "meta")
  check.fails(function() peft.account(config) end, "peft.account: class: expected a function, got a table")
  local model = nn.with_defaults({ device = "meta" }, small)
  check.equal(quant.quantize(model).error, nil)
end)

check.test("errors", function()
  local model = small()
  local function fails(options, text) check.fails(function() peft.qlora(model, options) end, text) end
  fails({ quantize = "f16" },
    "peft.qlora: quantize: expected nf4, mxfp4, nvfp4, q8_0, q4_0, q2_k, q3_k, q4_k or q6_k, got f16")
  fails({ skip = "lm_head" }, 'peft.qlora: skip: expected a table, got "lm_head"')
  fails({ rank = 0 }, "peft.qlora: rank must be")
  fails({ targets = { "zzz" } }, "peft.qlora: targets: no module is named 'zzz'; there are model")
  fails({ bits = 4 }, "no option 'bits'")
  check.equal(model:get("model.layers.0.self_attn.q_proj.weight").dtype, "f32", "nothing is changed by what failed")
  check.fails(function() quant.quantize({}) end, "expected a module")
  check.fails(function() quant.quantize(model, { dtype = "f32" }) end, "quant.quantize: dtype: expected nf4")
  check.fails(function() peft.footprint(model) end, "has no adapter")
  peft.qlora(model)
  fails({}, "has an adapter already")
end)

scratch.clean()
check.finish()
