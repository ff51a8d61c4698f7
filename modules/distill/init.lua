--- Networks that learn from other networks, to sample in fewer evaluations: require "tycho.distill".
--
--     local distill = require "tycho.distill"
--     local teacher = distill.teacher(model)
--     local store = distill.store("runs/pairs", { base = "digits", seed = 0, count = 2000 }, function()
--       return distill.pairs(teacher, sampler, { 2000, 1, 8, 8 }, { condition = { labels = labels } })
--     end)
--     local losses, student = distill.fit(model:clone():requires_grad_(), store:loader { batch = 64 }, { steps = 500,
--       teacher = teacher, loss = function(parts, batch) ... end, average = 0.999 })
--     print(store.evaluations)          -- what the material took of the teacher, made now or before
--
--     teacher       a frozen network whose evaluations are counted
--     fit           the loop: ty.train.fit with teacher and moving average at hand in the loss
--     store         material of a teacher, made once for each base and seed
--     pairs         noise and the samples that a solver makes of it
--     trajectories  states of guided sampling, with the guided predictions there
--     reflow_loss   straightens a flow on its own pairs; straightness says how far that went
--     one_step_loss makes one step do what a flow does
--     subpath_loss  consistency distillation on lines between points of a path; a SubpathStudent is told where
--     hipa_loss     one step that has the high frequencies of many; bands, spectrum and edges show what it lacks
--     DistributionMatching  a teacher's scores for the samples of a generator; matching_loss adds a reward to it
--     GuidanceAdapters  one pass in the place of two: guidance in adapters of a frozen network
--     linfusion     a student whose self-attention is linear in the pixels, and the loss that it learns by
--     mamba         attention of a decoder as a state space model, which learns from it in three stages
--     base          what a recipe begins with, by name: digits, a checkerboard, a painter of the zoo; guided, sampler
--     digits        their small base and their judge; points: a checkerboard; shapes: coloured, with captions
--     tasks         data, a network, samples and their distance to the data, for maps of few steps
--     shape_painter a network that paints such shapes, as a teacher, and classifiers of their words
local bases = require "tycho.distill.base"
local dmd = require "tycho.distill.dmd"
local guidance = require "tycho.distill.guidance"
local highfreq = require "tycho.distill.highfreq"
local linfusion = require "tycho.distill.linfusion"
local mamba = require "tycho.distill.mamba"
local material = require "tycho.distill.material"
local reflow = require "tycho.distill.reflow"
local subpaths = require "tycho.distill.subpath"

return require "tycho.lazy" ({
  teacher = require "tycho.distill.teacher",
  fit = require "tycho.distill.fit",
  base = bases.base,
  sampler = bases.sampler,
  guided = bases.guided,
  digits = require "tycho.distill.digits",
  points = require "tycho.distill.points",
  tasks = require "tycho.distill.tasks",
  shapes = require "tycho.distill.shapes",
  shape_painter = require "tycho.distill.shape_painter",
  store = require "tycho.distill.store",
  pairs = material.pairs,
  trajectories = material.trajectories,
  flatten = material.flatten,
  condition = material.condition,
  reflow_loss = reflow.reflow_loss,
  one_step = reflow.one_step,
  one_step_loss = reflow.one_step_loss,
  straightness = reflow.straightness,
  SubpathStudent = subpaths.SubpathStudent,
  subpath = subpaths.subpath,
  subpath_loss = subpaths.loss,
  huber = subpaths.huber,
  bands = highfreq.bands,
  swap_bands = highfreq.swap_bands,
  spectrum = highfreq.spectrum,
  edges = highfreq.edges,
  high_distance = highfreq.high_distance,
  hipa_loss = highfreq.loss,
  DistributionMatching = dmd.DistributionMatching,
  generator = dmd.generator,
  matching_loss = dmd.loss,
  GuidanceAdapters = guidance.GuidanceAdapters,
  guidance_loss = guidance.loss,
  guidance_distance = guidance.distance,
  linfusion = linfusion.student,
  linfusion_loss = linfusion.loss,
  linear_attention = linfusion.attention,
  watch = linfusion.watch,
  mamba = mamba,
}, {}, "tycho.distill")
