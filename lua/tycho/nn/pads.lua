--- Modules that pad; the function itself is ty.pad.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local base = require "tycho.nn.module"
local options = require "tycho.nn.options"

local M = {}

-- A number for every side, or before and after of the last dimension, then of the one before it ..., as ty.pad takes
-- it.
local function sides(who, value, n)
  options.expect(who, "pads", value, "an integer or a list of integers")
  if type(value) ~= "table" then value = { value } end
  if #value ~= 1 and #value ~= 2 * n then
    arguments.fail("%s: pads: expected one or %d integers, got %d", who, 2 * n, #value)
  end
  local list = {}
  for i = 1, 2 * n do list[i] = value[i] or value[1] end
  return list
end

local function pad(name, n, mode, takes_value)
  local class = base.define(name)
  function class:init(pads, value)
    self.padding = sides(name, pads, n)
    self.value = takes_value and options.expect(name, "value", value, "a number or nil") or 0
  end
  function class:forward(x) return ty.pad(x, self.padding, mode, self.value) end
  function class:describe()
    local text = "{" .. table.concat(self.padding, ", ") .. "}"
    return takes_value and ("%s, %g"):format(text, self.value) or text
  end
  M[name] = class
end

--- Zeros around x [n, c, w]: pads, a number or {before, after}; negative ones cut.
pad("ZeroPad1d", 1, "constant")
--- Zeros around x [n, c, h, w]: pads, a number or {left, right, top, bottom}; negative ones cut.
pad("ZeroPad2d", 2, "constant")
--- Zeros around x [n, c, d, h, w]: pads, a number or {left, right, top, bottom, front, back}; negative ones cut.
pad("ZeroPad3d", 3, "constant")
--- The inside mirrored, without the edge, around x [n, c, w]: pads, a number or {before, after}; negative ones cut.
pad("ReflectionPad1d", 1, "reflect")
--- The inside mirrored, without the edge, around x [n, c, h, w]: pads, a number or {left, right, top, bottom};
-- negative ones cut.
pad("ReflectionPad2d", 2, "reflect")
--- The inside mirrored, without the edge, around x [n, c, d, h, w]: pads, a number or {left, right, top, bottom,
-- front, back}; negative ones cut.
pad("ReflectionPad3d", 3, "reflect")
--- The edge repeated around x [n, c, w]: pads, a number or {before, after}; negative ones cut.
pad("ReplicationPad1d", 1, "replicate")
--- The edge repeated around x [n, c, h, w]: pads, a number or {left, right, top, bottom}; negative ones cut.
pad("ReplicationPad2d", 2, "replicate")
--- The edge repeated around x [n, c, d, h, w]: pads, a number or {left, right, top, bottom, front, back}; negative
-- ones cut.
pad("ReplicationPad3d", 3, "replicate")
--- The other end around x [n, c, w]: pads, a number or {before, after}; negative ones cut.
pad("CircularPad1d", 1, "circular")
--- The other end around x [n, c, h, w]: pads, a number or {left, right, top, bottom}; negative ones cut.
pad("CircularPad2d", 2, "circular")
--- The other end around x [n, c, d, h, w]: pads, a number or {left, right, top, bottom, front, back}; negative ones
-- cut.
pad("CircularPad3d", 3, "circular")
--- `value` around x [n, c, w]: (pads, value), pads a number or {before, after}; negative ones cut.
pad("ConstantPad1d", 1, "constant", true)
--- `value` around x [n, c, h, w]: (pads, value), pads a number or {left, right, top, bottom}; negative ones cut.
pad("ConstantPad2d", 2, "constant", true)
--- `value` around x [n, c, d, h, w]: (pads, value), pads a number or {left, right, top, bottom, front, back};
-- negative ones cut.
pad("ConstantPad3d", 3, "constant", true)

return M
