-- SSDTrain: the numbers of the run in memory; a storage is written once, whatever views of it are kept, a parameter
-- never; the last units keep theirs; memory at its most is less; a disk that fails fails the step alone.
local here = (arg and arg[0]:match ".*/" or "tests/modules/offload/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local offload = require "tycho.offload"
local nn, optim = ty.nn, ty.optim

local width, rows = 64, 256
local one = 4 * width * rows -- bytes of a tensor that a layer makes

-- What it keeps: x, of which the two products keep one each; a and b, parts of one storage, for their product; that,
-- for the last layer.
local Gate = nn.module "Gate"
function Gate:init() self.both, self.out = nn.Linear(width, 2 * width), nn.Linear(width, width) end
function Gate:forward(x)
  local both = self.both(x)
  local a, b = both:narrow(1, 0, width), both:narrow(1, width, width)
  return x + self.out(a * b)
end

local Net = nn.module "Net"
function Net:init(depth)
  self.layers = nn.ModuleList()
  for _ = 1, depth do self.layers:append(Gate()) end
end
function Net:forward(x)
  for _, layer in ipairs(self.layers) do x = layer(x) end
  return x
end

local function input(i)
  ty.manual_seed(10 + i)
  return ty.randn(rows, width)
end

local function train(depth, plan, steps, watch)
  ty.manual_seed(1)
  local model = Net(depth)
  local optimizer = optim.AdamW(model, { lr = 1e-3 })
  local engine = plan and offload.engine(model, optimizer, plan)
  local losses, peak = {}, 0
  for i = 1, steps or 3 do
    local x = input(i)
    local function loss() return model(x):square():mean() end
    collectgarbage()
    collectgarbage()
    local live = ty.memory.stats().live
    ty.memory.reset_peak()
    if engine then losses[i] = engine:step(loss)
    else
      ty.scope(function()
        local l = loss()
        optimizer:step(l)
        losses[i] = l:item()
      end)
    end
    peak = i > 1 and math.max(peak, ty.memory.stats().peak - live) or 0
    if watch then watch(engine, i) end
  end
  local stats = engine and engine:stats()
  if engine then engine:close() end
  return losses, peak, stats, model
end

local function plan(o, more)
  o = o or {}
  o.smallest = o.smallest or 1024
  local p = { activations = "file", smallest = 1024, in_flight = 1 << 17, policy = offload.ssdtrain(o) }
  for key, value in pairs(more or {}) do p[key] = value end
  return p
end

check.test("the numbers of the run in memory, for every number of units that keep theirs", function()
  local losses, _, _, model = train(4)
  for keep = 0, 4 do
    for _, place in ipairs { "file", "host" } do
      for ahead = 0, 2 do
        local other, _, _, theirs = train(4, plan({ keep = keep, ahead = ahead }, { activations = place }))
        check.equal(other, losses, ("%d kept, %s"):format(keep, place))
        for i, p in ipairs(model:parameters()) do check.ok(p:equal(theirs:parameters()[i])) end
      end
    end
  end
end)

check.test("each storage once, no parameter", function()
  local depth = 4
  local _, _, stats = train(depth, plan { keep = 0 }, 2)
  local c = stats.file.counters
  -- x; both, of which a and b are parts; a * b
  check.equal(c.activations.written, 2 * depth * (one + 2 * one + one))
  check.equal(stats.shared, 2 * depth, "b is a part of what a is a part of")
  check.equal(c.parameters, nil)
  check.ok(c.activations.read <= c.activations.written, "and read no more than once")
  check.ok(c.activations.read + stats.forwarded >= c.activations.written, "or handed over")
end)

check.test("the last units keep theirs, once it is known which these are; small ones stay", function()
  local depth, before, written = 4, 0, {}
  train(depth, plan { keep = 3 }, 3, function(engine, i)
    local now = engine:stats().file.counters.activations.written
    written[i], before = now - before, now
  end)
  check.equal(written, { depth * 4 * one, 4 * one, 4 * one })
  local _, _, stats = train(depth, plan { keep = 4 }, 1)
  check.equal(stats.file.counters.activations.written, depth * 4 * one)
  _, _, stats = train(depth, plan({ smallest = 2 * one }), 1)
  check.equal(stats.file.counters.activations.written, depth * 2 * one)
  _, _, stats = train(depth, plan({ smallest = 4 * one }), 1)
  check.equal(stats.file, nil, "nothing is written, no file is made")
end)

check.test("memory at its most hardly grows with the depth", function()
  local function most(depth, p)
    local _, peak, _, model = train(depth, p, 3)
    return peak - 4 * model:count_parameters() -- without the gradients, which are all there at the end
  end
  local kept = most(24) - most(12)
  local written = most(24, plan { keep = 1 }) - most(12, plan { keep = 1 })
  check.ok(kept > 11 * 4 * one, "it does when all is kept")
  -- what is between the layers waits for the collector
  check.ok(written < 0.3 * kept, ("12 layers more take %d bytes, kept %d"):format(written, kept))
end)

check.test("a disk that fails fails the step, and nothing else", function()
  for _, fault in ipairs { "full", "error" } do
    local losses = train(4, false, 3)
    ty.manual_seed(1)
    local model = Net(4)
    local engine = offload.engine(model, optim.AdamW(model, { lr = 1e-3 }), plan { keep = 0 })
    local got, failed = {}, 0
    for i = 1, 3 do
      local x = input(i)
      local function loss() return model(x):square():mean() end
      for nth = 1, 13, 4 do
        if engine.stores.file then
          engine.stores.file.tier:inject(fault, nth, 1000)
          local ok, problem = pcall(engine.step, engine, loss)
          check.ok(not ok and tostring(problem):find "tier: %a+ing %d+ bytes", tostring(problem))
          failed = failed + 1
          engine.stores.file.tier:inject(fault, 1, 0)
          check.equal(engine.stores.file.used, 0, "places are given back")
          if fault == "full" then break end
        end
      end
      got[i] = engine:step(loss)
    end
    check.equal(got, losses, fault)
    check.ok(failed > 1)
    engine:close()
  end
end)

check.test("what may not be", function()
  ty.manual_seed(1)
  local model = Net(2)
  local engine = offload.engine(model, optim.SGD(model), plan { keep = 0 })
  local x, kept = input(1), nil
  engine:step(function()
    kept = ty.keep(model(x):square():mean())
    return kept * 1
  end)
  check.fails(function() kept:backward() end, "gone")
  check.fails(function() offload.ssdtrain { keep = -1 } end, "keep: expected an integer >= 0")
  check.fails(function() offload.ssdtrain { kept = 1 } end, "kept")
  engine:close()
end)

check.finish()
