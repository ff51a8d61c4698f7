--- Diffusion and flow models: require "tycho.diffusion".
--
--     local diffusion = require "tycho.diffusion"
--     local model = diffusion.UNet { levels = { 32, { channels = 64, attention = true } }, classes = 10 }
--     local flow = diffusion.Flow()
--     local loss = flow:loss(model, pictures, { labels = labels })
--     local samples = flow:sample(model, { 16, 1, 8, 8 }, { condition = { labels = labels }, guidance = 2 })
--
-- A network is called as model(x, t, condition) with t [n] from 0 to 1000 (what the schedule's network_time says) and a
-- condition as in tycho.diffusion.condition. Everything else is a value of its own, and a method is another value:
--
--     schedule    how much of the clean sample and of the noise there is at a time
--     spacing     which times a sampler visits
--     prediction  epsilon, sample, v, flow, edm: each from each other
--     objective   what the network is trained for: times, weighting
--     solver      one step
--     seeds       noise by seeds, one for each sample
--     guidance    what is made of predictions for several conditions
--     Sampler     the loop, with parts around its stages
--     blocks      a network's blocks left out and replaced, as a part
--     attention   self-attention computed otherwise: by few keys, by blocks that a draft or a hierarchy chooses
--     cache       calls and blocks left out where what was said before serves, as parts
--     search      times and blocks for few steps, found by evolution
--     inverse     volumes from few measurements, classical and by a prior of slices
--     stages      steps at several sizes, as a part
--     tiles       samples larger than the network, in overlapping tiles, as a part
--     structure   large samples led by their structure, on several devices
--     sized       a transformer that takes several sizes
--     fusion_sampling  a picture and words asked for at once, as a part and a guidance
--     picture_words    words that a network says of a picture, for prompts
--     inpaint     a part of a picture painted anew, as a part
--     finite      where numbers that are none began, as a part
--     measure     how alike pictures are, and sets of them
--     subject     things that are shown and not named, and a factory of pairs to learn that from
--     unlearn     making a network forget a concept and keep the rest
--     experts     networks that have learnt parts of the data, and a router that weights them
--     principal   small pictures as few numbers
--     FlowMap     jumps along the paths of a flow, learnt by self-distillation
--     tokens      generators over tokens: the loop that draws them, and tokenizers
--     binary      diffusion of bits
--     preference  pairs of samples, and learning to prefer as a judge does
--     policy      what is seen to what is done: training and drawing with such networks
--     compare     samplers beside a full one: likeness, evaluations, operations, seconds
--
-- Flow, DDPM and EDM are the usual ones put together; published makes one of diffusers' scheduler_config.json, and
-- TextToImage paints with a folder of diffusers.
local process = require "tycho.diffusion.process"

return require "tycho.lazy" ({
  Flow = process.Flow,
  DDPM = process.DDPM,
  EDM = process.EDM,
  Objective = require "tycho.diffusion.objective",
  Sampler = require "tycho.diffusion.sampler",
  TextToImage = require "tycho.diffusion.text_to_image",
  attention = require "tycho.diffusion.attention",
  blocks = require "tycho.diffusion.blocks",
  binary = require "tycho.diffusion.binary",
  cache = require "tycho.diffusion.cache",
  autoencoder = require "tycho.diffusion.autoencoder",
  compare = require "tycho.diffusion.compare",
  compiled = require "tycho.diffusion.compiled",
  condition = require "tycho.diffusion.condition",
  controlled = require "tycho.diffusion.controlled",
  FlowMap = require "tycho.diffusion.flowmap",
  finite = require "tycho.diffusion.finite",
  finetune = require "tycho.diffusion.finetune",
  fusion_sampling = require "tycho.diffusion.fusion_sampling",
  gallery = require "tycho.diffusion.gallery",
  guidance = require "tycho.diffusion.guidance",
  ChunkPolicy = require "tycho.diffusion.chunk_policy",
  KeyPoses = require "tycho.diffusion.key_poses",
  inverse = require "tycho.diffusion.inverse",
  inversion = require "tycho.diffusion.inversion",
  lora = require "tycho.diffusion.lora",
  inpaint = require "tycho.diffusion.inpaint",
  measure = require "tycho.diffusion.measure",
  picture_words = require "tycho.diffusion.picture_words",
  policy = require "tycho.diffusion.policy",
  published = require "tycho.diffusion.published",
  prediction = require "tycho.diffusion.prediction",
  preference = require "tycho.diffusion.preference",
  principal = require "tycho.diffusion.principal",
  schedule = require "tycho.diffusion.schedule",
  search = require "tycho.diffusion.search",
  seeds = require "tycho.diffusion.seeds",
  solver = require "tycho.diffusion.solver",
  spacing = require "tycho.diffusion.spacing",
  sized = require "tycho.diffusion.sized",
  stages = require "tycho.diffusion.stages",
  structure = require "tycho.diffusion.structure",
  subject = require "tycho.diffusion.subject",
  tiles = require "tycho.diffusion.tiles",
  times = require "tycho.diffusion.times",
  tokens = require "tycho.diffusion.tokens",
  unlearn = require "tycho.diffusion.unlearn",
  weighting = require "tycho.diffusion.weighting",
  experts = require "tycho.diffusion.experts",
  DiT = require "tycho.models.dit",
  UNet = require "tycho.models.unet",
}, {}, "tycho.diffusion")
