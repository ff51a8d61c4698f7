--- Where networks make a vector of their time: the module to whose output techniques add what a network is to be told
-- besides, a second time say.
local arguments = require "tycho.arguments"
local nn = require("tycho").nn

local fail = arguments.fail
local KNOWN = { "t_embedder", "time_embedding", "time_text_embed", "time_embedder" }

--- The module of a network that embeds its time, and the width of its output: the one of that name, or the one that
-- networks of tycho.models have. who: the function that asks, for errors.
---@param who string
---@param network Module
---@param name? string
---@return Module embedder
---@return integer width
return function(who, network, name)
  local _, modules = nn.surgery.modules(network)
  local found
  if name then
    found = modules[name] or fail("%s: embedder: expected the name of a module of the network, got %s", who,
      arguments.describe(name))
  else
    for _, known in ipairs(KNOWN) do found = found or modules[known] end
    if not found then
      fail("%s: network: expected one with a module %s, or the option embedder, got neither", who,
        table.concat(KNOWN, ", "))
    end
  end
  local linear = nn.surgery.find(who, found)
  if #linear == 0 then fail("%s: embedder: expected a module with linear layers, got none in it", who) end
  return found, linear[#linear].module.weight.shape[1]
end
