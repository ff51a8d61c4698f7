--- What a run costs from the cradle to the grave: ty.footprint.
--
--     local joules = meter:read().joules
--     local report = ty.footprint.report { joules = joules, hours = 0.5, device = "a100", grid = "france" }
--     print(report)                        -- 16 impact categories: use, making, end of life
--
-- Use is energy times what a kWh of the grid costs. Making is the share of the device's life that the run took, of what
-- the device cost to make; its end of life likewise. Falk et al. 2025, "More than Carbon: Cradle-to-Grave environmental
-- impacts of GenAI training on the Nvidia A100 GPU".
local arguments = require "tycho.arguments"
local impacts = require "tycho.footprint.impacts"

local M = {}

-- Years of service at full time: between what the paper says of data centres (1 to 3) and what owners write off (4, 5).
local lifetime = 3 * 365 * 24

-- A server processor's core: of AMD's EPYC 9004 series, whose 96 cores are 12 chips of 66 mm2 and one of 397, with what
-- the wafer loses, its part of a board, and 4 GB of memory at 1.39 kg CO2 eq each (Dell 2019, LCA of the PowerEdge
-- R740), as the area of memory that costs as much.
local core = { chip = 15.0, memory = 30.0, board = 10.0 }

local function add(into, factors, amount)
  for _, category in ipairs(impacts.categories) do
    local key = category[1]
    if factors[key] and into[key] then into[key] = into[key] + amount * factors[key] end
  end
end

local function zeros()
  local t = {}
  for _, category in ipairs(impacts.categories) do t[category[1]] = 0.0 end
  return t
end

--- The 16 categories, in the order of the reports: { key, name, unit } each.
---@return table[]
function M.categories()
  local list = {}
  for i, category in ipairs(impacts.categories) do
    list[i] = { key = category[1], name = category[2], unit = category[3] }
  end
  return list
end

--- The names of the grids whose kWh are known.
---@return string[]
function M.grids()
  local list = {}
  for name in pairs(impacts.grids) do list[#list + 1] = name end
  table.sort(list)
  return list
end

local kinds = { casing = "a finite number >= 0", heatsink = "a finite number >= 0", board = "a finite number >= 0",
  chip = "a finite number >= 0", memory = "a finite number >= 0", mass = "a finite number >= 0",
  plane = "a finite number >= 0", truck = "a finite number >= 0" }

--- What a device costs to make and at the end of its life, by category; also, of the A100, by component. device:
--   "a100"   an A100 SXM4 of 40 GB, as measured by the paper
--   "core"   a core of a server's processor with 4 GB, estimated from its areas of silicon by the parts below
--   a table  amounts of parts: casing and heatsink (kg), board (cm2), chip and memory (mm2, with what the wafer loses),
--            mass (kg, for the way and the end of life), plane and truck (km; 0 each)
---@param device string|table
---@return { making: table<string, number>, end_of_life: table<string, number>, components?: table }
function M.device(device)
  local who = "footprint.device"
  if device == "a100" then
    local made, gone, components = zeros(), zeros(), {}
    for name, factors in pairs(impacts.a100) do
      components[name] = {}
      for key, value in pairs(factors) do components[name][key] = value end
      add(made, factors, 1)
    end
    add(gone, impacts.parts.end_of_life, 1.56) -- kg
    return { making = made, end_of_life = gone, components = components }
  end
  if device == "core" then device = core end
  if type(device) ~= "table" then
    arguments.fail('%s: device: expected "a100", "core" or a table of amounts, got %s', who, arguments.describe(device))
  end
  local o = arguments.read(who, device, { casing = 0, heatsink = 0, board = 0, chip = 0, memory = 0, mass = 0,
    plane = 0, truck = 0 }, kinds)
  local made, gone = zeros(), zeros()
  for _, name in ipairs { "casing", "heatsink", "board", "chip", "memory" } do
    add(made, impacts.parts[name], o[name])
  end
  for _, way in ipairs { "plane", "truck" } do add(made, impacts.parts[way], o[way] * o.mass) end
  add(gone, impacts.parts.end_of_life, o.mass)
  return { making = made, end_of_life = gone }
end

--- A life-cycle report: rows by category. tostring() is the table.
---@class Footprint
---@field rows table[]   { key, name, unit, use, making, end_of_life, total, use_share } each; use is nil where the
-- grid's source does not say it
---@field kwh number     at the socket, with the data centre's part
---@field lives number   devices' lives that the run took
local Footprint = {}
Footprint.__index = Footprint
Footprint.__name = "Footprint"

--- The life-cycle report of a run. options:
--   joules     energy that the run took
--   hours      by the clock
--   device     "a100", "core" or a table: as footprint.device takes it ("core")
--   devices    how many were taken (1)
--   grid       "france", "germany", "usa", or a table of impacts of a kWh by category ("usa")
--   pue        what the data centre takes for a joule of the machine's (1)
--   lifetime   hours that a device serves (26280: three years)
---@param options table
---@return Footprint
function M.report(options)
  local who = "footprint.report"
  arguments.expect(who, "options", options, "a table")
  local o = arguments.read(who, options, { joules = arguments.none, hours = arguments.none, device = "core",
    devices = 1, grid = "usa", pue = 1, lifetime = lifetime },
    { joules = "a finite number >= 0", hours = "a finite number >= 0", device = "a string or a table",
      devices = "a finite number >= 0", grid = "a string or a table", pue = "a finite number >= 1",
      lifetime = "a finite number > 0" })
  arguments.expect(who, "joules", o.joules, "a finite number >= 0")
  arguments.expect(who, "hours", o.hours, "a finite number >= 0")
  local grid = o.grid
  if type(grid) == "string" then
    grid = impacts.grids[grid]
    if not grid then
      arguments.fail("%s: grid: expected one of %s, or a table, got %s", who, table.concat(M.grids(), ", "),
        arguments.describe(o.grid))
    end
  else
    local known = zeros()
    for key, value in pairs(grid) do
      if not known[key] then
        arguments.fail("%s: grid: expected short names of categories such as gwp, got %s", who, arguments.describe(key))
      end
      arguments.expect(who, "grid." .. key, value, "a finite number")
    end
  end
  local device = M.device(o.device)
  local report = { rows = {}, kwh = o.joules * o.pue / 3.6e6, lives = o.devices * o.hours / o.lifetime,
    device = type(o.device) == "string" and o.device or "device", grid = type(o.grid) == "string" and o.grid or "grid" }
  for i, category in ipairs(impacts.categories) do
    local key = category[1]
    local row = { key = key, name = category[2], unit = category[3], use = grid[key] and report.kwh * grid[key],
      making = report.lives * device.making[key], end_of_life = report.lives * device.end_of_life[key] }
    row.total = (row.use or 0) + row.making + row.end_of_life
    row.use_share = row.use and row.total > 0 and row.use / row.total or nil
    report.rows[i] = row
  end
  return setmetatable(report, Footprint)
end

function Footprint:__tostring()
  local lines = { ("%-36s %10s %10s %10s %10s  %-17s %s"):format("impact category", "use", "making", "end", "in all",
    "unit", "use") }
  lines[2] = ("-"):rep(#lines[1] + 2)
  for _, row in ipairs(self.rows) do
    lines[#lines + 1] = ("%-36s %10s %10.3g %10.3g %10.3g  %-17s %s"):format(row.name,
      row.use and ("%.3g"):format(row.use) or "not known", row.making, row.end_of_life, row.total, row.unit,
      row.use_share and ("%.0f %%"):format(100 * row.use_share) or "")
  end
  lines[#lines + 1] = ("%.4g kWh from the grid (%s), %.3g of the life of a device (%s)"):format(self.kwh, self.grid,
    self.lives, self.device)
  return table.concat(lines, "\n")
end

return M
