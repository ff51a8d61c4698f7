-- One model through all of it: pruned, quantized, adapted, merged, written and read back, in several formats; and
-- what does not go together, with the model as before.
local here = (arg and arg[0]:match ".*/" or "tests/modules/quant/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local llm, peft = require "tycho.llm", require "tycho.peft"
local prune, quant = require "tycho.prune", require "tycho.quant"

local function llama()
  ty.manual_seed(3)
  return llm.Llama { vocab_size = 64, hidden_size = 64, intermediate_size = 128, num_hidden_layers = 2,
    num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 32 }
end
ty.manual_seed(1)
local data = { { tokens = ty.randint(0, 64, { 4, 16 }) }, { tokens = ty.randint(0, 64, { 4, 16 }) } }
local tokens = ty.randint(0, 64, { 4, 16 })

local function logits(model) return ty.no_grad(model.forward, model, tokens):to "f32" end
local function off(a, b) return (a - b):abs():max():item() end
local function zeros(model)
  local all, none = 0, 0
  for _, layer in ipairs(quant.linears(model)) do
    local w = layer.module.weight:to "f32"
    all, none = all + w:numel(), none + w:eq(0):to("f32"):sum():item()
  end
  return none / all
end

local function tune(model, steps)
  local _, report = peft.lora(model, { rank = 4, alpha = 8, targets = "all-linear" })
  check.equal(report.modules, 14)
  check.equal(report.bytes, 4 * report.parameters)
  check.close(report.share, report.parameters / (report.parameters + model:count_parameters()), 0.05)
  local opt = ty.optim.AdamW(peft.parameters(model), { lr = 1e-2 })
  local first, last
  model:train()
  for _ = 1, steps do
    last = model:loss(tokens)
    first = first or last:item()
    opt:step(last)
  end
  model:eval()
  check.ok(last:item() < 0.9 * first, ("it learns: %.3f to %.3f"):format(first, last:item()))
end

for _, format in ipairs { "q8_0", "q4_0", "mxfp4" } do
  check.test("pruned, quantized to " .. format .. ", adapted, merged, as GGUF and as safetensors", function()
    local model = llama()
    local pruned = prune.wanda(model, data, { sparsity = 0.5 })
    prune.release(model)
    check.close(pruned.sparsity, 0.5, 1e-6, "the report of pruning")
    check.close(pruned.bytes / pruned.dense, 0.5625, 1e-6)
    check.ok(zeros(model) > 0.48, "half of the weights are zeros")
    local report = quant.quantize(model, { dtype = format })
    check.ok(report.bits > 4 and report.bits < 9 and report.error > 0, "the report of quantizing")
    check.equal(report.modules, 14)
    check.ok(zeros(model) > 0.48, "zeros are zeros in blocks")
    tune(model, 25)
    local adapted = logits(model)

    -- Into weights of f32, which lose nothing, and as a folder of safetensors.
    local whole = peft.merge(model, { dtype = "f32" })
    check.ok(whole.mean_error < 1e-7, "merged without rounding")
    -- Products with codes round what goes in to 8 bits.
    local near = 0.03 * adapted:abs():max():item()
    check.ok(off(logits(model), adapted) < near, "merged")
    local merged = logits(model)
    local folder = scratch.file("composed-" .. format)
    peft.unmerge(model)
    check.ok(off(logits(model), adapted) == 0, "unmerged, to the bit")
    peft.merge(model, { dtype = "f32", keep = false })
    peft.remove(model):save(folder)
    check.ok(off(logits(llm.load(folder)), merged) < 1e-5, "the folder")

    -- Encoded again, as the report says, and as a file of blocks.
    local again = quant.quantize(model, { dtype = format })
    check.ok(again.error > 0)
    local codes, path = logits(model), scratch.file("composed-" .. format .. ".gguf")
    local written = quant.save(model, path, { dtype = "f32" })
    check.equal(written.tensors["blk.0.attn_q.weight"], format)
    local back = llm.load(path)
    check.equal(back:get "model.layers.1.mlp.down_proj.weight".dtype, format)
    for _, layer in ipairs(quant.linears(model)) do
      local ours, there = layer.module.weight:to "f32", back:get(layer.name .. ".weight"):to "f32"
      if layer.name:find "[qk]_proj$" then -- their rows have another order in GGUF
        ours, there = (ours:sort(0)), (there:sort(0))
      end
      check.ok(there:equal(ours), layer.name .. ": other codes in the file")
    end
    -- The order of sums may differ in the last bit, and with it which of two codes an input of a product goes to.
    check.ok(off(logits(back), codes) < near, "the file")
  end)
end

check.test("merged into codes of GPTQ: encoded again, with what that took in the report", function()
  local model = llama()
  prune.release(prune.sparsegpt(model, data, { pattern = "2:4" }) and model)
  quant.gptq.quantize(model, data, { format = "q4_0" })
  tune(model, 10)
  local adapted = logits(model)
  local report = peft.merge(model, { keep = false })
  check.ok(report.mean_error > 1e-4 and report.max_error >= report.mean_error, "what encoding again took")
  peft.remove(model)
  check.equal(model:get "model.layers.0.self_attn.q_proj.weight".dtype, "q4_0")
  check.ok(off(logits(model), adapted) < 1)
  local path = scratch.file "composed-gptq.gguf"
  quant.save(model, path)
  check.ok(off(logits(llm.load(path)), logits(model)) < 1e-4)
end)

check.test("what does not go together is one error, and the model as before", function()
  local model = llama()
  quant.quantize(model, { dtype = "nvfp4" })
  local before = logits(model)
  local path = scratch.file "composed-nvfp4.gguf"
  check.fails(function() quant.save(model, path) end, "quant.save: GGUF has no nvfp4, in which .* is")
  check.fails(function() prune.wanda(model, data, { sparsity = 0.5 }) end, "quantized")
  check.fails(function() prune.magnitude(model, { sparsity = 0.5 }) end, "quantized")
  check.fails(function() quant.gptq.quantize(model, data, { bits = 3 }) end, "quantized")
  check.fails(function() quant.awq(model, data, { bits = 4 }) end, "quantized")
  check.fails(function() quant.vector.quantize(model, {}) end, "quantized")
  check.fails(function() prune.structured(model, { ratio = 0.5 }) end, "quantized")
  check.equal(logits(model):tolist(), before:tolist())
end)

check.finish()
