--- The operators of ONNX that are read, by name: function(inputs, attributes, context) -> outputs. inputs has nil where
-- one is left out, and n. The context: opset, outputs (how many are wanted), module_training, training (whether running
-- statistics may be changed), run(graph, inputs) for graphs among the attributes.
local M = {}

for _, kind in ipairs { "math", "reduce", "shape", "index", "nn", "norm", "resize", "recurrent", "quant", "control",
  "regions" } do
  for name, fn in pairs(require("tycho.hub.onnx.operators." .. kind)) do M[name] = fn end
end

return M
