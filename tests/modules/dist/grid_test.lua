-- A Llama whose layers ranks share, in stages, on parts of the data: it trains as on one rank.
local here = arg and arg[0]:match ".*/" or "tests/modules/dist/"
local check = dofile(here .. "../../lua/check.lua")
local dist = require "tycho.dist"

local trial = dist.grid_trial
local work = dist.workload.open { length = 8, width = 32, heads = 4, layers = 3, rows = 8, chapters = 12,
  vocabulary = 260 }

check.test("grids train what one rank trains", function()
  local one = trial.run(work, { steps = 4 })
  check.equal(one.losses[4] < one.losses[1] - 0.1, true, "it learns")
  local sent
  for _, o in ipairs { { tensor = 2 }, { tensor = 4, data = 2 }, { tensor = 2, pipeline = 2, data = 2 },
    { tensor = 2, pipeline = 2, data = 2, share = true },
    { tensor = 2, pipeline = 2, schedule = "interleaved", chunks = 2, recompute = true },
    { pipeline = 4, schedule = "gpipe" } } do
    o.steps = 4
    local got = trial.run(work, o)
    check.close(got.losses, one.losses, 1e-5)
    check.close(got.held_out, one.held_out, 1e-5)
    check.equal(got.parameters < one.parameters, true)
    if o.data and o.pipeline then
      if o.share then check.close(got.sent.pipeline / sent, 0.5, 0.01) end
      sent = got.sent.pipeline
    end
    for kind, n in pairs(got.sent) do check.equal(n > 0, (o[kind] or 1) > 1, kind) end
  end
end)

check.test("arguments", function()
  check.fails(function() trial.run(3) end, "work: expected a table, got 3")
  check.fails(function() trial.run(work, { rows = 6 }) end, "rows: expected a multiple of 4, a row for each")
  check.fails(function() trial.run(work, { tensor = 3, steps = 1 }) end, "expected a multiple of 3 heads, got 4")
  check.fails(function() trial.divide(3) end, "model: expected a module")
end)

check.finish()
