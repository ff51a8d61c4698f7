-- Tycho inside somebody else's Lua program. The program here knows nothing of deep learning: it has readings of a cold
-- store in plain Lua tables and wants to know which of them are not as they should be.
--
--   lua5.4 examples/from_lua.lua       (with Tycho installed, or after `. build/env.sh`)
--
-- Shown on the way: numbers go in and out as Lua tables, memory is given back when the program says so, mistakes are
-- Lua errors that pcall catches, and no global variable is made.

-- ---- the program's own part ----

-- A temperature per hour of four weeks: the day, the doors opened on weekdays, some noise, and three hours of trouble.
local function readings()
  math.randomseed(7)
  local trouble, list = { [200] = 2.5, [401] = -2.0, [555] = 1.8 }, {}
  for hour = 0, 4 * 7 * 24 - 1 do
    local of_day, weekday = hour % 24, hour // 24 % 7 < 5
    local t = -18 + 0.8 * math.sin((of_day - 9) / 12 * math.pi) + (weekday and of_day > 7 and of_day < 18 and 0.7 or 0)
    t = t + 0.15 * (math.random() + math.random() - 1) + (trouble[hour] or 0)
    list[#list + 1] = { hour = hour, temperature = t }
  end
  return list
end

-- ---- the part that uses Tycho ----

-- What the model sees of an hour: the time of day and of the week as waves.
local function features(hour)
  local row = {}
  for _, period in ipairs { 24, 12, 8, 168, 84, 56 } do
    row[#row + 1] = math.sin(2 * math.pi * hour / period)
    row[#row + 1] = math.cos(2 * math.pi * hour / period)
  end
  return row
end

-- Fits a small network and returns, as a Lua table, what it expects for each reading.
local function expectations(list, options)
  local ty = require "tycho"
  ty.manual_seed(options.seed or 1)

  local rows, values = {}, {}
  for i, r in ipairs(list) do rows[i], values[i] = features(r.hour), r.temperature end
  local x, y = ty.tensor(rows, { dtype = "f32" }), ty.tensor(values, { dtype = "f32" })
  local mean = y:mean():item()
  y = y - mean

  local params = {
    (ty.randn(#rows[1], 24) * 0.3):requires_grad_(), ty.zeros(24):requires_grad_(),
    (ty.randn(24) * 0.2):requires_grad_(),
  }
  local function model(inputs) return (inputs:matmul(params[1]) + params[2]):tanh():matmul(params[3]) end

  for step = 1, options.steps or 600 do
    ty.scope(function() -- the tensors of this step are gone at its end
      local loss = ty.huber_loss(model(x), y, 0.3)
      local grads = ty.grad(loss, params)
      local rate = 0.5 * (1 - step / (options.steps or 600))
      ty.no_grad(function()
        for i, p in ipairs(params) do p:sub_(grads[i] * rate) end
      end)
    end)
  end
  local expected = ty.no_grad(function() return (model(x) + mean):tolist() end)
  return expected
end

-- ---- together ----

local globals = {}
for name in pairs(_G) do globals[name] = true end

local list = readings()
local ok, expected = pcall(expectations, list, { steps = 800 })
if not ok then
  io.stderr:write("no check today: ", tostring(expected), "\n")
  os.exit(1)
end

local found = {}
for i, r in ipairs(list) do
  local off = r.temperature - expected[i]
  if math.abs(off) > 1 then
    found[#found + 1] = r.hour
    print(string.format("hour %3d: %.1f degrees, expected %.1f", r.hour, r.temperature, expected[i]))
  end
end
print(#found .. " of " .. #list .. " readings look wrong")

-- A mistake is an error of Lua with a text that says what came and what was wanted.
local ty = require "tycho"
print(select(2, pcall(function() return ty.ones(2, 3):matmul(ty.ones(2, 3)) end)))

for name in pairs(_G) do assert(globals[name], "a new global variable: " .. name) end
os.exit(#found == 3 and found[1] == 200 and found[2] == 401 and found[3] == 555, true)
