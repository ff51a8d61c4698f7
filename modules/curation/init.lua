--- Which data a model should learn from: require "tycho.curation".
--
--     local chosen = require("tycho.curation").leverage.select(features, 0.16)
--
-- Methods: leverage (the samples that span what all of them span), coverage (those next to the centres of k-means),
-- pairs (pictures whose texts are theirs, by several judges). And what a model should no longer know: fisher (how much
-- its weights matter to samples), dampening (forgetting without training), unlearning (ways that train, and measures),
-- forgetting (trials that compare them). And scaling: what more data is worth. And small sets that stand for large
-- ones: condensed (how good one is), trajectory (by matching how networks train), matching (by what networks see of
-- them), characteristic (how far that is apart), condensing (trials).
return require "tycho.lazy" ({}, {
  leverage = "tycho.curation.leverage",
  coverage = "tycho.curation.coverage",
  pairs = "tycho.curation.pairs",
  fisher = "tycho.curation.fisher",
  dampening = "tycho.curation.dampening",
  unlearning = "tycho.curation.unlearning",
  forgetting = "tycho.curation.forgetting",
  scaling = "tycho.curation.scaling",
  condensed = "tycho.curation.condensed",
  trajectory = "tycho.curation.trajectory",
  matching = "tycho.curation.matching",
  characteristic = "tycho.curation.characteristic",
  condensing = "tycho.curation.condensing",
}, "tycho.curation")
