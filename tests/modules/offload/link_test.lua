-- The engine between a GPU, page-locked memory and a file: the numbers of the run on the GPU alone, within its memory,
-- whatever is where; and every wait between its copies and what is computed is needed. On the emulated device the tests
-- run once more with lazy streams, where a copy that races with its use gives wrong numbers.
local here = (arg and arg[0]:match ".*/" or "tests/modules/offload/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local offload = require "tycho.offload"
local nn, optim = ty.nn, ty.optim

if ty.cuda.count() == 0 then
  check.test("without a GPU", function() check.equal(ty.cuda.count(), 0) end)
  check.finish()
  return
end

local emulated = ty.cuda.describe():find "emulated" ~= nil
local lazy = os.getenv "TYCHO_EMULATED_STREAMS" == "lazy"

local function make(width)
  ty.manual_seed(2)
  local model = nn.Sequential(nn.Linear(16, width), nn.GELU())
  for _ = 1, 4 do model:append(nn.Linear(width, width)):append(nn.GELU()) end
  model:append(nn.Linear(width, 4))
  return model:to "cuda"
end

local function loss_of(model, i)
  ty.manual_seed(i)
  local x, y = ty.randn(8, 16), ty.randint(0, 4, { 8 })
  return nn.cross_entropy(model(x:to "cuda"), y:to "cuda")
end

local function adamw(model) return optim.AdamW(model, { lr = 1e-2 }) end

local function plan(place, more)
  local all = { parameters = place, gradients = place, moments = place, activations = place, file = scratch.folder,
    smallest = 256, in_flight = 4096 }
  for key, value in pairs(more or {}) do all[key] = value end
  return all
end

-- Losses, parameters and the engine's counts.
local function train(planned, optimizer_of, steps)
  local model = make(32)
  local optimizer = (optimizer_of or adamw)(model)
  local engine = planned and offload.engine(model, optimizer, planned)
  local losses = {}
  for i = 1, steps or 3 do
    if engine then losses[i] = engine:step(loss_of, model, i)
    else
      ty.scope(function()
        local loss = loss_of(model, i)
        optimizer:step(loss)
        losses[i] = loss:item()
      end)
    end
  end
  local stats = engine and engine:stats()
  if engine then engine:close() end
  local parameters = {}
  for i, p in ipairs(model:parameters()) do
    check.equal(p.device, "cuda:0")
    parameters[i] = p:detach():to "cpu"
  end
  return losses, parameters, stats
end

local function differ(a, b)
  local n = 0
  for i, p in ipairs(a) do n = n + (p:equal(b[i]) and 0 or 1) end
  return n
end

check.test("the numbers of the run on the GPU alone", function()
  local losses, parameters = train()
  local away = { gradients = "device" }
  for _, row in ipairs {
    { "host", plan "host" }, { "file", plan "file" }, { "file, threads", plan("file", { backend = "threads" }) },
    { "moments on the host, parameters in a file", { moments = "host", parameters = "file", file = scratch.folder,
      smallest = 256 } },
    { "activations", { activations = "host", smallest = 256 } },
    { "a window of four", plan("host", { policy = offload.superpipeline { window = 4, ahead = 2 } }) },
    { "ssdtrain", plan("file", { policy = offload.ssdtrain { smallest = 256 } }) },
    { "horizon", plan("host", { policy = offload.horizon() }) },
    { "fuyou", plan("file", { gradients = away.gradients, policy = offload.fuyou { probe = 65536 } }) },
    { "zero_infinity", plan("host", { policy = offload.zero_infinity() }) },
  } do
    local theirs, others, stats = train(row[2])
    check.equal(theirs, losses, row[1])
    check.equal(differ(parameters, others), 0, row[1] .. ": parameters that differ")
    local bytes = 0
    for _, store in pairs { stats.host, stats.file } do
      for _, c in pairs(store.counters) do bytes = bytes + c.read + c.written end
    end
    check.ok(bytes > 20000, row[1] .. ": it moved " .. bytes)
  end
end)

check.test("other optimizers, and bytes by kind as on the CPU", function()
  for name, make_optimizer in pairs {
    sgd = function(m) return optim.SGD(m, { lr = 0.1, momentum = 0.9 }) end,
    lion = function(m) return optim.Lion(m, { lr = 1e-3 }) end,
    clipped = function(m) return optim.AdamW(m, { lr = 1e-2, clip_norm = 0.5 }) end,
  } do
    local losses, parameters = train(nil, make_optimizer)
    local theirs, others = train(plan("host", name == "clipped" and { gradients = "device" } or nil), make_optimizer)
    check.equal(theirs, losses, name)
    check.equal(differ(parameters, others), 0, name)
  end
  local _, parameters, stats = train(plan "host")
  local large = 0
  for _, p in ipairs(parameters) do if p:nbytes() >= 256 then large = large + p:nbytes() end end
  local c = stats.host.counters
  check.equal(c.moments.written, 3 * 2 * large, "moments are written once a step")
  check.equal(c.moments.read, 2 * 2 * large, "and read once a step, but not before the first")
  check.equal(c.parameters.written, 4 * large, "parameters at first and after each step")
end)

check.test("within the GPU's memory, which the model alone would break", function()
  local function within(planned)
    collectgarbage()
    collectgarbage()
    ty.cuda.synchronize()
    ty.memory.empty_cache "cuda"
    local model = make(256)
    local optimizer = adamw(model)
    local engine = planned and offload.engine(model, optimizer, planned)
    collectgarbage()
    ty.cuda.synchronize()
    ty.memory.empty_cache "cuda"
    local away = 0
    for _, p in ipairs(model:parameters()) do if p.device == "cuda:0" then away = away + p:nbytes() end end
    ty.memory.set_budget("cuda", ty.memory.stats("cuda").live - away + (3 << 20))
    local ok, problem = pcall(function()
      for i = 1, 2 do
        if engine then engine:step(loss_of, model, i)
        else ty.scope(function() optimizer:step(loss_of(model, i)) end) end
      end
    end)
    ty.memory.set_budget "cuda"
    if engine then engine:close() end
    return ok, problem
  end
  local ok, problem = within(nil)
  check.ok(not ok and tostring(problem):find "out of memory", "without: " .. tostring(problem))
  for _, place in ipairs { "host", "file" } do
    ok, problem = within(plan(place, { in_flight = 1 << 18 }))
    check.ok(ok, place .. ": " .. tostring(problem))
  end
end)

check.test("a disk that fails, an error in the model: one error, and it goes on", function()
  local losses = train()
  local model = make(32)
  local engine = offload.engine(model, adamw(model), plan "file")
  check.equal(engine:step(loss_of, model, 1), losses[1])
  check.fails(function() engine:step(function() loss_of(model, 2) error "no batch" end) end, "no batch")
  check.equal(engine:step(loss_of, model, 2), losses[2])
  for nth = 1, 40, 6 do
    engine.stores.file.tier:inject("error", nth, 1)
    local ok, problem = pcall(engine.step, engine, loss_of, model, 3)
    engine.stores.file.tier:inject("error", 1, 0)
    check.ok(ok or tostring(problem):find "Input/output error", tostring(problem))
    check.ok(engine:step(loss_of, model, 3) < 10, "it goes on")
  end
  engine:save(scratch.file "run", { model = model })
  engine:close()
  local other = make(32)
  ty.train.load_checkpoint(scratch.file "run", { model = other })
  for i, p in ipairs(model:parameters()) do check.ok(p:equal(other:parameters()[i]), "saved " .. i) end
  local mixed = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4):to "cuda")
  check.fails(function() offload.engine(mixed, nil, plan "host") end, "expected all parameters on one device, cpu, got")
  check.fails(function() offload.engine(make(32), nil, plan("device", { policy = offload.memascend() })) end,
    "offload.memascend: expected a model on the CPU")
end)

if emulated and lazy then
  check.test("a wait that is left out is found", function()
    local stream = debug.getmetatable(ty.cuda.default_stream()).__index
    local event = debug.getmetatable(ty.cuda.Event()).__index
    local losses, parameters = train(nil, nil, 4)
    -- On the way to a file it is the host that waits for a copy.
    for _, row in ipairs { { "host", stream, "wait_stream" }, { "host", stream, "wait_event" },
      { "file", stream, "wait_stream" }, { "file", event, "synchronize" } } do
      local place, class, name = table.unpack(row)
      local real, calls = class[name], 0
      class[name] = function(...)
        calls = calls + 1
        return real(...)
      end
      check.equal(train(plan(place), nil, 4), losses, place)
      class[name] = function() end
      local ok, theirs, others = pcall(train, plan(place), nil, 4)
      class[name] = real
      check.ok(calls > 0, name)
      local apart = not ok
      for i, loss in ipairs(ok and theirs or {}) do apart = apart or loss ~= losses[i] end
      check.ok(apart or differ(parameters, others) > 0, ("%s without %s gives other numbers"):format(place, name))
    end
    check.equal(train(plan "host", nil, 4), losses, "with all of them it is right again")
  end)
end

check.finish()
