--- A training step of ViT-S/16: 224x224, batch 8, AdamW.
local steps = require "bench.lib.steps"

local batch, width, layers, patches = 8, 384, 12, 196
local tokens, parameters = patches + 1, 22050664
local embedding = 2 * patches * 768 * width
local forward = batch * (2 * layers * (tokens * 12 * width ^ 2 + 2 * tokens ^ 2 * width) + embedding)

-- Nobody wants the gradient of the pictures.
return {
  { name = "step", target = 0.4, rounds = 5,
    work = { f32 = 3 * forward - batch * embedding, update = 28 * parameters },
    bars = { peer = 1.3, limit = 0.75 }, peer = { "step" }, setup = function() return steps.modes "vit" end },
}
