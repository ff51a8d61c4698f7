-- Stages of different sizes: the plain sampler where nothing changes, the noise after a change, sizes, points, shifts.
local here = arg and arg[0]:match ".*/" or "tests/modules/diffusion/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local diffusion = require "tycho.diffusion"
local closed_form = dofile(here .. "closed_form.lua")

local stages, solver = diffusion.stages, diffusion.solver
local flow = diffusion.schedule.flow()

local function sampler(parts, method, schedule)
  return diffusion.Sampler { schedule = schedule or flow, predict = "flow", solver = method, steps = 8, parts = parts }
end

-- Any network of pictures: it mixes neighbours, so that sizes matter, and looks at its time.
local function network(x, t)
  return x * 0.3 - x:roll({ 1 }, { 3 }) * 0.2 + (t / 1000):reshape(-1, 1, 1, 1) * 0.5
end

check.test("shift and its inverse", function()
  for _, s in ipairs { 0.3, 1, 2.5 } do
    for _, u in ipairs { 0, 0.1, 0.5, 0.93, 1 } do
      check.close(stages.shift(stages.shift(u, s), 1 / s), u, 1e-14)
    end
  end
  check.close(stages.shift(0.5, 3), 0.75, 1e-15)
  check.equal({ stages.shift(0, 5), stages.shift(1, 5) }, { 0.0, 1.0 })
end)

check.test("one size and no fresh noise is the plain sampler, bit for bit", function()
  for name, method in pairs { euler = solver.euler(), dpm = solver.dpmpp_2m(), unipc = solver.unipc(),
    ddpm = solver.ddim { eta = 1 } } do
    local part = stages.part { stages = { { steps = 4, to = 0.625 },
      { steps = 2, from = 0.5, to = 0.375, fresh = false }, { steps = 2, from = 0.25, fresh = false } } }
    local a, run = sampler({ part }, method):sample(network, { 2, 1, 4, 6 }, { seeds = { 1, 2 } })
    local b, plain = sampler({}, method):sample(network, { 2, 1, 4, 6 }, { seeds = { 1, 2 } })
    check.equal(run.calls, 8)
    for i, point in ipairs(plain.points) do check.equal(run.points[i].t, point.t) end
    check.equal(a:flatten():tolist(), b:flatten():tolist(), name)
  end
  local alone = stages.part { stages = { { steps = 8 } } }
  check.equal(sampler({ alone }, solver.euler()):sample(network, { 1, 1, 4, 4 }, { seeds = { 3 } }):flatten():tolist(),
    sampler({}, solver.euler()):sample(network, { 1, 1, 4, 4 }, { seeds = { 3 } }):flatten():tolist())
end)

check.test("sizes, points and calls of three stages", function()
  local sizes, times = {}, {}
  local part = stages.part { keep = true, stages = { { steps = 2, to = 0.8 },
    { steps = 3, from = 0.9, to = 0.5, scale = 0.5 }, { steps = 2, from = 0.6, shift = 2 } } }
  local x, run = sampler({ part }, solver.euler()):sample(function(x, t)
    sizes[#sizes + 1] = { x.shape[3], x.shape[4] }
    times[#times + 1] = t:narrow(0, 0, 1):item() / 1000
    return network(x, t)
  end, { 2, 1, 8, 4 }, { seeds = { 1, 2 } })
  check.equal(sizes, { { 8, 4 }, { 8, 4 }, { 4, 2 }, { 4, 2 }, { 4, 2 }, { 8, 4 }, { 8, 4 } })
  check.close(times, { 1, 0.8, 0.9, 0.7, 0.5, 0.75, 0.6 / 1.3 }, 1e-6)
  check.equal(x.shape, { 2, 1, 8, 4 })
  check.equal(run.points[#run.points].t, 0)
  local changes = stages.changes(part, run)
  check.equal({ changes[1].step, changes[2].step, #changes }, { 2, 5, 2 })
  check.equal(changes[1].before.shape, { 2, 1, 8, 4 })
  check.equal(changes[1].after.shape, { 2, 1, 4, 2 })
  check.equal(changes[2].after.shape, { 2, 1, 8, 4 })
  -- Alone and in a batch a picture is the same.
  local one = sampler({ part }, solver.euler()):sample(network, { 1, 1, 8, 4 }, { seeds = { 2 } })
  check.close(one:flatten():tolist(), x:narrow(0, 1, 1):flatten():tolist(), 1e-6)
end)

check.test("after a change: the clean sample, resized, under noise of the next point", function()
  -- Data from N(0.4, 0.5^2) in each place. The predicted clean sample has a variance of its own; noise comes on top.
  local model = closed_form.gaussian(flow, "flow", 0.5, 0.4)
  local function pictures(x, t) return model(x:flatten(1), t):reshape(x.shape) end
  local found
  local watch = { predict = function(_, run, next, x, point)
    if run.step == 4 then found = { x = ty.keep(x:clone()), point = point } end
    return next(x, point)
  end }
  local part = stages.part { keep = true, stages = { { steps = 3, to = 0.5 }, { steps = 2, from = 0.7, scale = 0.5 } } }
  ty.manual_seed(4)
  local _, run = sampler({ part, watch }, solver.euler()):sample(pictures, { 400, 1, 16, 16 })
  local change = stages.changes(part, run)[1]
  check.close(found.point.t, 0.7, 1e-12)
  local x0, x = change.after:to "f64", found.x:to "f64"
  local wanted = found.point.alpha ^ 2 * x0:var():item() + found.point.sigma ^ 2
  check.close(x:var():item(), wanted, 0.02 * wanted) -- 25,600 numbers: a deviation of 0.9 %
  -- The noise itself: of variance 1, and of no likeness to the sample or among neighbours.
  local noise = (x - x0 * found.point.alpha) / found.point.sigma
  check.close({ noise:mean():item(), noise:var():item(), (noise * (x0 - x0:mean())):mean():item(),
    (noise * noise:roll({ 1 }, { 3 })):mean():item() }, { 0, 1, 0, 0 }, 0.03)
end)

check.test("the solver begins anew, and the given function resizes", function()
  local starts, asked = 0, {}
  local method = { start = function()
    starts = starts + 1
    return {}
  end, step = function(_, prediction, to, run, state)
    check.ok(state.side == nil or state.side == prediction.x.shape[3])
    state.side = prediction.x.shape[3]
    return solver.euler():step(prediction, to, run, state)
  end }
  local part = stages.part { stages = { { steps = 2, to = 0.5 }, { steps = 2, from = 0.6, scale = 2 } },
    resize = function(x, rows, columns)
      asked[#asked + 1] = { rows, columns }
      return ty.zeros(x.shape[1], x.shape[2], rows, columns)
    end }
  sampler({ part }, method):sample(network, { 1, 1, 4, 4 })
  check.equal(starts, 2)
  check.equal(asked, { { 8, 8 } })
end)

check.test("in discrete time too", function()
  local schedule = diffusion.schedule.discrete()
  local part = stages.part { stages = { { steps = 2, to = 0.7 }, { steps = 2, from = 0.8, to = 0.4, scale = 0.5 },
    { steps = 3, from = 0.5 } } }
  local x = sampler({ part }, solver.ddim(), schedule):sample(network, { 1, 1, 8, 8 })
  check.ok(x:isfinite():all():item())
  check.equal(x.shape, { 1, 1, 8, 8 })
end)

check.test("wrong arguments", function()
  local function fails(list, message) check.fails(function() stages.part { stages = list } end, message) end
  check.fails(function() stages.part {} end, "stages.part: stages: expected a list of tables, got nil")
  fails({}, "expected at least one, got none")
  fails({ { to = 0.5 } }, "stages%[1%]: steps: expected an integer >= 1, got nil")
  fails({ { steps = 2, to = 0.5 }, { steps = 2 } }, "stages%[2%]: from: expected a number in %[0, 1%], got nil")
  fails({ { steps = 2 }, { steps = 2, from = 0.5 } }, "stages%[1%]: to: expected a number above 0 before the last")
  fails({ { steps = 2, to = 0.1 } }, "expected 0 of the last, got 0.1")
  fails({ { steps = 2, from = 0.2, to = 0.5 }, { steps = 1, from = 0.5 } }, "to: expected less than from, 0.2, got 0.5")
  fails({ { steps = 2, to = 0.5 }, { steps = 1, from = 0.5, scale = 2, fresh = false } }, "where the size changes")
  local part = stages.part { stages = { { steps = 2 } } }
  local function same(x) return x end
  check.fails(function() sampler({ part }):sample(same, { 2, 3 }) end, "expected samples %[n, channels")
  check.fails(function() stages.changes(part, { state = {} }) end, "expected a run of a sampler with this part")
end)

check.finish()
