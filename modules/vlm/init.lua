--- Pictures and words: require "tycho.vlm".
--
--     local vlm = require "tycho.vlm"
--     vlm.fit_contrastive(clip, loader, { steps = 2000 })
--     print(vlm.retrieval(clip, pictures, captions, { among = 100 }).captions)
--
--     local model = hub.load "path/of/llava"
--     model:generate(tokens, 40, { pictures = pictures })
--
-- Networks: CLIPModel, Llava, of tycho.models.
local contrastive = require "tycho.vlm.contrastive"
require "tycho.llm" -- what Llava generates with

local M = {
  contrastive_loss = contrastive.loss,
  fit_contrastive = contrastive.fit,
  retrieval = require "tycho.vlm.retrieval",
  Dialogue = require "tycho.vlm.dialogue",
  join = require "tycho.vlm.join",
}

return require "tycho.lazy" (M, { CLIPModel = { "tycho.models", "CLIPModel" }, Llava = { "tycho.models", "Llava" } })
