--- GPT-2 124M: training steps with AdamW, and decoding one token after 128 others. The limit of a step is its
-- operations at the FMA rate and AdamW's traffic at the bandwidth of an update in place; of a token, reading every
-- weight once.
local steps = require "bench.lib.steps"

local items = {}
local parameters = 124439808

for _, shape in ipairs { { 4, 64 }, { 1, 256 }, { 1, 1024 } } do
  local batch, t = shape[1], shape[2]
  local forward = 2 * batch * t * (12 * 12 * 768 * 768 + 50257 * 768) + 12 * 2 * 768 * t * t * batch
  items[#items + 1] = { name = ("step/B%d-T%d"):format(batch, t), target = 0.4, rounds = 5,
    work = { f32 = 3 * forward, update = 28 * parameters }, bars = { peer = 1.3, limit = 0.75 },
    peer = { "step", { batch = batch, t = t } }, setup = function() return steps.modes("gpt2", batch, t) end }
end

for _, dtype in ipairs { "f32", "bf16" } do
  local past = 128
  items[#items + 1] = { name = "decode/" .. dtype, bars = { peer = 1 },
    work = { read = (dtype == "f32" and 4 or 2) * (parameters - 1024 * 768) },
    peer = { "decode", { past = past, dtype = dtype } }, setup = function()
      local model = require("tycho.llm").GPT2 {}
      if dtype == "bf16" then model:to "bf16" end
      return steps.decode(model, past)
    end }
end

return items
