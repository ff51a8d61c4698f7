--- What a computation will cost, learnt from what was timed or derived from what the machine can do: require
-- "tycho.estimate".
local forest = require "tycho.estimate.forest"

return require "tycho.lazy" ({
  forest = forest.fit,
  forest_from = forest.from_state,
  instructions = require "tycho.estimate.instructions",
  trace = require("tycho.estimate.trace").trace,
  pipeline = require "tycho.estimate.pipeline",
  products = require "tycho.estimate.products",
  r2 = require "tycho.estimate.r2",
}, {}, "tycho.estimate")
