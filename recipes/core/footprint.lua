-- The footprint of a run, from the cradle to the grave
-- claim: the report gives the published figures of an A100 from its parts, and any recipe prints its own by --footprint
-- system: life-cycle report: energy of the run, the grid's impacts of a kWh, the share of the device's life
-- paper: Falk et al. 2025, "More than Carbon: Cradle-to-Grave environmental impacts of GenAI training on the Nvidia
--   A100 GPU"
-- time: 5 seconds on a CPU core
--
-- The parts are the paper's supplement: what casing, heatsink, board, dies and the rest cost in each category. The
-- figures that the paper states of them are summed, compared and counted again here. The paper's totals come from
-- figures with more digits than the supplement has.
-- BLOOM's training is told again from what was published of it (Luccioni et al. 2022: GPU hours, energy, France), with
-- the grid's impacts of an open source in place of the paper's own, which are not public: so its shares are said beside
-- the paper's and not judged.
local ty = require "tycho"
local nn, optim = ty.nn, ty.optim
local footprint = ty.footprint

local r = ty.recipe.declare { args = {
  { "steps", 400, "training steps of the run that is measured", quick = 10 },
} }

-- ---- the A100, from its parts ----

local a100 = footprint.device "a100"
local function share(name, key) return 100 * a100.components[name][key] / a100.making[key] end
local leads = {}
r:say("an A100 SXM4 40 GB, from the cradle to the gate")
r:say("%-36s %10s  %-17s %6s %6s %6s %6s %6s %6s", "impact category", "in all", "unit", "dies", "heat", "board", "pop",
  "casing", "way")
for _, category in ipairs(footprint.categories()) do
  local key, best = category.key, nil
  for name in pairs(a100.components) do
    if not best or share(name, key) > share(best, key) then best = name end
  end
  leads[best] = (leads[best] or 0) + 1
  r:say("%-36s %10.3g  %-17s %5.1f%% %5.1f%% %5.1f%% %5.1f%% %5.1f%% %5.1f%%", category.name, a100.making[key],
    category.unit, share("dies", key), share("heatsink", key), share("board", key), share("pop", key),
    share("casing", key), share("transport", key))
end

-- ---- BLOOM ----

-- 1,082,990 hours of A100s at 400 W; the data centre takes a fifth more.
local bloom = footprint.report { joules = 1082990 * 400 * 3600, hours = 1082990, device = "a100", grid = "france",
  pue = 1.2 }
r:say("\nBLOOM's training\n%s", tostring(bloom))
local by_key, dominated = {}, 0
for _, row in ipairs(bloom.rows) do
  by_key[row.key] = row
  if (row.use_share or 0) > 0.5 then dominated = dominated + 1 end
end
local function making_share(key) return 100 * (1 - by_key[key].use_share) end

-- ---- a run of our own ----

ty.manual_seed(r.seed)
local meter = ty.energy.meter { device = r.device }
local model = r:place(function() return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) end)
local opt = optim.AdamW(model:parameters(), { lr = 1e-3 })
local x = ty.randn({ 128, 256 }, { device = r.device })
for _ = 1, r.args.steps do
  ty.scope(function() opt:step((model(x) - x):square():mean()) end)
end
r:wait()
local reading = meter:read()
r:say("\na run of %d steps: %s", r.args.steps, tostring(reading))
local joules_again = 0
for _, part in ipairs(reading.parts) do joules_again = joules_again + part.joules end
local ours = footprint.report { joules = reading.joules, hours = reading.seconds / 3600, grid = r.grid,
  device = r.device == "cpu" and "core" or "a100" }
local apart = 0
for i, row in ipairs(ours.rows) do
  local known = { row.making + row.end_of_life, row.use or 0 }
  apart = math.max(apart, row.total > 0 and math.abs(known[1] + known[2] - row.total) / row.total or 0)
  r.metrics[row.key], r.metrics["bloom_" .. row.key] = row.total, bloom.rows[i].total
end
apart = math.max(apart, math.abs(joules_again / reading.joules - 1))
r:say("%s", tostring(ours))

os.exit(r:finish {
  { claim = "an A100's making, kg CO2 eq: from the published 127.6, %",
    measured = 100 * math.abs(a100.making.gwp / 127.6 - 1), bar = 1, below = true },
  { claim = "share of the dies in climate change: points from the published 81 %",
    measured = math.abs(share("dies", "gwp") - 81), bar = 2, below = true },
  { claim = "share of the dies in fossil resources: points from the published 80 %",
    measured = math.abs(share("dies", "adpf") - 80), bar = 2, below = true },
  { claim = "categories where the dies are the largest part: from the published 10 of 16",
    measured = math.abs((leads.dies or 0) - 10), bar = 0, below = true },
  { claim = "parts of our own report: from what they sum to", measured = apart, bar = 1e-9, below = true },
  { claim = "BLOOM, use in climate change, % (published, by a grid that is not public: 96)",
    measured = 100 * by_key.gwp.use_share, judged = false },
  { claim = "BLOOM, making in minerals and metals, % (likewise: 85)", measured = making_share "adpe", judged = false },
  { claim = "BLOOM, categories where use dominates (likewise: 11 of 16)", measured = dominated, judged = false },
}, true)
