-- Deep Optimizer States: the numbers do not depend on how many subgroups the device steps: bit for bit where it is the
-- CPU, within rounding of its root and division on a GPU; every wait of the schedule is needed; the model of the rates
-- by hand and against a search. On the emulated device the tests of streams run once more with lazy ones.
local here = (arg and arg[0]:match ".*/" or "tests/modules/offload/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local offload = require "tycho.offload"
local interleave = offload.interleave
local nn, optim = ty.nn, ty.optim

local emulated = ty.cuda.count() > 0 and ty.cuda.describe():find "emulated" ~= nil
local lazy = os.getenv "TYCHO_EMULATED_STREAMS" == "lazy"

local function make(device)
  ty.manual_seed(2)
  local model = nn.Sequential(nn.Linear(16, 32), nn.GELU())
  for _ = 1, 5 do model:append(nn.Linear(32, 32)):append(nn.GELU()) end
  model:append(nn.Linear(32, 4))
  return model:to(device or "cpu")
end

local function loss_of(model, i)
  ty.manual_seed(i)
  local x, y = ty.randn(8, 16), ty.randint(0, 4, { 8 })
  local weight = model[1].weight
  local loss = nn.cross_entropy(model(x:to { dtype = weight.dtype, device = weight.device }):to "f32",
    y:to { device = weight.device })
  loss:item() -- the forward pass has been done, with parameters that had to be there
  return loss
end

-- The same arithmetic with everything in memory.
local function reference(name, settings, dtype, steps)
  local model, masters = make(), {}
  for i, p in ipairs(model:parameters()) do masters[i] = p:detach():clone() end
  model:to(dtype)
  local optimizer, losses = optim[name](masters, settings), {}
  for i = 1, steps do
    local loss = loss_of(model, i)
    loss:backward()
    losses[i] = loss:item()
    for k, p in ipairs(model:parameters()) do masters[k]:set_grad(p.grad:to "f32") end
    model:zero_grad()
    optimizer:step()
    ty.no_grad(function() for k, p in ipairs(model:parameters()) do p:copy_(masters[k]) end end)
  end
  return losses, masters
end

-- Trains; change(trainer) comes before the first step.
local function train(o, steps, device, change)
  local model = make(device)
  local trainer = offload.deep_opt_states(model, o)
  if change then change(trainer) end
  local losses = {}
  for i = 1, steps do losses[i] = trainer:step(loss_of, model, i) end
  local counters, bytes = trainer.counters, trainer:device_bytes()
  trainer:close()
  trainer:close()
  local parameters = {}
  for i, p in ipairs(model:parameters()) do parameters[i] = p:detach():to "cpu" end
  return losses, parameters, trainer, counters, bytes
end

local rows = { { "AdamW", { lr = 1e-2 } }, { "SGD", { lr = 0.1, momentum = 0.9 } },
  { "Lion", { lr = 1e-3, schedule = nil } } }

check.test("bit for bit the same whatever the device steps, where it is the CPU", function()
  for _, row in ipairs(rows) do
    for _, dtype in ipairs { "bf16", "f16" } do
      local wanted, masters = reference(row[1], row[2], dtype, 4)
      for _, every in ipairs { 1, 1.5, 2, 3, 7.25, math.huge } do
        local losses, parameters = train({ optimizer = row[1], settings = row[2], dtype = dtype, every = every,
          subgroup = 1000, slots = every == 3 and 1 or 2 }, 4)
        local what = ("%s, %s, every %s"):format(row[1], dtype, every)
        check.equal(losses, wanted, what)
        local differ = 0
        for i, p in ipairs(parameters) do differ = differ + (p:equal(masters[i]) and 0 or 1) end
        check.equal(differ, 0, what .. ": parameters that differ")
      end
    end
  end
end)

check.test("what moves: three f32 of an element there and back, or its half precision", function()
  local model = make()
  local sizes = 0
  for _, p in ipairs(model:parameters()) do sizes = sizes + p:numel() end
  local _, _, trainer, counters, bytes = train({ every = 2, subgroup = 1000 }, 3)
  local there = 0
  for i, yes in ipairs(trainer.on_device) do there = there + (yes and trainer.elements[i] or 0) end
  -- In the first step the moments are not there yet; they come back from where they were made.
  check.equal(counters.down, 3 * 12 * there)
  check.equal(counters.up, (4 + 2 * 12) * there + 3 * 2 * (sizes - there))
  local largest = 0
  for i, n in ipairs(trainer.elements) do if trainer.on_device[i] then largest = math.max(largest, n) end end
  check.ok(bytes <= 2 * 12 * largest, bytes .. " bytes of states on the device at a time")
end)

check.test("places and schedule by hand", function()
  check.equal(interleave.places(6, 2), { true, false, true, false, true, false })
  check.equal(interleave.places(6, 3), { true, false, false, true, false, false })
  check.equal(interleave.places(5, 1), { true, true, true, true, true })
  check.equal(interleave.places(3, math.huge), { false, false, false })
  check.equal(interleave.places(6, 1.5), { true, true, false, true, true, false })
  local list = {}
  for i, e in ipairs(interleave.schedule({ true, false, true }, 1)) do
    list[i] = e.what .. e.group .. ": " .. table.concat(e.after, ", ")
  end
  check.equal(list, { "fetch1: flush 3, flush 1", "step1: backward, fetch 1", "flush1: step 1",
    "fetch3: flush 1, flush 3", "host2: landed 2", "send2: backward", "step3: backward, fetch 3",
    "flush3: step 3", "ready0: step 1, send 2, step 3" })
end)

check.test("the time of an update by hand", function()
  local rates = { host = 1, convert = math.huge, device = 4, up = 12, down = 12 }
  -- Host alone: 3 groups of 2 elements, each sent in 1/3 s behind the next step.
  local seconds = interleave.simulate(interleave.schedule({ false, false, false }, 2), { 2, 2, 2 }, rates)
  check.close(seconds, 6 + 1 / 3, 1e-12)
  -- The device's group: fetched in 2, stepped in 0.5, flushed in 2; the host's two are done at 4 and sent at 4 1/3.
  local events
  seconds, events = interleave.simulate(interleave.schedule({ true, false, false }, 2), { 2, 2, 2 }, rates)
  check.close(seconds, 4.5, 1e-12)
  local last = {}
  for _, e in ipairs(events) do
    check.ok(e.from >= (last[e.row] or 0) - 1e-12, "one thing at a time: " .. e.row)
    last[e.row] = e.to
  end
  -- The way up is taken by a fetch from 0 to 4, and the half-precision parameters wait for it.
  seconds = interleave.simulate(interleave.schedule({ true, false }, 1), { 4, 2 }, rates)
  check.close(seconds, 4 + 1 + 4, 1e-12)
end)

check.test("how many the device should step, by hand and against a search", function()
  -- part * 12 / 12 + (1 - part) * 2 / 12 = (1 - part) * 1: part = 5 / 11.
  local rates = { host = 2, convert = 2, device = 1e9, up = 12, down = 12 }
  check.close(interleave.stride(rates), 11 / 5, 1e-12)
  check.close(interleave.predict(5 / 11, rates), 6 / 11, 1e-12)
  rates.device = 0.5 -- (1 - part) = part / 0.5
  check.close(interleave.stride(rates), 3, 1e-12)
  check.equal(interleave.stride { host = 1e9, convert = 1e9, device = 1, up = 1, down = 1 }, math.huge)
  ty.manual_seed(3)
  local draw = ty.rand(200):tolist()
  local function number() return 10 ^ (2 * table.remove(draw) - 1) end
  local elements = {}
  for i = 1, 120 do elements[i] = 1 end
  for _ = 1, 8 do
    rates = { host = number(), convert = 10 * number(), device = 10 * number(), up = 12 * number(),
      down = 12 * number() }
    local function time(every)
      return (interleave.simulate(interleave.schedule(interleave.places(120, every), 2), elements, rates))
    end
    local best = time(math.huge)
    for n = 2, 60, 2 do best = math.min(best, time(60 / n)) end
    local chosen = time(interleave.stride(rates))
    check.ok(chosen < 1.1 * best, ("%g of the best"):format(chosen / best))
  end
end)

if ty.cuda.count() > 0 then
  local function apart(a, b)
    local most = 0
    for i, x in ipairs(a) do
      local d = (x:to "f32" - b[i]:to "f32"):abs():max():item()
      most = d ~= d and math.huge or math.max(most, d)
    end
    return most
  end

  check.test("on a GPU: within rounding the same, and that of the run in memory", function()
    for _, row in ipairs(rows) do
      local function run(every) return train({ optimizer = row[1], settings = row[2], every = every, subgroup = 1000 },
        4, "cuda") end
      local losses, wanted = run(math.huge)
      for _, every in ipairs { 1, 2, 3 } do
        local theirs, parameters = run(every)
        check.close(theirs, losses, 2e-2, row[1] .. ", every " .. every)
        check.ok(apart(parameters, wanted) < 2e-2, ("%s, every %d: %g"):format(row[1], every,
          apart(parameters, wanted)))
        local again, twice = run(every)
        check.equal(again, theirs, "the same run twice")
        check.equal(apart(twice, parameters), 0)
      end
    end
  end)

  if emulated and lazy then
    check.test("a wait that is left out is found", function()
      local o = { settings = { lr = 0.1 }, every = 2, subgroup = 1000 }
      local _, wanted = train(o, 4, "cuda")
      local kinds, found = {}, {}
      local function kind(entry, name) return entry.what .. " after " .. name:match "%a+" end
      train(o, 1, "cuda", function(trainer)
        for _, entry in ipairs(trainer.schedule) do
          for _, name in ipairs(entry.after) do kinds[kind(entry, name)] = true end
        end
      end)
      for left_out in pairs(kinds) do
        local _, parameters = train(o, 4, "cuda", function(trainer)
          for _, entry in ipairs(trainer.schedule) do
            local after = {}
            for _, name in ipairs(entry.after) do if kind(entry, name) ~= left_out then after[#after + 1] = name end end
            entry.after = after
          end
        end)
        if apart(parameters, wanted) > 0 then found[left_out] = true end
      end
      -- A stream that is late cannot write too early what the backward pass still reads or computes.
      for _, name in ipairs { "send after backward", "step after backward" } do
        check.ok(kinds[name], name)
        kinds[name] = nil
      end
      check.equal(found, kinds)
    end)
  end
end

check.test("errors", function()
  local model = make()
  local trainer = offload.deep_opt_states(model, { every = 2, subgroup = 1000 })
  local first = trainer:step(loss_of, model, 1)
  check.fails(function() trainer:step(function() loss_of(model, 2):backward() error "no batch" end) end, "no batch")
  check.fails(function() trainer:step(function() return 1 end) end, "DeepOptStates:step: fn: expected a tensor, got 1")
  check.ok(trainer:step(loss_of, model, 1) < first, "it goes on")
  trainer:close()
  check.equal(model[1].weight.dtype, "f32")
  check.fails(function() offload.deep_opt_states(model, {}) end, "every: expected a number >= 1 or rates")
  check.fails(function() offload.deep_opt_states(model, { every = 0.5 }) end, "every: expected a number >= 1")
  check.fails(function() offload.deep_opt_states(model, { rates = {} }) end, "rates%.")
  check.fails(function() offload.deep_opt_states(model, { every = 1, optimizer = "Sgd" }) end, "a name in ty.optim")
  check.fails(function() offload.deep_opt_states(model, { every = 1, settings = { clip_norm = 1 } }) end, "clip_norm")
  model[1].weight:requires_grad_(false)
  check.fails(function() offload.deep_opt_states(model, { every = 1 }) end, "that require gradients")
end)

check.finish()
