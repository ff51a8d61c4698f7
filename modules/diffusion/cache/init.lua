--- Parts of a sampler that leave out calls of the network, or blocks of it, where what it said before serves: values
-- for the sampler's option `parts`.
--
--     easy        x + (v' - x') while the error that adds up is small
--     delta       ranges of a transformer's blocks stand still, front or rear by the stage of sampling
--     stability   no call where the path bends evenly, few tokens where it does not
return {
  easy = require "tycho.diffusion.cache.easy",
  delta = require "tycho.diffusion.cache.delta",
  stability = require "tycho.diffusion.cache.stability",
}
