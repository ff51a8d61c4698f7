--- Diffusion and flow models: require "tycho.diffusion".
--
--     local diffusion = require "tycho.diffusion"
--     local model = diffusion.UNet { channels = { 32, 64 }, classes = 10 }
--     local flow = diffusion.Flow()
--     local loss = flow:loss(model, images, labels)
--     local samples = flow:sample(model, { 16, 1, 8, 8 }, { labels = labels, guidance = 2 })
--
-- A network is called as model(x, t, labels) with t from 0 to 1000 and has `null_label`, the label that stands for any
-- class.
local embedding = require "tycho.diffusion.embedding"

return {
  Flow = require "tycho.diffusion.flow",
  DDPM = require "tycho.diffusion.ddpm",
  UNet = require "tycho.models.unet",
  DiT = require "tycho.models.dit",
  guided = embedding.guided,
  drop_labels = embedding.drop_labels,
  measure = require "tycho.diffusion.measure",
}
