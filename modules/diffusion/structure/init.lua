--- Pictures larger than a network was made for, led by their structure: diffusion.structure. After Li et al. 2024,
-- "ASGDiffusion: Parallel High-Resolution Generation with Asynchronous Structure Guidance".
--
--     sample     large samples in two stages, pieces and tiles, on one device or several
--     part       structure guidance, as a part of a sampler over pieces
--     pieces, whole   a sample as pieces that each show all of it, and back
--     foretell   seconds on several devices
--     measure    seconds of ranks as on devices of their own, for foretell
local part = require "tycho.diffusion.structure.part"

return require "tycho.lazy" ({
  part = part.part,
  pieces = part.pieces,
  whole = part.whole,
  fresh = part.fresh,
  sample = require "tycho.diffusion.structure.sample",
  foretell = require("tycho.diffusion.structure.timing").foretell,
  measure = require("tycho.diffusion.structure.timing").measure,
}, {}, "tycho.diffusion.structure")
