--- Texts that ranks tell each other.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local Group = require "tycho.dist.group"

local M = {}

local function bytes_of(text) return ty.io.from_bytes(text, "u8") end

local function check(who, group, text)
  Group.expect(who, group)
  arguments.expect(who, "text", text, "a string")
end

--- The texts of all ranks, by rank from 1 on. All ranks call it.
---@param group RankGroup
---@param text string
---@return string[]
function M.gather(group, text)
  check("dist.texts.gather", group, text)
  local lengths = group:all_gather(ty.tensor({ #text }, { dtype = "i64" })):tolist()
  local most = math.max(table.unpack(lengths))
  local all = group:all_gather(bytes_of(text .. ("\0"):rep(most - #text)))
  local list = {}
  for i, n in ipairs(lengths) do list[i] = ty.io.to_bytes(all:narrow(0, (i - 1) * most, n)) end
  return list
end

--- The text of rank 0, for all. All ranks call it; those of others do not matter.
---@param group RankGroup
---@param text string
---@return string
function M.broadcast(group, text)
  check("dist.texts.broadcast", group, text)
  local length = group:broadcast(ty.tensor({ #text }, { dtype = "i64" })):item()
  return ty.io.to_bytes(group:broadcast(group.rank == 0 and bytes_of(text) or ty.zeros({ length }, { dtype = "u8" })))
end

return M
