--- A U-Net with the networks that control it (models.ControlNetModel), as one network: each sees a picture of its own
-- in condition.controls, and what they say is added up. Zhang et al. 2023, "Adding Conditional Control to Text-to-Image
-- Diffusion Models".
--
--     local network = diffusion.controlled(unet, { { net = edges, strength = 0.8 }, { net = depth } })
--     local y = network(x, t, { text = text, controls = { edge_pictures, depth_pictures } })
local arguments = require "tycho.arguments"

local WHO = "diffusion.controlled"

--- A network of diffusion with ControlNets beside it.
---@class Controlled
---@field network Module
---@field controls { net: Module, strength: number }[]
local Controlled = {}
Controlled.__name = "Controlled"
Controlled.__index = function(self, key)
  local own = Controlled[key]
  if own ~= nil then return own end
  return rawget(self, "network")[key] -- config, null_label ... are those of the U-Net
end

--- The device of the U-Net.
function Controlled:device() return self.network:device() end

-- The sum of what two networks say.
local function add(one, other)
  if not one then return other end
  local sum = { down = {}, middle = one.middle + other.middle }
  for i, map in ipairs(one.down) do sum.down[i] = map + other.down[i] end
  return sum
end

Controlled.__call = function(self, x, t, condition)
  local pictures = condition and condition.controls
  if type(pictures) ~= "table" or #pictures ~= #self.controls then
    arguments.fail("%s: condition.controls: expected a list of %d pictures, got %s", WHO, #self.controls,
      type(pictures) == "table" and #pictures or arguments.describe(pictures))
  end
  local rest, residuals = {}, nil
  for key, value in pairs(condition) do rest[key] = value end
  rest.controls = nil
  for i, control in ipairs(self.controls) do
    rest.control = pictures[i]
    if control.strength ~= 0 then residuals = add(residuals, control.net(x, t, rest, control.strength)) end
  end
  rest.control, rest.residuals = nil, residuals
  return self.network(x, t, rest)
end

--- controls: a list of { net = ..., strength = 1 }.
---@param network Module  a U-Net
---@param controls { net: Module, strength?: number }[]
---@return Controlled
return function(network, controls)
  arguments.expect(WHO, "network", network, "a module")
  arguments.expect(WHO, "controls", controls, "a list of tables")
  local list = {}
  for i, control in ipairs(controls) do
    local o = arguments.read(("%s: controls[%d]"):format(WHO, i), control, { net = arguments.none, strength = 1 },
      { net = "a module", strength = "a finite number" })
    if not o.net then arguments.fail("%s: controls[%d].net: expected a ControlNetModel, got nil", WHO, i) end
    list[i] = o
  end
  if #list == 0 then arguments.fail("%s: controls: expected at least one, got none", WHO) end
  return setmetatable({ network = network, controls = list }, Controlled)
end
