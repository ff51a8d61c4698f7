-- Fuyou: steps within the backward pass give the numbers of steps after it; the model of a step's time by hand, and
-- what it chooses against all choices.
local here = (arg and arg[0]:match ".*/" or "tests/modules/offload/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local llm = require "tycho.llm"
local offload = require "tycho.offload"
local fuyou = require "tycho.offload.fuyou"
local nn, optim = ty.nn, ty.optim

local function llama(tied)
  ty.manual_seed(4)
  return llm.Llama { vocab_size = 64, hidden_size = 64, intermediate_size = 128, num_hidden_layers = 4,
    num_attention_heads = 2, num_key_value_heads = 2, max_position_embeddings = 32, tie_word_embeddings = tied }
end

local function loss_of(model, i)
  ty.manual_seed(i)
  local ids = ty.randint(0, 64, { 4, 17 })
  return nn.cross_entropy(model(ids:narrow(1, 0, 16)):reshape(64, -1), ids:narrow(1, 1, 16):reshape(-1))
end

local function plan(place, o)
  o = o or {}
  o.probe = 65536
  return { parameters = place, moments = place, activations = place, smallest = 512, in_flight = 1 << 18,
    policy = offload.fuyou(o) }
end

local function train(model, planned, make)
  local optimizer = (make or function(m) return optim.AdamW(m, { lr = 1e-2 }) end)(model)
  local engine = planned and offload.engine(model, optimizer, planned)
  local losses = {}
  for i = 1, 4 do
    if engine then losses[i] = engine:step(loss_of, model, i)
    else
      ty.scope(function()
        local l = loss_of(model, i)
        optimizer:step(l)
        losses[i] = l:item()
      end)
    end
  end
  if engine then engine:close() end
  return losses, model:parameters(), optimizer.steps
end

check.test("the numbers of steps after the backward pass", function()
  for _, make in ipairs { false, function(m) return optim.SGD(m, { lr = 0.1, momentum = 0.9 }) end,
    function(m) return optim.Adafactor(m, { lr = 1e-2, schedule = function(n) return 1 / (1 + n) end }) end } do
    for _, tied in ipairs { true, false } do
      local losses, parameters, steps = train(llama(tied), nil, make or nil)
      for _, o in ipairs { { activations = "model" }, { activations = "swap" }, { activations = "again" },
        { window = 1, ahead = 0 }, { window = 4, ahead = 2 } } do
        for _, place in ipairs(make and { "host" } or { "host", "file" }) do
          local theirs, others, count = train(llama(tied), plan(place, o), make or nil)
          check.equal({ theirs, count }, { losses, steps }, place)
          local differ = 0
          for i, p in ipairs(parameters) do differ = differ + (p:equal(others[i]) and 0 or 1) end
          check.equal(differ, 0, "parameters that differ")
        end
      end
    end
  end
end)

check.test("moments come as those before them are written, in the same room", function()
  local losses = train(llama(false))
  for _, slow in ipairs { false, true } do
    local model = llama(false)
    local planned = plan("host", { activations = "swap" })
    planned.parameters, planned.in_flight, planned.moments = "device", 8192, "file"
    local engine = offload.engine(model, optim.AdamW(model, { lr = 1e-2 }), planned)
    local store, largest, most, early = engine.stores.file, 0, 0, 0
    for _, unit in ipairs(engine.units) do
      local bytes = 0
      for _, p in ipairs(unit.params) do bytes = bytes + 2 * p:nbytes() end
      largest = math.max(largest, bytes)
    end
    if slow then
      function store.done() return false end -- a disk that is never ready before somebody waits for it
    else
      function store.done(self, transfer) return true end -- and one that is
    end
    local advance = engine.advance
    function engine.advance(self)
      advance(self)
      local bytes, coming = 0, 0
      for _, known in pairs(self.of) do
        for _, cell in pairs(known.moments) do
          bytes = bytes + (cell.state == "away" and 0 or cell.nbytes)
          coming = coming + (cell.state == "coming" and cell.nbytes or 0)
        end
      end
      most, early = math.max(most, bytes), math.max(early, coming)
    end
    for i = 1, 4 do check.equal(engine:step(loss_of, model, i), losses[i]) end
    check.ok(most <= largest + planned.in_flight, ("%d bytes of moments, of %d"):format(most, largest))
    check.ok(early > 0 and (slow or early > largest // 2), early .. " bytes on their way")
    engine:close()
  end
end)

check.test("units step while the backward pass goes on", function()
  local model = llama(false)
  local planned = plan "host"
  local before, most = planned.policy.before_backward, 0
  function planned.policy.before_backward(engine, unit, at)
    before(engine, unit, at)
    local n = 0
    for _ in pairs(engine.updated) do n = n + 1 end
    most = math.max(most, n)
  end
  local engine = offload.engine(model, optim.AdamW(model, { lr = 1e-2 }), planned)
  engine:step(loss_of, model, 1)
  check.ok(most >= 4, most .. " units had stepped when the last one began") -- the head and all layers but the first
  for _, p in ipairs(model:parameters()) do check.equal(p.grad, nil) end
  engine:close()
end)

check.test("the time of a step by hand", function()
  local units = { { seconds = 1, bytes = 10 }, { seconds = 2, bytes = 30 } }
  local o = { forward = 3, backward = 6, out = 1, back = 2, write = 10, read = 20 }
  -- Forward: 1 + 40 / 10 of the disk; backward: computing.
  check.close(fuyou.predict(units, {}, o), 5 + 6, 1e-12)
  -- The second again: forward 3 of computing, backward 6 + 2.
  check.close(fuyou.predict(units, { [2] = true }, o), 3 + 8, 1e-12)
  check.close(fuyou.predict(units, { [1] = true, [2] = true }, o), 3 + 9, 1e-12)
  o.write = 4
  check.close(fuyou.predict(units, {}, o), 11 + 6, 1e-12)
  check.equal(fuyou.choose(units, o), { [2] = true }) -- 3.5 + 8; the first costs more for each byte
  o.write, o.read = 1e9, 1e9
  check.equal(fuyou.choose(units, o), {}, "with a disk that is fast enough nothing is computed again")
end)

check.test("what is chosen, against all choices", function()
  ty.manual_seed(0)
  local draw = ty.rand(400):tolist()
  local function number()
    return table.remove(draw)
  end
  for round = 1, 20 do
    local units, equal = {}, round % 2 == 0
    local seconds, bytes = number(), number()
    for i = 1, 7 do
      units[i] = equal and { seconds = seconds, bytes = bytes } or { seconds = seconds, bytes = bytes * i }
    end
    local o = { forward = 7 * seconds, backward = 14 * seconds, out = number(), back = number(), write = number(),
      read = number() }
    local best = math.huge
    for mask = 0, 127 do
      local again = {}
      for i = 1, 7 do again[i] = mask >> (i - 1) & 1 == 1 end
      best = math.min(best, fuyou.predict(units, again, o))
    end
    local again, predicted = fuyou.choose(units, o)
    check.close(fuyou.predict(units, again, o), predicted, 1e-12)
    check.ok(equal and math.abs(predicted - best) < 1e-9 or predicted <= 1.15 * best + 1e-9,
      ("%g, the best is %g"):format(predicted, best))
  end
end)

check.test("what may not be", function()
  local model = llama(false)
  check.fails(function()
    offload.engine(model, optim.AdamW(model, { clip_norm = 1 }), plan "host")
  end, "it steps within the backward pass")
  check.fails(function() offload.fuyou { activations = "both" } end, 'expected "model" or "swap" or "again"')
  check.fails(function() offload.fuyou { probe = 1 } end, "probe")
end)

check.finish()
