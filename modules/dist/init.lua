--- Training and inference on several ranks: require "tycho.dist".
--
--     local dist = require "tycho.dist"
--     local results = dist.run(4, function(group)      -- four ranks, each a thread with a Lua state of its own
--       local x = ty.full({ 3 }, group.rank)
--       return group:all_reduce(x, "mean"):tolist()
--     end)
--
--     run                 a function as several ranks
--     open                ranks that stay, and do what they are asked
--     world               the ranks that MPI has started: mpirun -n 4 tycho SCRIPT
--     RankGroup           what a rank exchanges with others (group.lua)
--     copied, summed ...  collectives with a history (functional.lua)
--     buckets             gradients of a model in a few flat tensors, and their mean over ranks
--     global, boxing      tensors of all ranks, and their forms: split, broadcast, partial
--     zero                ranks divide moments, gradients, parameters of a model (zero.lua)
--     layerwise           layers that are each divided in a way of their own (layerwise.lua)
--     layer_plans         which way for each layer is the fastest that fits (layer_plans.lua)
--     layer_trial         what layers take, and steps by such plans, for recipes
--     low_bandwidth       the same over links of three kinds, with few bits (low_bandwidth.lua)
--     onebit_adam         Adam that exchanges signs (onebit_adam.lua), by sign_mean
--     tensor_parallel     matrices of a transformer over ranks
--     ladder_residual     layers that compute while sums over ranks are on their way
--     vocabulary          embeddings and cross entropy over words of which each rank has some
--     pipeline, schedule  layers divided over ranks, through which micro-batches go, and in which order (pipeline.lua)
--     costs               what training a transformer costs, by formulas: operations, bytes, collectives (costs.lua)
--     placement           which machines have which stages where their networks differ (placement.lua)
--     plans, published    what a step takes by a plan of parallelism, the fastest that fits; steps that others measured
--     grid                groups for tensor, pipeline and data parallelism at once
--     grid_trial          training on such a grid, for recipes
--     pipeline_trial      what a pipeline takes, for recipes
--     timeline            pictures of what ranks did when
--     universal           checkpoints of ranks that other numbers of ranks go on from
--     universal_trial     training that such checkpoints are of, for recipes
--     universal_kills     such training that is killed and goes on
--     DiLoCo, NoLoCo      outer optimizers of replicas that train by themselves for some steps (local_updates.lua)
--     CO2                 one whose all-reduce has the next round to arrive
--     local_updates       these, who exchanges with whom, and how far replicas are apart
--     local_training      the workload trained by each of these, and what their rounds take
--     monitor             names a slow, hung or dead rank from its collectives, and starts the job again without it
--     monitored_training  a job for it: data-parallel training from checkpoints, with faults
--     sequence_parallel   sequences over ranks, with ring_attention
--     inference           an engine of ranks, called as one model (inference.lua)
--     peer_memory         layers that a rank has no room for, with others
--     decoding            what a prompt and tokens take by a rank's clock
--     unpadded            sequences of all lengths without padding, and as much work for every rank
--     workload            what ranks train where ways to train are compared
local functional = require "tycho.dist.functional"

return require "tycho.lazy" ({
  run = require("tycho.dist.ranks").run,
  open = require("tycho.dist.ranks").open,
  world = require("tycho.dist.ranks").world,
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
  boxing = "tycho.dist.boxing",
  costs = "tycho.dist.costs",
  CO2 = { "tycho.dist.co2", "CO2" },
  decoding = "tycho.dist.decoding",
  DiLoCo = { "tycho.dist.local_updates", "DiLoCo" },
  global = "tycho.dist.global",
  grid = "tycho.dist.grid",
  grid_trial = "tycho.dist.grid_trial",
  inference = "tycho.dist.inference",
  ladder_residual = "tycho.dist.ladder",
  layer_plans = "tycho.dist.layer_plans",
  layer_trial = "tycho.dist.layer_trial",
  layerwise = "tycho.dist.layerwise",
  local_training = "tycho.dist.local_training",
  local_updates = "tycho.dist.local_updates",
  low_bandwidth = { "tycho.dist.low_bandwidth", "new" },
  monitor = "tycho.dist.monitor",
  monitored_training = { "tycho.dist.monitored_training", "train" },
  NoLoCo = { "tycho.dist.local_updates", "NoLoCo" },
  onebit_adam = { "tycho.dist.onebit_adam", "new" },
  pack_signs = { "tycho.dist.sign_mean", "pack" },
  peer_memory = "tycho.dist.peer_memory",
  pipeline = "tycho.dist.pipeline",
  pipeline_trial = "tycho.dist.pipeline_trial",
  ring_attention = { "tycho.dist.sequence_parallel", "attention" },
  schedule = "tycho.dist.schedule",
  placement = "tycho.dist.placement",
  plans = "tycho.dist.plans",
  published = "tycho.dist.published",
  sequence_parallel = { "tycho.dist.sequence_parallel", "split" },
  sign_mean = { "tycho.dist.sign_mean", "new" },
  tensor_parallel = "tycho.dist.tensor_parallel",
  timeline = "tycho.dist.timeline",
  universal = "tycho.dist.universal",
  universal_kills = "tycho.dist.universal_kills",
  universal_trial = "tycho.dist.universal_trial",
  unpadded = "tycho.dist.unpadded",
  unpadded_trial = "tycho.dist.unpadded_trial",
  unpack_signs = { "tycho.dist.sign_mean", "unpack" },
  vocabulary = "tycho.dist.vocabulary",
  workload = "tycho.dist.workload",
  zero = { "tycho.dist.zero", "new" },
}, "tycho.dist")
