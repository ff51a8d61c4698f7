-- The engine: the losses, parameters and moments of the run in memory, bit for bit, wherever things are; what is away
-- is away; a disk that fails leaves a model that can be saved and trained on.
local here = (arg and arg[0]:match ".*/" or "tests/modules/offload/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local offload = require "tycho.offload"
local llm = require "tycho.llm"
local nn, optim = ty.nn, ty.optim

-- ---- models of several kinds ----

local Block = nn.module "Block"
function Block:init(width)
  self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
end
function Block:forward(x) return x + self.down(self.up(self.norm(x)):tanh()) end

local Tied = nn.module "Tied" -- with a parameter of its own, and a head that is its embedding
function Tied:init(width, depth, again)
  self.embed, self.blocks, self.norm, self.again = nn.Embedding(64, width), nn.ModuleList(), nn.LayerNorm(width), again
  for _ = 1, depth do self.blocks:append(Block(width)) end
  self.scale = ty.ones(width):requires_grad_()
end
function Tied:forward(ids)
  local x = self.embed(ids)
  for _, block in ipairs(self.blocks) do x = self.again and ty.checkpoint(block, x) or block(x) end
  return ty.linear(self.norm(x) * self.scale, self.embed.weight)
end

local function ids(i)
  ty.manual_seed(100 + i)
  return ty.randint(0, 64, { 4, 16 }), ty.randint(0, 64, { 4, 16 })
end

local function language_loss(model, i)
  local x, y = ids(i)
  local logits = model(x)
  if type(logits) == "table" then logits = logits.logits end
  return nn.cross_entropy(logits:reshape(-1, 64), y:reshape(-1))
end

local kinds = {
  tied = { make = function() return Tied(32, 4) end, loss = language_loss },
  checkpointed = { make = function() return Tied(32, 4, true) end, loss = language_loss },
  bf16 = { make = function() return Tied(32, 4) end,
    loss = function(model, i) return ty.autocast("bf16", language_loss, model, i) end },
  llama = { make = function()
    return llm.Llama { vocab_size = 64, hidden_size = 32, intermediate_size = 64, num_hidden_layers = 3,
      num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 32 }
  end, loss = language_loss },
  pictures = { make = function()
    return nn.Sequential(nn.Conv2d(3, 16, 3, { padding = 1 }), nn.BatchNorm2d(16), nn.ReLU(),
      nn.Conv2d(16, 16, 3, { padding = 1 }), nn.Dropout(0.1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 64, 10))
  end, loss = function(model, i)
    ty.manual_seed(i)
    return nn.cross_entropy(model(ty.randn(4, 3, 8, 8)), ty.randint(0, 10, { 4 }))
  end },
}

local function adamw(model) return optim.AdamW(model, { lr = 1e-2 }) end

-- Losses, and at the end the parameters and the optimizer's state, of some steps.
local function train(kind, plan, make_optimizer, steps, watch)
  ty.manual_seed(1)
  local model = kinds[kind].make()
  local optimizer = (make_optimizer or adamw)(model)
  local engine = plan and offload.engine(model, optimizer, plan)
  local losses, norms = {}, {}
  for i = 1, steps or 3 do
    if engine then
      losses[i], norms[i] = engine:step(kinds[kind].loss, model, i)
      if watch then watch(engine, model, optimizer, i) end
    else
      ty.scope(function()
        local loss = kinds[kind].loss(model, i)
        norms[i] = optimizer:step(loss)
        losses[i] = loss:item()
      end)
    end
  end
  local stats = engine and engine:stats()
  if engine then engine:close() end
  return { losses = losses, norms = norms, parameters = model:parameters(), state = optimizer:state_dict(),
    stats = stats, model = model, optimizer = optimizer }
end

local function same(a, b, what)
  check.equal(a.losses, b.losses, what .. ": losses")
  check.equal(a.norms, b.norms, what .. ": norms")
  check.equal(a.state.steps, b.state.steps, what .. ": steps")
  for i, p in ipairs(a.parameters) do check.ok(p:equal(b.parameters[i]), what .. ": parameter " .. i) end
  for position, state in pairs(a.state.state) do
    for key, value in pairs(state) do
      local other = b.state.state[position][key]
      check.ok(ty.is_tensor(value) and value:equal(other) or value == other, what .. ": " .. key .. " " .. position)
    end
  end
end

local folder = scratch.folder
local function all(place, more)
  local plan = { parameters = place, gradients = place, moments = place, activations = place, file = folder,
    smallest = 512, in_flight = 8192 }
  for key, value in pairs(more or {}) do plan[key] = value end
  return plan
end

-- ---- the same numbers ----

for kind in pairs(kinds) do
  check.test("the run in memory: " .. kind, function()
    local plain = train(kind)
    same(plain, train(kind, all "file"), "file")
    same(plain, train(kind, all("file", { backend = "threads" })), "file, threads")
    same(plain, train(kind, all "host"), "host")
    for _, what in ipairs { "parameters", "gradients", "moments", "activations" } do
      same(plain, train(kind, { [what] = "host", smallest = 512 }), what)
    end
    same(plain, train(kind, all("host", { policy = offload.superpipeline { window = 1, ahead = 0 } })), "one unit")
    same(plain, train(kind, all("host", { policy = offload.superpipeline { window = 4, ahead = 2 } })), "four units")
  end)
end

check.test("any optimizer", function()
  for name, make in pairs {
    sgd = function(m) return optim.SGD(m, { lr = 0.1, momentum = 0.9 }) end,
    lion = function(m) return optim.Lion(m, { lr = 1e-3 }) end,
    adafactor = function(m) return optim.Adafactor(m, { lr = 1e-2 }) end,
    muon = function(m) return optim.Muon(m, { lr = 1e-2 }) end,
    bits8 = function(m) return optim.AdamW(m, { lr = 1e-2, bits = 8 }) end,
    clipped = function(m) return optim.AdamW(m, { lr = 1e-2, clip_norm = 0.5, clip_value = 0.1 }) end,
    scheduled = function(m) return optim.AdamW(m, { lr = 1e-2, schedule = function(n) return 1 / (n + 1) end }) end,
    groups = function(m)
      return optim.AdamW { { params = m.blocks:parameters(), lr = 1e-3 }, { params = m.embed:parameters() },
        { params = m.norm:parameters(), weight_decay = 0 } }
    end,
  } do
    local plan = all("host", name == "clipped" and { gradients = "device" } or nil)
    same(train("tied", false, make), train("tied", plan, make), name)
  end
end)

check.test("what the plan sends away is away, and comes by itself when it is asked for", function()
  train("tied", all "file", adamw, 2, function(engine, model, optimizer)
    local far, near, small = 0, 0, 0
    for _, p in ipairs(model:parameters()) do
      if p:nbytes() < 512 then small = small + 1
      elseif p.device == "meta" then far = far + 1
      else near = near + 1 end
      check.equal(p.grad, nil)
      local moment = optimizer.state[p].exp_avg
      check.equal(moment.device, p:nbytes() < 512 and "cpu" or "meta")
    end
    check.equal({ far, near }, { 13, 0 })
    check.ok(small > 0, "there are small ones")
    check.equal(engine:cells "gradients", {})
  end)
  ty.manual_seed(1)
  local model = Tied(32, 4)
  local x = ids(1)
  local wanted = ty.no_grad(function() return model(x) end)
  local engine = offload.engine(model, nil, all "file")
  check.equal(model.embed.weight.device, "meta")
  for _ = 1, 3 do check.ok(ty.no_grad(function() return model(x) end):equal(wanted), "called by itself") end
  check.ok(engine:run(function() return model(x) end):equal(wanted), "by run()")
  local sum = model.blocks[2].up.weight:sum():item()
  engine:close()
  check.equal(model.blocks[2].up.weight:sum():item(), sum)
  check.equal(getmetatable(model.blocks[2]), Block)
end)

check.test("bytes by kind are those that have to move", function()
  local result = train("tied", all("file", { policy = offload.superpipeline { window = 2, ahead = 1 } }), adamw, 3)
  local counters, large = result.stats.file.counters, 0
  for _, p in ipairs(result.parameters) do if p:nbytes() >= 512 then large = large + p:nbytes() end end
  check.equal(counters.moments.written, 3 * 2 * large, "moments are written once a step")
  check.equal(counters.moments.read, 2 * 2 * large, "and read once a step, but not before the first")
  check.equal(counters.parameters.written, 4 * large, "parameters at first and after each step")
  check.equal(counters.gradients.written, 3 * large, "gradients once a step")
  check.ok(result.stats.shared > 0, "a tensor that two ops keep is kept once")
end)

check.test("the device holds the window, whatever the depth", function()
  local function most(depth, plan)
    ty.manual_seed(1)
    local model = Tied(64, depth)
    local engine = offload.engine(model, nil, plan)
    local x = ids(1):narrow(0, 0, 1):narrow(1, 0, 2)
    engine:run(function() return model(x) end)
    collectgarbage()
    ty.memory.reset_peak()
    local before = 0
    for _, p in ipairs(model:parameters()) do if p.device == "cpu" then before = before + p:nbytes() end end
    local live = ty.memory.stats().live
    engine:run(function() return model(x) end)
    local peak = ty.memory.stats().peak - live + before
    engine:close()
    return peak
  end
  local four, twelve = most(4, all "file"), most(12, all "file")
  check.ok(twelve < 1.1 * four, ("%d bytes at 12 layers, %d at 4"):format(twelve, four))
end)

-- ---- what goes wrong ----

check.test("a disk that fails in a step: one error, a model that is whole, and training goes on", function()
  for _, fault in ipairs { "full", "error" } do
    local failed = 0
    for nth = 1, 60, 4 do
      ty.manual_seed(1)
      local model = Tied(32, 3)
      local optimizer = adamw(model)
      local engine = offload.engine(model, optimizer, all "host")
      engine:step(language_loss, model, 1)
      local count = optimizer.steps
      engine.stores.host.tier:inject(fault, nth, 1)
      local ok, problem = pcall(engine.step, engine, language_loss, model, 2)
      engine.stores.host.tier:inject(fault, 1, 0)
      if not ok then
        failed = failed + 1
        check.ok(tostring(problem):find "tier: %a+ing %d+ bytes at", tostring(problem))
        check.equal(optimizer.steps, count)
      end
      local loss = engine:step(language_loss, model, 3)
      check.ok(loss == loss and loss < math.huge, "it goes on")
      engine:gather()
      for _, p in ipairs(model:parameters()) do
        check.ok(p.device == "cpu" and p:isfinite():all():item(), "a parameter is whole")
      end
      engine:close()
    end
    check.ok(failed > 3, fault .. ": some steps failed, " .. failed)
  end
end)

check.test("an error in the model: nothing is stepped, and the next step is as ever", function()
  local plain = train("tied", false, adamw, 2)
  ty.manual_seed(1)
  local model = Tied(32, 4)
  local engine = offload.engine(model, adamw(model), all "file")
  local losses = { (engine:step(language_loss, model, 1)) }
  check.fails(function() engine:step(function() model((ids(1))) error "no such batch" end) end, "no such batch")
  local broken = model.blocks[3].down.forward
  rawset(model.blocks[3].down, "forward", function() error "a broken layer" end)
  check.fails(function() engine:step(language_loss, model, 2) end, "a broken layer")
  rawset(model.blocks[3].down, "forward", nil)
  check.equal(model.blocks[3].down.forward, broken)
  check.fails(function() engine:step(function() return 3 end) end, "OffloadEngine:step: fn: expected a tensor, got 3")
  losses[2] = engine:step(language_loss, model, 2)
  check.equal(losses, plain.losses)
  engine:close()
end)

check.test("a budget that the model alone would break", function()
  local function budget(plan)
    collectgarbage()
    collectgarbage()
    ty.manual_seed(1)
    local model = Tied(128, 6)
    local optimizer = adamw(model)
    local engine = plan and offload.engine(model, optimizer, plan)
    collectgarbage()
    local away = 0
    for _, p in ipairs(model:parameters()) do if p.device == "cpu" then away = away + p:nbytes() end end
    ty.memory.empty_cache()
    ty.memory.set_budget("cpu", ty.memory.stats().live - away + (9 << 20))
    local ok, problem = pcall(function()
      for i = 1, 2 do
        if engine then engine:step(language_loss, model, i)
        else ty.scope(function() optimizer:step(language_loss(model, i)) end) end
      end
    end)
    ty.memory.set_budget()
    if engine then engine:close() end
    return ok, problem
  end
  local ok, problem = budget(nil)
  check.ok(not ok and tostring(problem):find "out of memory", "without: " .. tostring(problem))
  ok, problem = budget(all("file", { in_flight = 1 << 19 }))
  check.ok(ok, "with: " .. tostring(problem))
end)

check.test("state goes out and in", function()
  local plain = train("tied", false, adamw, 4)
  ty.manual_seed(1)
  local model = Tied(32, 4)
  local optimizer = adamw(model)
  local engine = offload.engine(model, optimizer, all "file")
  for i = 1, 2 do engine:step(language_loss, model, i) end
  engine:gather()
  local saved = { model = model:clone():state_dict(), optimizer = optimizer:state_dict() }
  for _, state in pairs(saved.optimizer.state) do
    for key, value in pairs(state) do if ty.is_tensor(value) then state[key] = value:clone() end end
  end
  engine:close()
  ty.manual_seed(7)
  local other = Tied(32, 4)
  other:load_state_dict(saved.model)
  local second = adamw(other)
  second:load_state_dict(saved.optimizer)
  engine = offload.engine(other, second, all("host")) -- another plan: it is not part of the state
  local losses = { plain.losses[1], plain.losses[2] }
  for i = 3, 4 do losses[i] = engine:step(language_loss, other, i) end
  engine:close()
  check.equal(losses, plain.losses)
end)

check.test("a timeline that viewers read", function()
  ty.manual_seed(1)
  local model = Tied(32, 2)
  local engine = offload.engine(model, adamw(model), all "file")
  engine:step(language_loss, model, 1)
  local list = ty.io.load_json(engine:trace(scratch.file "trace.json")).traceEvents
  engine:close()
  local seen = {}
  for _, e in ipairs(list) do
    if e.ph == "X" then
      seen[e.cat] = (seen[e.cat] or 0) + 1
      check.ok(e.dur >= 0 and e.ts > 0)
    end
  end
  for _, kind in ipairs { "forward", "backward", "update", "parameters", "moments", "activations", "gradients" } do
    check.ok(seen[kind], kind)
  end
end)

-- ---- plans ----

check.test("a plan fills the nearest place first, and refuses what cannot fit", function()
  local model = Tied(64, 8)
  local bytes = 4 * model:count_parameters()
  local function places(options, other)
    options.quiet = true
    local p = offload.plan(other or model, options)
    return { p.activations, p.parameters, p.gradients, p.moments }
  end
  check.equal(places { device = "1 GiB" }, { "device", "device", "device", "device" })
  check.equal(places { device = 3 * bytes, host = "1 GiB" }, { "device", "device", "device", "host" })
  check.equal(places { device = 3 * bytes, host = "1 KiB", file = folder }, { "device", "device", "device", "file" })
  check.equal(places { device = 1.9 * bytes, host = 2 * bytes, file = folder },
    { "device", "device", "file", "host" })
  check.equal(places { device = 1.3 * bytes, file = folder }, { "device", "file", "file", "file" })
  check.fails(function() places { device = bytes } end, "more are needed on the device, or a file")
  check.fails(function() places { device = "10 KiB", file = folder } end, "KiB more are needed on the device\n")
  check.fails(function() places { device = "lots" } end, 'device: expected bytes such as "2 GiB"')
  check.fails(function() places { device = -1 } end, "offload.plan: device")
  check.fails(function() places { device = "1 GiB", file = folder .. "/nowhere" } end, "there is no folder")
  check.fails(function() places { device = "1.2.3 GiB" } end, 'device: expected bytes such as "2 GiB"')
  check.fails(function() places { device = "-2 GiB" } end, 'device: expected bytes such as "2 GiB"')
  check.fails(function() places { device = "1 GiB", host = "1 PiB" } end, "offload.plan: host: expected bytes")
  local plain = scratch.spit("plain", "text")
  check.fails(function() places { device = "1 GiB", file = plain } end,
    "offload.plan: file: no file in .*: Not a directory")
  check.fails(function() places { device = "1 GiB", file = "/proc" } end, "offload.plan: file: no file in /proc")
  os.remove(plain)
  check.fails(function() places {} end, "offload.plan: device")
  local huge = nn.with_defaults({ device = "meta" }, function()
    local layers = nn.Sequential()
    for _ = 1, 1000 do layers:append(nn.Linear(1 << 15, 1 << 15)) end
    return layers
  end)
  check.fails(function() places({ device = "64 GiB", file = folder }, huge) end, "more are needed on the disk of")
  local report = {}
  local print_before = print
  print = function(line) report[#report + 1] = line end -- luacheck: ignore
  offload.plan(model, { device = "1 GiB", file = folder })
  if ty.io.exists "/dev/shm" then offload.plan(model, { device = "1 GiB", file = "/dev/shm" }) end
  print = print_before -- luacheck: ignore
  check.ok(report[1]:find "file +0 B +of .- free, ", report[1])
  check.ok(not report[2] or report[2]:find "/dev/shm is memory, no disk", report[2])
  local plan = offload.plan(model, { device = 1.3 * bytes, file = folder, quiet = true })
  local engine = offload.engine(model, adamw(model), plan)
  engine:step(language_loss, model, 1)
  engine:close()
end)

check.test("the host's limit holds", function()
  local model = Tied(32, 4)
  local large = 0
  for _, p in ipairs(model:parameters()) do
    if p:nbytes() >= 512 then large = large + (p:nbytes() + 4095) // 4096 * 4096 end
  end
  local plan = { parameters = "host", smallest = 512, host = large }
  local engine = offload.engine(model, nil, plan)
  check.equal(engine:stats().host.most, large)
  engine:close()
  plan.host = large - 1
  check.fails(function() offload.engine(model, nil, plan) end, "offload: host: its %d+ bytes do not hold %d+ more")
  for _, p in ipairs(model:parameters()) do check.equal(p.device, "cpu") end
  check.equal(getmetatable(model.blocks[1]), Block)
  check.fails(function() offload.engine(model, nil, { host = "much" }) end, "host: expected an integer >= 0")
end)

check.test("wrong arguments", function()
  local model = Tied(32, 1)
  local function make(...) return pcall(offload.engine, ...) end
  for _, row in ipairs {
    { "plan: .*unknown.*'weights'", model, nil, { weights = "file" } },
    { "parameters: expected \"device\"", model, nil, { parameters = "disk" } },
    { "optimizer: expected one of ty.optim", model, {}, {} },
    { "expected \"device\" with clip_norm", model, optim.SGD(model, { clip_norm = 1 }), { gradients = "file" } },
    { "no file in", model, nil, { parameters = "file", file = folder .. "/nowhere" } },
  } do
    local ok, problem = make(table.unpack(row, 2, 4))
    check.ok(not ok, row[1])
    check.ok(tostring(problem):find(row[1]) or tostring(problem):find "option", tostring(problem))
  end
  local engine = offload.engine(model, nil, { parameters = "host" })
  check.fails(function() offload.engine(model, nil, {}) end, "it has an engine already")
  check.fails(function() engine:step(function() end) end, "made without an optimizer")
  engine:close()
  engine:close()
  check.fails(function() offload.superpipeline { window = 2, ahead = 2 } end, "ahead: expected less than window")
end)

check.finish()
