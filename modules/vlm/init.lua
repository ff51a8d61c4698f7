--- Pictures and words: require "tycho.vlm".
--
--     local vlm = require "tycho.vlm"
--     vlm.fit_contrastive(clip, loader, { steps = 2000 })
--     print(vlm.retrieval(clip, pictures, captions, { among = 100 }).captions)
--
--     local model = hub.load "path/of/llava"
--     model:generate(tokens, 40, { pictures = pictures })
--
--     local chat = vlm.load "path/of/llava"
--     print(chat:generate { { role = "user", content = { { type = "image", image = "photo.jpg" },
--       { type = "text", text = "what is this?" } } } })
--
-- Methods: vlm.sail (frozen encoders aligned by light heads), vlm.msd (a large batch of contrast in the memory of a
-- small one), vlm.icar (simple pictures leave the encoder early), vlm.label_instructions (what annotators were told),
-- vlm.mixture_of_depths (deeper layers work on fewer of a picture's tokens), vlm.attended (what of a picture a question
-- asks for), vlm.efficientvla (a policy with fewer layers, tokens and steps). Training and measuring: vlm.Dialogue and
-- vlm.packing (questions as rows of tokens), vlm.answers (what is answered, by kind), vlm.cost (operations and bytes,
-- from shapes). Networks: CLIPModel, Llava, of tycho.models.
local contrastive = require "tycho.vlm.contrastive"
local retrieval = require "tycho.vlm.retrieval"
require "tycho.llm" -- what Llava generates with

local M = {
  contrastive_loss = contrastive.loss,
  fit_contrastive = contrastive.fit,
  cached_backward = contrastive.cached_backward,
  cycles = contrastive.cycles,
  retrieval = retrieval.retrieval,
  recall = retrieval.recall,
  zero_shot = retrieval.zero_shot,
  embed = retrieval.embed,
}

return require "tycho.lazy" (M, {
  Dialogue = "tycho.vlm.dialogue",
  answers = "tycho.vlm.answers",
  load = { "tycho.vlm.chat", "load" },
  join = "tycho.vlm.join",
  mixture_of_depths = "tycho.vlm.mixture_of_depths",
  packing = "tycho.vlm.packing",
  sail = "tycho.vlm.sail",
  msd = "tycho.vlm.msd",
  attended = "tycho.vlm.attended",
  cost = "tycho.vlm.cost",
  efficientvla = "tycho.vlm.efficientvla",
  icar = "tycho.vlm.icar",
  label_instructions = "tycho.vlm.label_instructions",
  CLIPModel = { "tycho.models", "CLIPModel" },
  Llava = { "tycho.models", "Llava" },
})
