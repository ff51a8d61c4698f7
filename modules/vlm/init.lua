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
--     local gallery = vlm.gallery("path/of/pictures", vlm.gallery_encoder "path/of/clip")
--     print(gallery:search("a red car", 5)[1].path)
--
-- Methods: vlm.sail (frozen encoders aligned by light heads), vlm.msd (a large batch of contrast in the memory of a
-- small one), vlm.icar (simple pictures leave the encoder early), vlm.label_instructions (what annotators were told),
-- vlm.mixture_of_depths (deeper layers work on fewer of a picture's tokens), vlm.flashvid (a clip in a tenth of its
-- tokens, beside the plain ways of vlm.fewer), vlm.vlv (captions from a painter that learnt to read them), vlm.solo
-- (patches of pixels among the words, no network of pictures), vlm.attended (what of a picture a question asks for),
-- vlm.pooling (fewer tokens of a picture), vlm.grader (a model that grades captions). Training and measuring:
-- vlm.Dialogue and vlm.packing (questions as rows of tokens), vlm.frames (clips in a model that learnt on pictures),
-- vlm.answers (what is answered, by kind), vlm.cost (operations and bytes, from shapes). Networks: CLIPModel, Llava, of
-- tycho.models.
--
-- Volumes and reports: vlm.merlin (a network of volumes that learns codes and reports, and finds by words),
-- vlm.llava_rad (reports of pictures by a light adapter between frozen models), vlm.hulu (text, pictures, volumes and
-- clips as frames of one model, places that did not change left out).
--
-- Policies of a robot arm: vlm.efficientvla (fewer layers, tokens and steps), vlm.token_cache (what was made of the
-- last picture is used again).
local contrastive = require "tycho.vlm.contrastive"
local retrieval = require "tycho.vlm.retrieval"
require "tycho.llm" -- what Llava generates with

local M = {
  contrastive_loss = contrastive.loss,
  sigmoid_loss = contrastive.sigmoid_loss,
  fit_contrastive = contrastive.fit,
  cached_backward = contrastive.cached_backward,
  accumulated_backward = contrastive.accumulated_backward,
  cycles = contrastive.cycles,
  retrieval = retrieval.retrieval,
  recall = retrieval.recall,
  found = retrieval.found,
  zero_shot = retrieval.zero_shot,
  prompts = retrieval.prompts,
  named = retrieval.named,
  embed = retrieval.embed,
}

return require "tycho.lazy" (M, {
  Dialogue = "tycho.vlm.dialogue",
  answers = "tycho.vlm.answers",
  load = { "tycho.vlm.chat", "load" },
  join = "tycho.vlm.join",
  mixture_of_depths = "tycho.vlm.mixture_of_depths",
  packing = "tycho.vlm.packing",
  pooling = "tycho.vlm.pooling",
  grader = "tycho.vlm.grader",
  solo = "tycho.vlm.solo",
  sail = "tycho.vlm.sail",
  llava_rad = "tycho.vlm.llava_rad",
  merlin = "tycho.vlm.merlin",
  msd = "tycho.vlm.msd",
  attended = "tycho.vlm.attended",
  cost = "tycho.vlm.cost",
  fewer = "tycho.vlm.fewer",
  flashvid = "tycho.vlm.flashvid",
  gallery = { "tycho.vlm.gallery", "open" },
  gallery_encoder = { "tycho.vlm.gallery", "encoder" },
  frames = "tycho.vlm.frames",
  efficientvla = "tycho.vlm.efficientvla",
  token_cache = "tycho.vlm.token_cache",
  hulu = "tycho.vlm.hulu",
  icar = "tycho.vlm.icar",
  label_instructions = "tycho.vlm.label_instructions",
  vlv = "tycho.vlm.vlv",
  CLIPModel = { "tycho.models", "CLIPModel" },
  Llava = { "tycho.models", "Llava" },
}, "tycho.vlm")
