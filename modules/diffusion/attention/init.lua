--- Other ways to compute a network's self-attention, put in from outside and taken out again.
--
--     replace      any function of q, k and v in the place of attention
--     cells        tokens of maps by cells, so that blocks of tokens are places
--     rettention   a few percent of the keys, with what dense steps say of the softmax
--     draft        blocks that a map of low resolution chooses
--     llsa         hierarchical choice and means of what was not chosen: trains, in log-linear time
local cells = require "tycho.diffusion.attention.cells"
local draft = require "tycho.diffusion.attention.draft"
local layers = require "tycho.diffusion.attention.layers"
local loglinear = require "tycho.diffusion.attention.loglinear"
local rettention = require "tycho.diffusion.attention.rettention"

return {
  replace = layers.replace,
  layers = layers,
  cells = cells.cells,
  rettention = rettention.new,
  statistics = rettention.statistics,
  draft = draft.new,
  draft_map = draft.map,
  draft_blocks = draft.blocks,
  draft_attention = draft.attend,
  llsa = loglinear.replace,
  loglinear = loglinear.attention,
  z_order = loglinear.z_order,
  levels = loglinear.levels,
  choose = loglinear.choose,
}
