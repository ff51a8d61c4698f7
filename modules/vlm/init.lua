--- Pictures and words: require "tycho.vlm".
--
--     local vlm = require "tycho.vlm"
--     vlm.fit_contrastive(clip, loader, { steps = 2000 })
--     print(vlm.retrieval(clip, pictures, captions, { among = 100 }).captions)
--
-- The networks are those of tycho.models: CLIPModel, Llava.
local contrastive = require "tycho.vlm.contrastive"

return {
  contrastive_loss = contrastive.loss,
  fit_contrastive = contrastive.fit,
  retrieval = require "tycho.vlm.retrieval",
}
