--- Serving models to many: require "tycho.serve".
--
--     local serve = require "tycho.serve"
--     local rates = serve.melange.rates(serve.melange.requests("chat", 4000, 1), 8) -- eight requests a second
--     local best = serve.melange.allocate(rates, { within = 0.12 })                 -- GPUs of several kinds
--
--     packing    pieces into machines of several kinds, as cheaply as can be
--     melange    which GPUs serve requests of many sizes as cheaply as can be
return require "tycho.lazy" ({}, {
  melange = "tycho.serve.melange", packing = "tycho.serve.packing",
}, "tycho.serve")
