--- Tensors whose memory is away: an op that meets one asks its owner to bring it back.
--
-- Such a tensor stands on memory of the meta device (tier_core.exchange), by which it is known.
local tier = require("tycho").core.tier_core

local M = {}

-- By the number of the memory that a tensor stands on while its own is away: its owner.
local owners = setmetatable({}, { __mode = "v" })
local watching = false

local function bring_back(memory)
  local owner = owners[memory]
  if owner then owner:bring_back() end
end

--- A tensor stands on this memory from now on; owner:bring_back() is called when an op meets it.
---@param memory integer  of tier_core.memory_of
---@param owner table
function M.left(memory, owner)
  if not watching then
    tier.on_absent(bring_back)
    watching = true
  end
  owners[memory] = owner
end

--- The tensor has its own memory again, or nobody brings it back any more.
---@param memory integer
function M.returned(memory) owners[memory] = nil end

return M
