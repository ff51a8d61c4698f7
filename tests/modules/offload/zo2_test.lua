-- ZO2: the numbers are those of MeZO in memory to the last bit, whatever the model shares and wherever it is; a step
-- moves every byte once each way; what is on the device is a unit, and those on their way.
local here = (arg and arg[0]:match ".*/" or "tests/modules/offload/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local offload = require "tycho.offload"
local llm = require "tycho.llm"
local nn, optim = ty.nn, ty.optim

local tokens = ty.randint(0, 96, { 2, 12 })

local function llama(tied, layers)
  ty.manual_seed(1)
  return llm.Llama { vocab_size = 96, hidden_size = 32, intermediate_size = 64, num_hidden_layers = layers or 4,
    num_attention_heads = 4, num_key_value_heads = 4, max_position_embeddings = 32, tie_word_embeddings = tied }
end

local function loss_of(model)
  return function()
    return nn.cross_entropy(model(tokens:narrow(1, 0, 11)):reshape(-1, 96), tokens:narrow(1, 1, 11):reshape(-1))
  end
end

local settings = { lr = 1e-3, eps = 1e-2, seed = 5, weight_decay = 0.01 }

-- Losses and parameters after some steps of MeZO; plan: of ZO2, false: in memory.
local function train(make, plan, loss, change)
  local model = make()
  if change then change(model) end
  local opt = optim.MeZO(model, settings)
  local losses = {}
  local zo2 = plan and offload.zo2(model, opt, plan)
  local fn = (loss or loss_of)(model)
  ty.manual_seed(2)
  for i = 1, 4 do losses[i] = (zo2 or opt):step(fn) end
  losses[5] = ty.rand(1):item()
  if zo2 then zo2:close() end
  return losses, model:parameters(), zo2
end

local function compare(make, plan, loss, change)
  local losses, parameters = train(make, false, loss, change)
  local other, theirs = train(make, plan, loss, change)
  check.equal(other, losses)
  for i, p in ipairs(parameters) do check.ok(p:equal(theirs[i]), "parameter " .. i) end
end

check.test("the numbers of MeZO in memory", function()
  for _, tied in ipairs { false, true } do
    for _, plan in ipairs { { ahead = 0, in_flight = 0 }, { ahead = 1 }, { ahead = 3 }, { parameters = "file" } } do
      compare(function() return llama(tied) end, plan)
    end
  end
end)

check.test("frozen parameters stay, and are not written", function()
  local function freeze(model)
    for name, p in model:named_parameters() do if not name:find "mlp" then p:requires_grad_(false) end end
  end
  compare(function() return llama(true) end, {}, nil, freeze)
end)

-- A block that is called twice, one that is never called, a parameter around all, dropout.
local Odd = nn.module()
function Odd:init()
  self.scale = nn.Parameter(ty.randn(8))
  self.first = nn.Linear(8, 8)
  self.blocks = nn.ModuleList { nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8) }
  self.dropout = nn.Dropout(0.5)
end
function Odd:forward(x)
  x = self.first(x) * self.scale
  x = self.dropout(self.blocks[1](x):tanh()) + self.scale
  x = self.blocks[2](x):tanh()
  x = self.blocks[1](x) * self.scale
  return ty.linear(x, self.first.weight)
end

check.test("shared blocks, parameters around others, blocks without a call, dropout", function()
  ty.manual_seed(3)
  local x = ty.randn(4, 8)
  for ahead = 0, 2 do
    compare(function()
      ty.manual_seed(4)
      return Odd()
    end, { ahead = ahead }, function(model) return function() return model(x):square():mean() end end)
  end
end)

check.test("every byte once each way in a step; bounded by units, whatever the depth", function()
  local most = {}
  for _, layers in ipairs { 3, 9 } do
    local model = llama(false, layers)
    local bytes = 0
    for _, p in ipairs(model:parameters()) do bytes = bytes + p:nbytes() end
    local zo2 = offload.zo2(model, optim.MeZO(model, settings), { ahead = 0, in_flight = 0 })
    local fn, peak = loss_of(model), 0
    local policy = zo2.engine.policy
    local before = policy.before_forward
    function policy.before_forward(engine, unit, at)
      local resident = 0
      for _, p in ipairs(model:parameters()) do
        if p.device ~= "meta" then resident = resident + p:nbytes() end
      end
      peak = math.max(peak, resident)
      before(engine, unit, at)
    end
    zo2:step(fn)
    zo2:step(fn)
    local counted = zo2:stats().host.counters.parameters
    local written, read = counted.written, counted.read
    zo2:step(fn)
    counted = zo2:stats().host.counters.parameters
    check.equal({ counted.written - written, counted.read - read }, { bytes, bytes })
    most[#most + 1] = peak
    zo2:close()
  end
  check.equal(most[1], most[2])
  local block = 0
  for _, p in ipairs(llama(false, 1):get "model.layers.0":parameters()) do block = block + p:nbytes() end
  check.ok(most[1] <= block + 32 * 4, ("%d of %d"):format(most[1], block))
end)

check.test("memory that tensors take in a step does not grow with depth", function()
  local peaks, block = {}, nil
  for i, layers in ipairs { 3, 12 } do
    ty.manual_seed(1)
    local model = llm.Llama { vocab_size = 96, hidden_size = 128, intermediate_size = 256, num_hidden_layers = layers,
      num_attention_heads = 4, num_key_value_heads = 4, max_position_embeddings = 32 }
    block = 0
    for _, p in ipairs(model:get "model.layers.0":parameters()) do block = block + p:nbytes() end
    local zo2 = offload.zo2(model, optim.MeZO(model, settings), { ahead = 0, in_flight = 0 })
    zo2:step(loss_of(model))
    collectgarbage()
    collectgarbage()
    local live = ty.memory.stats("cpu").live
    ty.memory.reset_peak "cpu"
    zo2:step(loss_of(model))
    peaks[i] = ty.memory.stats("cpu").peak - live
    zo2:close()
  end
  -- Neither blocks nor the stream between them, of which each leaves a piece.
  check.ok(peaks[2] - peaks[1] < 0.01 * block, ("%d, %d of %d"):format(peaks[1], peaks[2], block))
end)

check.test("flush, run: what is looked at between steps is whole", function()
  local one, two = llama(true), llama(true)
  local opt = optim.MeZO(one, settings)
  local zo2 = offload.zo2(two, optim.MeZO(two, settings))
  for _ = 1, 2 do
    check.equal(zo2:step(loss_of(two)), opt:step(loss_of(one)))
    local wanted = ty.no_grad(function() return one(tokens) end)
    check.ok(zo2:run(function() return two(tokens) end):equal(wanted))
  end
  zo2:close()
  zo2:close()
  check.ok(ty.no_grad(function() return two(tokens) end):equal(ty.no_grad(function() return one(tokens) end)))
end)

check.test("an error within a step leaves the model as it was, and steps go on", function()
  local model = llama(true)
  local zo2 = offload.zo2(model, optim.MeZO(model, settings))
  zo2:step(loss_of(model))
  local before = zo2:run(function() return model(tokens) end)
  zo2:step(loss_of(model))
  zo2:flush()
  local whole = zo2:run(function() return model(tokens) end)
  check.ok(not whole:equal(before))
  local layer = model:get "model.layers.2"
  local calls = 0
  local forward = layer.mlp.forward
  rawset(layer.mlp, "forward", function(...)
    calls = calls + 1
    if calls == 2 then error "broken" end
    return forward(...)
  end)
  check.fails(function() zo2:step(loss_of(model)) end, "broken")
  rawset(layer.mlp, "forward", nil)
  -- Units before the broken one were moved and put back: that is exact but for rounding.
  local after = zo2:run(function() return model(tokens) end)
  check.ok((after - whole):abs():max():item() < 1e-5)
  check.ok(zo2:step(loss_of(model)) < 10)
  zo2:close()
end)

check.test("wrong arguments", function()
  local model = llama(true)
  local opt = optim.MeZO(model, settings)
  check.fails(function() offload.zo2(model, optim.SGD(model)) end, "offload.zo2: optimizer: expected an optim.MeZO")
  check.fails(function() offload.zo2(model, opt, { parameters = "device" }) end,
    'parameters: expected "host" or "file", got "device"')
  check.fails(function() offload.zo2(model, opt, { window = 1 }) end, "window")
  local zo2 = offload.zo2(model, opt)
  check.fails(function() zo2:step(function() return 3 end) end, "ZO2:step: fn(): expected a tensor, got 3")
  local loss, short = loss_of(model), 0
  zo2:step(loss)
  check.fails(function()
    zo2:step(function()
      local value
      ("x"):gsub("x", function() value = loss() end)
      return value
    end)
  end, "within a function of C")
  check.fails(function() zo2:step(function() return ty.autocast("bf16", loss) end) end, "expected ty.autocast around")
  check.equal(ty.autocast_dtype(), false)
  check.fails(function()
    zo2:step(function()
      short = short + 1
      return model.model.embed_tokens(tokens):sum()
    end)
  end, "expected the units of the first step in their order, got the end in place of")
  zo2:close()
  check.fails(function() zo2:step(loss) end, "it is closed")
end)

check.finish()
