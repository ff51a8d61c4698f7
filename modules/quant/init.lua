--- Quantization: require "tycho.quant".
--
--     local quant = require "tycho.quant"
--     quant.convert("path/of/a/hugging-face/folder", "model.gguf", "q4_k")
return { convert = require("tycho.quant.gguf").convert }
