--- Training without a gradient from end to end: require "tycho.local". A network is cut into blocks; each has a loss of
-- its own, and what it hands on has no history.
--
--     local learning = require "tycho.local"
--     local learner = learning.mono_forward(layers, { classes = 10, example = images })
--     local found = learning.fit(learner, training, validation, { epochs = 50 })
--
-- Ways: forward_forward, cascaded, mono_forward, momentum_auxiliary, physical (layers that are black boxes, two of them
-- in waves); blocks is what they share, and blocks.end_to_end the usual training in the same form.
return require "tycho.lazy" ({}, { blocks = "tycho.local.blocks", fit = "tycho.local.fit",
  forward_forward = "tycho.local.forward_forward", cascaded = "tycho.local.cascaded",
  mono_forward = "tycho.local.mono_forward", momentum_auxiliary = "tycho.local.momentum_auxiliary",
  physical = "tycho.local.physical", tasks = "tycho.local.tasks", waves = "tycho.local.waves" }, "tycho.local")
