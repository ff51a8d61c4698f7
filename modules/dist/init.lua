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
--     zero                ranks divide moments, gradients, parameters of a model (zero.lua)
--     low_bandwidth       the same over links of three kinds, with few bits (low_bandwidth.lua)
--     onebit_adam         Adam that exchanges signs (onebit_adam.lua), by sign_mean
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
  zero = { "tycho.dist.zero", "new" },
  low_bandwidth = { "tycho.dist.low_bandwidth", "new" },
  onebit_adam = { "tycho.dist.onebit_adam", "new" },
  sign_mean = { "tycho.dist.sign_mean", "new" },
  pack_signs = { "tycho.dist.sign_mean", "pack" },
  unpack_signs = { "tycho.dist.sign_mean", "unpack" },
}, "tycho.dist")
