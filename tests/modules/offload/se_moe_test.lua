-- A ring of experts: the numbers are those of the model in memory, no more experts are on the device than the ring has
-- slots, the model is itself again afterwards; and the simulated time adds up.
local here = (arg and arg[0]:match ".*/" or "tests/modules/offload/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local offload = require "tycho.offload"
local models = require "tycho.models"

local function mixture()
  ty.manual_seed(3)
  return models.Mixtral { vocab_size = 40, hidden_size = 32, intermediate_size = 64, num_hidden_layers = 3,
    num_attention_heads = 2, num_key_value_heads = 2, num_local_experts = 6, num_experts_per_tok = 2,
    max_position_embeddings = 32 }
end
local tokens = ty.randint(0, 40, { 1, 12 })

check.test("outputs, whatever the ring", function()
  local model = mixture()
  local wanted = ty.no_grad(function() return model(tokens) end)
  local one = ty.no_grad(function() return model(tokens:narrow(1, 0, 1)) end)
  for slots = 1, 7 do
    for _, ahead in ipairs { true, false } do
      for _, backend in ipairs { "auto", "threads" } do
        local ring = offload.expert_ring(model, { slots = slots, ahead = ahead, file = scratch.folder,
          backend = backend })
        for _ = 1, 2 do
          check.ok(ty.no_grad(function() return model(tokens) end):equal(wanted), slots .. " slots")
          check.ok(ty.no_grad(function() return model(tokens:narrow(1, 0, 1)) end):equal(one))
        end
        local c = ring.counters
        check.equal(c.loads, c.wanted + c.foretold)
        check.equal(c.loads, c.computed + c.discarded + c.evicted, "nothing is read in vain")
        check.ok(ahead == (c.foretold > 0), "foretold " .. c.foretold)
        check.equal(ring.bytes, 18 * 3 * 32 * 64 * 4)
        ring:close()
        ring:close()
        check.ok(ty.no_grad(function() return model(tokens) end):equal(wanted), "in memory again")
      end
    end
  end
end)

check.test("no more than the slots are on the device", function()
  local model = mixture()
  collectgarbage()
  collectgarbage()
  local before = ty.memory.stats().live
  local ring <close> = offload.expert_ring(model, { slots = 2, file = scratch.folder })
  local each = 3 * 32 * 64 * 4
  check.ok(math.abs(before - ty.memory.stats().live - 16 * each) < 20000)
  check.equal(ring.bytes, 18 * each)
  for _ = 1, 3 do ty.scope(function() ty.no_grad(function() model(tokens) end) end) end
  check.ok(math.abs(before - ty.memory.stats().live - 16 * each) < 20000)
  for _, p in ipairs(model.model.layers[1].block_sparse_moe.experts[1]:parameters()) do
    check.equal(p.device, "meta")
  end
end)

check.test("an error in an expert leaves the ring whole", function()
  local model = mixture()
  local wanted = ty.no_grad(function() return model(tokens) end)
  local ring = offload.expert_ring(model, { slots = 2, file = scratch.folder })
  local expert = model.model.layers[2].block_sparse_moe.experts[1]
  check.fails(function() expert(ty.zeros(2, 5)) end, "linear")
  check.ok(ty.no_grad(function() return model(tokens) end):equal(wanted))
  ring:close()
end)

-- A step of layers: tokens by expert, and what the layer before foretells.
local function made(loads, ahead)
  local layers = {}
  for l, load in ipairs(loads) do
    layers[l] = { load = load, score = load, ahead = ahead[l] and { { load = ahead[l], score = ahead[l] } } or {} }
  end
  return { experts = #loads[1], chosen = 1, steps = { { tokens = 1, layers = layers } } }
end

check.test("time, by hand", function()
  local rates = { base = 1, token = 0.5, link = 4, dense = 2 }
  local trace = made({ { 2, 2 }, { 0, 4 } }, { { 0, 4 } })
  -- Read from 2 to 6 and to 10; computed from 6 to 8 and 10 to 12; then dense to 14, the third read 10 to 14.
  local two = offload.simulate_ring(trace, { slots = 2, rates = rates })
  check.close(two.resident, 2 + 2 + 2 + 2 + 3, 1e-12)
  check.close(two.seconds, 14 + 3, 1e-12)
  check.close(two.speed, 11 / 17, 1e-12)
  -- Not foretold: read from 14 to 18.
  check.close(offload.simulate_ring(trace, { slots = 2, ahead = false, rates = rates }).seconds, 21, 1e-12)
  -- One slot: the second is read from 8 to 12 and computed to 14; the third is read until 18, behind dense's 16.
  check.close(offload.simulate_ring(trace, { slots = 1, rates = rates }).seconds, 21, 1e-12)
  -- Foretold wrongly: its slot is free when its layer begins, and the link was busy until then.
  local wrong = made({ { 2, 2 }, { 0, 4 } }, { { 3, 0 } })
  check.close(offload.simulate_ring(wrong, { slots = 2, rates = rates }).seconds, 14 + 4 + 3, 1e-12)
  -- Nothing to read, nothing to wait for.
  check.close(offload.simulate_ring(trace, { rates = { base = 1, token = 0.5, link = 0, dense = 2 } }).speed, 1, 1e-12)
  -- The rest of a layer comes by the link as well.
  local dense = offload.simulate_ring(trace, { slots = 2, rates = { base = 1, token = 0.5, link = 4, dense = 2,
    dense_link = 1 } })
  check.ok(dense.seconds > two.seconds)
end)

check.test("mistakes", function()
  local model = mixture()
  check.fails(function() offload.expert_ring(model, { slots = 0 }) end, "offload.expert_ring: slots")
  check.fails(function() offload.expert_ring(model, { file = "/no/such/folder" }) end, "there is no folder")
  check.fails(function() offload.expert_ring(ty.nn.Linear(2, 2)) end, "expected layers of experts")
  check.fails(function() offload.simulate_ring({}, {}) end, "offload.simulate_ring: trace")
  check.fails(function() offload.simulate_ring(made({ { 1 } }, {}), { rates = { base = 1 } }) end, "rates.token")
end)

check.finish()
