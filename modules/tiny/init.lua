--- Training where memory is short: require "tycho.tiny".
--
--     local tiny = require "tycho.tiny"
--     local pocket = tiny.pocket(model, { scheme = { weights = { "fc" }, biases = { "layer3" } }, ... })
--
--     scheme   which weights, biases and input channels are trained
--     pocket   a training step as a program without what a scheme does not need
--     foresee  what steps by other schemes would take, from one recording
--     fold     batch norms into the convolutions before them
--     int8     a network of bytes: weights and activations of 8 bits, exact sums, its gradients
--     arena    trains such a network inside of so many bytes
--     contributions, search   what layers are worth, and the scheme that is worth most in so many bytes
--     primitives, step        what layers take in half precision, and a training step in it
local half = require "tycho.tiny.half"
local pocket = require "tycho.tiny.pocket"
local search = require "tycho.tiny.search"

return require "tycho.lazy" ({
  scheme = require "tycho.tiny.scheme",
  pocket = pocket.pocket,
  foresee = pocket.foresee,
  fold = require "tycho.tiny.fold",
  int8 = require("tycho.tiny.int8").network,
  int8_weight = require("tycho.tiny.int8").weight,
  arena = require "tycho.tiny.arena",
  primitives = half.primitives,
  step = half.step,
  has_bf16 = half.has_bf16,
  contributions = search.contributions,
  search = search.scheme,
  evolve = search.evolve,
}, {}, "tycho.tiny")
