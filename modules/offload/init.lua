--- Training and running models that do not fit: require "tycho.offload".
--
--     local engine = offload.engine(model, optimizer, { parameters = "file", moments = "file", file = "/data" })
--     for batch in batches do
--       local loss = engine:step(function() return nn.cross_entropy(model(batch.x), batch.y) end)
--     end
--     engine:save("run", { model = model, optimizer = optimizer })  -- within the memory of training; engine:load()
--     engine:close()                                -- everything is back; the model is as others
--
-- One engine for any model and any optimizer of ty.optim: parameters, gradients, moments and saved activations are each
-- on the device, in the host's memory or in a file, and come when they are wanted. Which moves when is a policy:
-- offload.superpipeline, and others that are named after the systems that they are.
local Engine = require "tycho.offload.engine"
local hybrimoe = require "tycho.offload.hybrimoe"
local memascend = require "tycho.offload.memascend"
local se_moe = require "tycho.offload.se_moe"
local zero_infinity = require "tycho.offload.zero_infinity"

return require "tycho.lazy" ({
  engine = Engine.new,
  plan = require "tycho.offload.plan",
  bandwidth = require "tycho.offload.bandwidth",
  outside = require "tycho.offload.outside",
  resident = require "tycho.offload.resident",
  trial = require "tycho.offload.trial",
  superpipeline = require "tycho.offload.superpipeline",
  ssdtrain = require "tycho.offload.ssdtrain",
  horizon = require "tycho.offload.horizon",
  zero_offload = require("tycho.offload.zero_offload").new,
  deep_opt_states = require("tycho.offload.deep_opt_states").new,
  interleave = require "tycho.offload.interleave",
  zero_infinity = zero_infinity.policy,
  tile = zero_infinity.tile,
  untile = zero_infinity.untile,
  fuyou = require("tycho.offload.fuyou").policy,
  memascend = memascend.policy,
  wide_states = memascend.wide_states,
  zo2 = require "tycho.offload.zo2",
  record_routing = require "tycho.offload.routing",
  expert_cache = require "tycho.offload.expert_cache",
  schedule_experts = hybrimoe.schedule,
  simulate_experts = hybrimoe.simulate,
  expert_ring = se_moe.ring,
  simulate_ring = se_moe.simulate,
}, {}, "tycho.offload")
