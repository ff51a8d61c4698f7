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
--     DiLoCo, NoLoCo      outer optimizers of replicas that train by themselves for some steps (local_updates.lua)
--     CO2                 one whose all-reduce has the next round to arrive
--     train_locally       the workload trained by each of these, and by gradients that are meant at every step
--     replicas            what that gave on all ranks together; local_work is the workload for it
--     pace                what their rounds take where replicas are slow or late
--     monitor             names a slow, hung or dead rank from its collectives, and starts the job again without it
--     monitored_training  a job for it: data-parallel training from checkpoints, with faults
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
  workload = "tycho.dist.workload",
  DiLoCo = { "tycho.dist.local_updates", "DiLoCo" },
  NoLoCo = { "tycho.dist.local_updates", "NoLoCo" },
  partner = { "tycho.dist.local_updates", "partner" },
  spread = { "tycho.dist.local_updates", "spread" },
  CO2 = { "tycho.dist.co2", "CO2" },
  train_locally = { "tycho.dist.local_training", "train" },
  replicas = { "tycho.dist.local_training", "replicas" },
  local_work = { "tycho.dist.local_training", "work" },
  local_arguments = { "tycho.dist.local_training", "arguments" },
  monitor = "tycho.dist.monitor",
  monitored_training = { "tycho.dist.monitored_training", "train" },
  pace = { "tycho.dist.local_training", "pace" },
}, "tycho.dist")
