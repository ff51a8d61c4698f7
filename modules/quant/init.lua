--- Quantization: require "tycho.quant".
--
--     local quant = require "tycho.quant"
--     quant.convert("path/of/a/hugging-face/folder", "model.gguf", "q4_k")
--     print(quant.quantize(model, { dtype = "nf4" }).bits)        -- in memory; peft.qlora trains on top of it
--     local important = quant.imatrix.collect(model, dataset)      -- llama.cpp's importance matrices, and their files
--     quant.quantize(model, { dtype = "q2_k", importance = important })
--     quant.quantize(model, { dtype = "mxfp4" })                   -- or nvfp4: floats of four bits, quant.fp4
--     quant.gptq.quantize(model, dataset, { format = "q3_k" })    -- with calibration; weights stay packed
--     quant.awq(model, dataset, { bits = 4, group = 128 })        -- likewise, by factors of channels
--     quant.hqq(model, { bits = 4, group = 64 })                  -- without data
--     quant.smooth(model, dataset)                                -- before activations are rounded to 8 bits
--     quant.save(model, "model.gguf")
--     quant.trit.quantize(model, { group = 128 })                 -- two trit-planes, without data
--
-- quant.compare puts ways side by side: bytes, divergence from the original, speed. What quantizing took is given back
-- by low-rank adapters: tycho.peft.eora.
local hub = require "tycho.hub"
local blocks = require "tycho.quant.blocks"
local gptq = require "tycho.quant.gptq"

return require "tycho.lazy" ({
  convert = hub.convert,
  quantize = require("tycho.quant.weights").quantize,
  save = hub.save_gguf,
  gptq = gptq,
  imatrix = require "tycho.quant.imatrix",
  awq = require("tycho.quant.awq").quantize,
  hqq = require("tycho.quant.hqq").quantize,
  smooth = require("tycho.quant.scaling").smooth,
  absmax = require "tycho.quant.absmax",
  fp4 = require "tycho.quant.fp4",
  hadamard = require "tycho.quant.hadamard",
  linear = require "tycho.quant.quant_linear",
  quartet = require "tycho.quant.quartet",
  fp4_design = require "tycho.quant.fp4_design",
  trit = require "tycho.quant.trit",
  efficient_qat = require "tycho.quant.efficient_qat",
  qllm = require "tycho.quant.qllm",
  vector = require "tycho.quant.vector",
  stored = require "tycho.quant.stored",
  baselines = require "tycho.quant.baselines",
  compare = require "tycho.quant.comparison",
  round = gptq.round,
  linears = function(model, skip) return blocks.linears("quant.linears", model, skip) end,
}, {}, "tycho.quant")
