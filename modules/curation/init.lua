--- Which data a model should learn from: require "tycho.curation".
--
--     local chosen = require("tycho.curation").leverage.select(features, 0.16)
--
-- Methods: leverage (the samples that span what all of them span), coverage (those next to the centres of k-means),
-- pairs (pictures whose texts are theirs, by several judges).
return require "tycho.lazy" ({}, { leverage = "tycho.curation.leverage", coverage = "tycho.curation.coverage",
  pairs = "tycho.curation.pairs" }, "tycho.curation")
