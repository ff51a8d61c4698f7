--- Linear layers with block-quantized weights, in the shapes of a Llama model of 1.1 billion parameters: one row with
--- weights from memory (decode), 512 rows (prompt). f16 and bf16 stand beside them; whole models beside
--- llama.cpp are in llm.lua.
local ty = require "tycho"

local items = {}
local shapes = { { 2048, 2048 }, { 256, 2048 }, { 5632, 2048 }, { 2048, 5632 }, { 32000, 2048 } } -- out, in
local bits = { q8_0 = 8.5, q4_0 = 4.5, q2_k = 2.625, q3_k = 3.4375, q4_k = 4.5, q6_k = 6.5625, nf4 = 4.125,
  mxfp4 = 4.25, nvfp4 = 4.5, f16 = 16, bf16 = 16 }
local in_f32 = { nf4 = true } -- prompts: decoded and multiplied in f32
local function halves(kind) return kind == "f16" or kind == "bf16" end

for _, kind in ipairs { "q8_0", "q4_0", "q2_k", "q3_k", "q4_k", "q6_k", "nf4", "mxfp4", "nvfp4", "f16", "bf16" } do
  for _, s in ipairs(shapes) do
    local n, k = s[1], s[2]
    local bytes = n * k * bits[kind] / 8
    items[#items + 1] = { name = ("decode/%s/1x%dx%d"):format(kind, n, k), work = { read = bytes },
      bars = { limit = n * k >= 1 << 22 and 0.85 or nil }, setup = function()
        local count = math.ceil((256 << 20) / bytes)
        local x, one, weights, i = ty.randn(1, k), ty.randn(n, k):to(kind), {}, 0
        if halves(kind) then x = x:to(kind) end
        for j = 1, count do weights[j] = one:clone() end
        return function()
          i = i % count + 1
          ty.linear(x, weights[i]):free()
        end
      end }
  end
end

for _, kind in ipairs { "q8_0", "q4_0", "q2_k", "q3_k", "q4_k", "q6_k", "nf4", "mxfp4", "nvfp4" } do
  for _, s in ipairs { { 2048, 2048 }, { 5632, 2048 }, { 2048, 5632 } } do
    local n, k = s[1], s[2]
    items[#items + 1] = { name = ("prompt/%s/512x%dx%d"):format(kind, n, k),
      work = { [in_f32[kind] and "f32" or "int8"] = 2 * 512 * n * k }, bars = { limit = in_f32[kind] and 0.8 or 0.4 },
      setup = function()
        local x, w = ty.randn(512, k), ty.randn(n, k):to(kind)
        return function() ty.linear(x, w):free() end
      end }
  end
end

return items
