-- Schedulers as scheduler_config.json describes them, beside where diffusers' own end
-- (tests/fixtures/make_schedulers.py).
local here = (arg and arg[0]:match ".*/" or "tests/modules/diffusion/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local diffusion = require "tycho.diffusion"

local cases = ty.io.load(check.root .. "tests/fixtures/schedulers.json")

-- As wave() and network() in the script.
local function wave(offset, scale)
  return ((ty.arange(8):to "f64" * 0.37 + offset):sin() * scale):reshape(1, 2, 2, 2)
end
local function network(x, t)
  local u = t:to("f64"):item() * 0.001
  return (x * 1.3 + 4 * u):sin() * 0.5 + x * (0.3 * math.cos(2 * u))
end

local function finish(case, steps)
  local process = diffusion.published(case.config, { mu = case.mu })
  return process:sample(network, { 1, 2, 2, 2 }, { noise = wave(3, 1.0), steps = steps,
    fresh = function(draw) return wave(draw, 1.4) end })
end

for _, case in ipairs(cases) do
  local words = {}
  for key, value in pairs(case.config) do
    if key ~= "_class_name" and not key:find "^beta_[se]" then
      words[#words + 1] = ("%s=%s"):format(key, tostring(value))
    end
  end
  table.sort(words)
  local name = ("%s %s"):format(case.config._class_name, table.concat(words, " "))
  check.test(name, function()
    for steps, wanted in pairs(case.ends) do
      local got = finish(case, math.tointeger(tonumber(steps))):flatten():tolist()
      local off, size = 0, 1
      for i, value in ipairs(wanted) do
        off, size = math.max(off, math.abs(value - got[i])), math.max(size, math.abs(value))
      end
      if off ~= off then off = math.huge end
      check.ok(off / size < 1e-5, ("%s in %s steps: off by %.2g of %.3g"):format(name, steps, off / size, size))
    end
  end)
end

check.finish()
