--- Training where memory is short: require "tycho.tiny".
--
--     local tiny = require "tycho.tiny"
--     local pocket = tiny.pocket(model, { scheme = { weights = { "fc" }, biases = { "layer3" } }, ... })
--
--     scheme   which weights, biases and input channels are trained
--     pocket   a training step as a program without what a scheme does not need
--     foresee  what steps by other schemes would take, from one recording
--     fold     batch norms into the convolutions before them
local pocket = require "tycho.tiny.pocket"

return {
  scheme = require "tycho.tiny.scheme",
  pocket = pocket.pocket,
  foresee = pocket.foresee,
  fold = require "tycho.tiny.fold",
}
