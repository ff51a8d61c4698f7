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
--     tensor_parallel     matrices of a transformer over ranks
--     ladder_residual     layers that compute while sums over ranks are on their way
--     vocabulary          embeddings and cross entropy over words of which each rank has some
--     sequence_parallel   sequences over ranks, with ring_attention
--     decoding            what a prompt and tokens take by a rank's clock
--     timeline            a picture of what ranks did when
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
  tensor_parallel = "tycho.dist.tensor_parallel",
  ladder_residual = "tycho.dist.ladder",
  sequence_parallel = { "tycho.dist.sequence_parallel", "split" },
  ring_attention = { "tycho.dist.sequence_parallel", "attention" },
  decoding = "tycho.dist.decoding",
  timeline = "tycho.dist.timeline",
  vocabulary = "tycho.dist.vocabulary",
}, "tycho.dist")
