--- Training and inference on several ranks: require "tycho.dist".
--
--     local dist = require "tycho.dist"
--     local results = dist.run(4, function(group)      -- four ranks, each a thread with a Lua state of its own
--       local x = ty.full({ 3 }, group.rank)
--       return group:all_reduce(x, "mean"):tolist()
--     end)
--
--     run                 a function as several ranks
--     RankGroup           what a rank exchanges with others (group.lua)
--     copied, summed ...  collectives with a history (functional.lua)
--     buckets             gradients of a model in a few flat tensors, and their mean over ranks
--     pipeline, schedule  layers divided over ranks, through which micro-batches go, and in which order (pipeline.lua)
--     grid                groups for tensor, pipeline and data parallelism at once
--     grid_trial          training on such a grid, for recipes
--     pipeline_trial      what a pipeline takes, for recipes
--     timeline            pictures of what ranks did when
--     universal           checkpoints of ranks that other numbers of ranks go on from
--     universal_trial     training that such checkpoints are of, for the recipe
--     workload            what ranks train where ways to train are compared
local functional = require "tycho.dist.functional"

return require "tycho.lazy" ({
  run = require("tycho.dist.ranks").run,
  RankGroup = require "tycho.dist.group",
  copied = functional.copied,
  summed = functional.summed,
  gathered = functional.gathered,
  scattered = functional.scattered,
  gathered_apart = functional.gathered_apart,
  sum_scattered = functional.sum_scattered,
  exchanged = functional.exchanged,
  buckets = require("tycho.dist.gradients").buckets,
}, {
  grid = "tycho.dist.grid",
  grid_trial = "tycho.dist.grid_trial",
  pipeline = "tycho.dist.pipeline",
  pipeline_trial = "tycho.dist.pipeline_trial",
  schedule = "tycho.dist.schedule",
  timeline = "tycho.dist.timeline",
  universal = "tycho.dist.universal",
  universal_trial = "tycho.dist.universal_trial",
  workload = "tycho.dist.workload",
}, "tycho.dist")
