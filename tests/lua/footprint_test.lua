-- Energy and what it costs: counters that run over, models that say so, life-cycle reports that add up.
local here = arg and arg[0]:match ".*/" or "tests/lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local energy, footprint = ty.energy, ty.footprint

local root = os.tmpname()
os.remove(root)

local function write(path, text)
  ty.io.mkdir(path:match "^(.*)/")
  ty.io.write_atomic(path, text)
end
local function domain(entry, name, microjoules)
  write(root .. "/" .. entry .. "/name", name .. "\n")
  write(root .. "/" .. entry .. "/max_energy_range_uj", "1000000000\n")
  write(root .. "/" .. entry .. "/energy_uj", ("%d\n"):format(microjoules))
end

check.test("counters of processors are summed, and run over", function()
  domain("intel-rapl:0", "package-0", 900000000)
  domain("intel-rapl:0:0", "core", 5)
  domain("intel-rapl:0:1", "dram", 1000000)
  domain("intel-rapl:1", "psys", 5)
  local meter = energy.meter { root = root }
  domain("intel-rapl:0", "package-0", 950000000)
  domain("intel-rapl:0:0", "core", 777)
  domain("intel-rapl:1", "psys", 777777777)
  domain("intel-rapl:0:1", "dram", 3000000)
  check.close(meter:read().joules, 52, 1e-9)
  domain("intel-rapl:0", "package-0", 10000000) -- past its range
  local reading = meter:read()
  check.close(reading.joules, 112, 1e-9)
  check.equal({ reading.measured, #reading.parts, reading.parts[1].source }, { true, 1, "rapl" })
  check.ok(tostring(reading):find("measured, RAPL", 1, true))
end)

check.test("without counters it is a model, which says so", function()
  local meter = energy.meter { root = root .. "/none", core_watts = 10, memory_watts = 0 }
  local x = ty.randn(128, 128)
  local began = os.clock()
  while os.clock() - began < 0.05 do ty.scope(function() return x:matmul(x) end) end
  local reading = meter:read()
  check.ok(not reading.measured and reading.processor_seconds >= 0.05)
  check.close(reading.joules, 10 * reading.processor_seconds, 1e-9)
  check.ok(tostring(reading):find("not measured", 1, true))
  local memory = energy.meter { root = root .. "/none", core_watts = 0, memory_watts = 1 }
  ty.system.sleep(0.02)
  check.ok(memory:read().joules > 0)
end)

check.test("a GPU without a counter", function()
  if ty.cuda.energy() then return end
  local joules, why = ty.cuda.energy(0)
  check.ok(joules == nil and #why > 0)
  check.fails(function() energy.meter { device = "cuda", root = root .. "/none" } end, "energy.meter: device")
  local meter = energy.meter { device = "cuda:1", gpu_watts = 100, core_watts = 0, memory_watts = 0,
    root = root .. "/none" }
  ty.system.sleep(0.01)
  local reading = meter:read()
  check.close(reading.joules, 100 * reading.seconds, 1e-9)
end)

check.test("the A100 adds up to what was published", function()
  local device = footprint.device "a100"
  check.close(device.making.gwp / 127.6, 1, 0.01) -- kg CO2 eq, in the paper's text
  local largest = 0
  for _, category in ipairs(footprint.categories()) do
    local sum, best = 0, nil
    for name, of in pairs(device.components) do
      sum = sum + of[category.key]
      if not best or of[category.key] > device.components[best][category.key] then best = name end
    end
    check.close(sum / device.making[category.key], 1, 1e-12)
    if best == "dies" then largest = largest + 1 end
  end
  check.equal(largest, 10) -- of 16, in the abstract
  check.equal(#footprint.categories(), 16)
end)

check.test("a report, by hand", function()
  local report = footprint.report { joules = 7.2e6, hours = 10, devices = 4, device = "a100", lifetime = 1000,
    pue = 1.5, grid = { gwp = 0.5, adpe = 1e-7 } }
  check.close(report.kwh, 3, 1e-12)
  check.close(report.lives, 0.04, 1e-12)
  local rows = {}
  for _, row in ipairs(report.rows) do rows[row.key] = row end
  check.close(rows.gwp.use, 1.5, 1e-12)
  check.close(rows.gwp.making, 0.04 * 126.775, 1e-9)
  check.close(rows.gwp.end_of_life, 0.04 * 1.56 * 1.51, 1e-9)
  check.close(rows.gwp.total, rows.gwp.use + rows.gwp.making + rows.gwp.end_of_life, 1e-12)
  check.close(rows.gwp.use_share, rows.gwp.use / rows.gwp.total, 1e-12)
  check.equal({ rows.lu.use, rows.lu.use_share }, {})
  check.ok(tostring(report):find("not known", 1, true))
  local part = footprint.device { chip = 100, board = 10, mass = 2, plane = 1000 }
  check.close(part.making.gwp, 4.26 + 0.325 + 2 * 2.11, 1e-9)
  check.close(part.end_of_life.gwp, 3.02, 1e-9)
end)

check.test("mistakes", function()
  check.fails(function() footprint.report { joules = 1 } end, "footprint.report: hours")
  check.fails(function() footprint.report { joules = -1, hours = 1 } end, "footprint.report: joules")
  check.fails(function() footprint.report { joules = 1, hours = 1, grid = "moon" } end, "france, germany, usa")
  check.fails(function() footprint.report { joules = 1, hours = 1, grid = { co2 = 1 } } end, "footprint.report: grid")
  check.fails(function() footprint.report { joules = 1, hours = 1, device = "b200" } end, "footprint.device: device")
  check.fails(function() footprint.device { chips = 1 } end, "footprint.device")
  check.fails(function() energy.meter { device = "tpu" } end, "energy.meter: device")
end)

check.finish()
