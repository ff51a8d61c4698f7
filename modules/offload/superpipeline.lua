-- Superpipeline: a window of units is on the device, some of them loaded ahead, for inference and for training. Abbasi
-- and Lim 2024, "Superpipeline: A Universal Approach for Reducing GPU Memory Usage in Large Models". The policy that
-- the others vary. The optimizer, of which the paper says nothing, steps after the backward pass, unit by unit, while
-- the next unit's moments are read.
local arguments = require "tycho.arguments"

-- The units around number `at` that stay, and those that are to come: `window` in all, `ahead` of them in the direction
-- of the pass.
local function around(engine, o, at, direction)
  local stay, coming = {}, {}
  for distance = -(o.window - 1 - o.ahead), o.ahead do
    local unit = engine:neighbour(at, distance * direction)
    if unit then
      stay[#stay + 1] = unit
      if distance > 0 then coming[#coming + 1] = unit end
    end
  end
  return stay, coming
end

local function move(engine, o, unit, at, direction)
  local stay, coming = around(engine, o, at, direction)
  stay[#stay + 1] = unit
  engine:keep(stay, at)
  engine:need(unit)
  if direction > 0 then engine:fetch_asked(at) end
  for _, other in ipairs(coming) do engine:fetch(other) end
end

--- A policy for offload.engine. options: window (2: units on the device at a time), ahead (1: of these, how many are
-- loaded before they are wanted).
---@param options? {window?: integer, ahead?: integer}
---@return table policy
return function(options)
  local o = arguments.read("offload.superpipeline", options, { window = 2, ahead = 1 },
    { window = "an integer >= 1", ahead = "an integer >= 0" })
  if o.ahead >= o.window then
    arguments.fail("offload.superpipeline: ahead: expected less than window (%d), got %d", o.window, o.ahead)
  end
  local policy = { window = o.window, ahead = o.ahead }

  --- Before a unit's forward pass, which is number `at` of the pass.
  function policy.before_forward(engine, unit, at) move(engine, o, unit, at, 1) end

  --- After it.
  function policy.after_forward() end

  --- Before its backward pass.
  function policy.before_backward(engine, unit, at)
    move(engine, o, unit, at, -1)
    for distance = 0, o.ahead do engine.saved:fetch(at - distance) end
  end

  --- When the gradients of a unit are whole.
  function policy.gradients(engine, unit) engine:drop_gradients(unit) end

  --- When the backward pass is over and no unit has stepped yet.
  function policy.after_backward(engine)
    local units = engine.units
    for i, unit in ipairs(units) do
      engine:keep { table.unpack(units, i, i + o.ahead) }
      for k = i, math.min(i + o.ahead, #units) do engine:fetch_update(units[k]) end
      engine:update(unit)
    end
    engine:keep {}
  end

  return policy
end
