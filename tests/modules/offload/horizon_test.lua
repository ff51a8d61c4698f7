-- Horizon-LM: losses, gradients (by the parameters that they make) and moments of the run in memory, with dropout and
-- autocast; two units on the device at most, and bytes that do not grow with the depth.
local here = (arg and arg[0]:match ".*/" or "tests/modules/offload/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local llm = require "tycho.llm"
local offload = require "tycho.offload"
local nn, optim = ty.nn, ty.optim

local Block = nn.module "Block"
function Block:init(width)
  self.up, self.down, self.drop = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Dropout(0.2)
end
function Block:forward(x, scale) return x + self.drop(self.down(self.up(x):gelu())) * scale, x end

local Net = nn.module "Net" -- blocks with two results, one of them an argument; a parameter that two blocks share
function Net:init(width, depth, apart)
  self.first, self.blocks = nn.Linear(8, width), nn.ModuleList()
  for _ = 1, depth do self.blocks:append(Block(width)) end
  if not apart then self.blocks[2].up.weight = self.blocks[1].up.weight end
  self.last = nn.Linear(width, 4)
end
function Net:forward(x)
  x = self.first(x)
  local skipped
  for _, block in ipairs(self.blocks) do x, skipped = block(x, 0.5) end
  return self.last(x + skipped * 0.1)
end

local function net_loss(model, i)
  ty.manual_seed(i)
  return nn.cross_entropy(model(ty.randn(32, 8)), ty.randint(0, 4, { 32 }))
end

local function llama(depth)
  return llm.Llama { vocab_size = 64, hidden_size = 64, intermediate_size = 128, num_hidden_layers = depth,
    num_attention_heads = 2, num_key_value_heads = 1, max_position_embeddings = 32, tie_word_embeddings = true }
end
local function llama_loss(model, i)
  ty.manual_seed(i)
  local ids = ty.randint(0, 64, { 4, 17 })
  return nn.cross_entropy(model(ids:narrow(1, 0, 16)):reshape(64, -1), ids:narrow(1, 1, 16):reshape(-1))
end

local function plan(place, o, more)
  local p = { parameters = place, gradients = place, moments = place, activations = place, smallest = 512,
    in_flight = 1 << 16, policy = offload.horizon(o) }
  for key, value in pairs(more or {}) do p[key] = value end
  return p
end

local function train(make, loss, planned, make_optimizer)
  ty.manual_seed(3)
  local model = make()
  local optimizer = (make_optimizer or function(m) return optim.AdamW(m, { lr = 1e-2 }) end)(model)
  local engine = planned and offload.engine(model, optimizer, planned)
  local losses = {}
  for i = 1, 3 do
    if engine then losses[i] = engine:step(loss, model, i)
    else
      ty.scope(function()
        local l = loss(model, i)
        optimizer:step(l)
        losses[i] = l:item()
      end)
    end
  end
  local stats = engine and engine:stats()
  if engine then engine:close() end
  return losses, model:parameters(), stats
end

local function same(make, loss, planned, what, make_optimizer)
  local losses, parameters = train(make, loss, nil, make_optimizer)
  local theirs, others, stats = train(make, loss, planned, make_optimizer)
  check.equal(theirs, losses, what)
  local differ = 0
  for i, p in ipairs(parameters) do differ = differ + (p:equal(others[i]) and 0 or 1) end
  check.equal(differ, 0, what .. ": parameters that differ")
  return stats
end

check.test("the numbers of the run in memory", function()
  local function net() return Net(32, 4) end
  for _, place in ipairs { "host", "file" } do
    for ahead = 0, 2 do
      local what = ("%s, %d ahead"):format(place, ahead)
      same(net, net_loss, plan(place, { ahead = ahead }), "dropout, shared parameters, " .. what)
      same(function() return llama(3) end, llama_loss, plan(place, { ahead = ahead }), "Llama, " .. what)
    end
  end
  same(net, net_loss, plan("host", nil, { activations = "device" }), "inputs stay")
  same(function() return Net(32, 4, true) end, function(m, i) return ty.autocast("bf16", net_loss, m, i) end,
    plan "host", "bf16")
  same(net, net_loss, plan("host", nil, { gradients = "device" }), "clipped", function(m)
    return optim.SGD(m, { lr = 0.1, momentum = 0.9, clip_norm = 0.1 })
  end)
end)

check.test("a unit keeps its inputs alone", function()
  local stats = same(function() return llama(3) end, llama_loss, plan "host", "Llama")
  -- Of each of three steps: the stream into three layers, what is added to it in the second and third, and the tokens.
  check.equal(stats.host.counters.activations.written, 3 * (5 * 4 * 64 * 64 + 8 * 4 * 17))
end)

check.test("two units on the device, whatever the depth", function()
  local function most(depth, planned)
    ty.manual_seed(3)
    local model = llama(depth)
    local engine = offload.engine(model, optim.AdamW(model, { lr = 1e-2 }), planned)
    local resident = 0
    local before = planned.policy.before_backward
    function planned.policy.before_backward(self, unit, at)
      before(self, unit, at)
      local there, n = {}, 0
      for _, one in ipairs(engine.units) do
        for _, cell in ipairs(one.cells) do
          if cell.state == "here" or cell.state == "coming" then there[one] = true end
        end
      end
      for _ in pairs(there) do n = n + 1 end
      resident = math.max(resident, n)
    end
    engine:step(llama_loss, model, 1)
    collectgarbage()
    collectgarbage()
    local small = 0
    for _, p in ipairs(model:parameters()) do if p.device == "cpu" then small = small + 5 * p:nbytes() end end
    local live = ty.memory.stats().live
    ty.memory.reset_peak()
    engine:step(llama_loss, model, 2)
    local peak = ty.memory.stats().peak - live
    engine:close()
    return peak, resident
  end
  local waited = { in_flight = 0 } -- how much is on its way out is otherwise a matter of time
  local six, units = most(6, plan("host", nil, waited))
  local twenty = most(20, plan("host", nil, waited))
  check.ok(units <= 3, units .. " units") -- one is the embedding, which the head has just used
  check.ok(twenty < 1.02 * six, ("%d bytes at 20 layers, %d at 6"):format(twenty, six))
end)

check.test("a collector that the program stopped stays so", function()
  local sweep, weak = ty.core.tier_core.sweep, setmetatable({ ty.ones(1) }, { __mode = "v" })
  collectgarbage "stop"
  sweep()
  check.ok(weak[1] ~= nil, "stopped")
  collectgarbage "restart"
  sweep()
  sweep()
  check.equal(weak[1], nil)
end)

check.test("an error in the second pass", function()
  ty.manual_seed(3)
  local model = Net(32, 4)
  local engine = offload.engine(model, optim.SGD(model, { lr = 0.1 }), plan "host")
  local wanted = train(function() return Net(32, 4) end, net_loss, nil,
    function(m) return optim.SGD(m, { lr = 0.1 }) end)
  local calls = 0
  rawset(model.blocks[3].down, "forward", function(self, x)
    calls = calls + 1
    if calls == 2 then error "not again" end
    return getmetatable(self).forward(self, x)
  end)
  check.fails(function() engine:step(net_loss, model, 1) end, "not again")
  rawset(model.blocks[3].down, "forward", nil)
  check.equal(engine:step(net_loss, model, 1), wanted[1])
  check.equal(engine:step(net_loss, model, 2), wanted[2])
  engine:close()
  check.fails(function() offload.horizon { ahead = -1 } end, "ahead: expected an integer >= 0")
end)

check.finish()
