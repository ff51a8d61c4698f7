-- MemAscend: whichever of the savings are on, the losses, parameters and moments of the run in memory, bit for bit; a
-- step whose gradients are not finite is left out; buffers by hand, and never more than there are.
local here = (arg and arg[0]:match ".*/" or "tests/modules/offload/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local llm = require "tycho.llm"
local offload = require "tycho.offload"
local memascend = require "tycho.offload.memascend"
local Pool = require "tycho.offload.pool"
local nn, optim = ty.nn, ty.optim

local function llama()
  ty.manual_seed(4)
  return llm.Llama { vocab_size = 200, hidden_size = 64, intermediate_size = 128, num_hidden_layers = 3,
    num_attention_heads = 2, num_key_value_heads = 1, max_position_embeddings = 32 }:to "bf16"
end

local function loss_of(model, i, factor)
  ty.manual_seed(i)
  local ids = ty.randint(0, 200, { 4, 17 })
  local loss = nn.cross_entropy(model(ids:narrow(1, 0, 16)):reshape(64, -1):to "f32", ids:narrow(1, 1, 16):reshape(-1))
  return factor and loss * factor or loss
end

-- factors: by step, what the loss is multiplied with.
local function train(o, factors, watch)
  local model = llama()
  local optimizer = optim.AdamW(model, { lr = 1e-2 })
  offload.wide_states(optimizer)
  local engine, policy
  if o then
    local rest = { adaptive = o.adaptive, exact = o.exact, fused = o.fused }
    policy = offload.memascend(rest)
    engine = offload.engine(model, optimizer, { parameters = "file", moments = "file", file = scratch.folder,
      smallest = 512, in_flight = 1 << 16, direct = o.direct, policy = policy })
  end
  local losses = {}
  for i = 1, 4 do
    local factor = factors and factors[i]
    if engine then losses[i] = engine:step(loss_of, model, i, factor)
    else
      ty.scope(function()
        local l = loss_of(model, i, factor)
        losses[i] = l:item()
        if factor then return end -- left out
        optimizer:step(l)
      end)
    end
    if watch then watch(engine, policy, model) end
  end
  local stats = engine and engine:stats()
  if engine then engine:close() end
  return losses, model:parameters(), optimizer, stats, policy
end

local function differences(a, b)
  local differ = 0
  for i, p in ipairs(a) do differ = differ + (p:equal(b[i]) and 0 or 1) end
  return differ
end

check.test("the numbers of the run in memory, with any of the savings", function()
  local losses, parameters, optimizer = train()
  check.equal(optimizer.state[parameters[1]].exp_avg.dtype, "f32")
  for mask = 0, 15 do
    local o = { adaptive = mask & 1 ~= 0, exact = mask & 2 ~= 0, fused = mask & 4 ~= 0, direct = mask & 8 ~= 0 }
    local theirs, others, their_optimizer, stats, policy = train(o)
    local what = ("adaptive %s, exact %s, fused %s, direct %s"):format(o.adaptive, o.exact, o.fused, o.direct)
    check.equal(theirs, losses, what)
    check.equal(differences(parameters, others), 0, what .. ": parameters that differ")
    for i, p in ipairs(parameters) do
      local mine, its = optimizer.state[p], their_optimizer.state[others[i]]
      check.ok(mine.exp_avg:equal(its.exp_avg) and mine.exp_avg_sq:equal(its.exp_avg_sq), what .. ": moments " .. i)
    end
    for kind, pool in pairs(stats.pools) do
      check.ok(pool.most <= pool.bytes and pool.bytes <= pool.memory, kind .. ": no more than there is")
      check.equal(pool.memory, o.exact and pool.bytes or Pool.power(pool.bytes))
    end
    check.equal({ stats.pools.parameters ~= nil, stats.pools.moments ~= nil }, { true, o.adaptive })
    check.equal(policy.left_out, 0)
  end
end)

check.test("a step whose gradients are not finite is left out", function()
  for _, fused in ipairs { true, false } do
    for _, factor in ipairs { math.huge, 0 / 0, -math.huge } do
      local losses, parameters, optimizer = train(nil, { [2] = factor })
      local theirs, others, their_optimizer, _, policy = train({ fused = fused }, { [2] = factor },
        function(_, _, model) for _, p in ipairs(model:parameters()) do check.equal(p.grad, nil) end end)
      check.equal({ theirs[1], theirs[3], theirs[4] }, { losses[1], losses[3], losses[4] })
      check.equal(policy.left_out, 1)
      check.equal(differences(parameters, others), 0, "parameters that differ")
      check.equal(optimizer.state[parameters[1]].step, their_optimizer.state[others[1]].step)
    end
  end
end)

check.test("one pass says what operations say", function()
  ty.manual_seed(1)
  for _, dtype in ipairs { "f64", "f32", "f16", "bf16" } do
    for _, value in ipairs { 1.0, -65504.0, math.huge, -math.huge, 0 / 0 } do
      for _, at in ipairs { 0, 31, 40000, 69999 } do
        local x, y = ty.randn(70000):to(dtype), ty.randn(3):to(dtype)
        x:narrow(0, at, 1):fill_(value)
        check.equal(ty.finite_list({ y, x }):item(), memascend.finite_composed { y, x },
          ("%s %s at %d"):format(dtype, value, at))
      end
    end
  end
  local before = ty.memory.stats().live
  local x = ty.randn(1000000)
  ty.memory.reset_peak()
  local live = ty.memory.stats().live
  check.equal(ty.finite_list({ x }):item(), true)
  check.ok(ty.memory.stats().peak - live < 4096, "nothing is made")
  ty.memory.reset_peak()
  check.equal(memascend.finite_composed { x }, true)
  check.ok(ty.memory.stats().peak - live >= 3000000, "three tensors")
  x:free()
  check.ok(before <= live)
end)

check.test("buffers by hand", function()
  local function unit(...)
    local cells = {}
    for i, n in ipairs { ... } do cells[i] = { nbytes = n } end
    return { cells = cells }
  end
  local units = { unit(9000), unit(10, 10, 20), unit(10, 10, 20), unit(9000, 20) }
  check.equal(memascend.buffers(units, 1), { [9000] = 1, [10] = 2, [20] = 1 })
  check.equal(memascend.buffers(units, 2), { [9000] = 1, [10] = 4, [20] = 2 })
  check.equal(memascend.buffers(units, 4), { [9000] = 2, [10] = 4, [20] = 3 })
  check.equal(memascend.buffers(units, 2, true), { [9000] = 6 })
  table.insert(units[1].cells, units[4].cells[1]) -- a tied one is there once
  check.equal(memascend.buffers(units, 4), { [9000] = 2, [10] = 4, [20] = 3 })
  check.equal({ Pool.power(1), Pool.power(4096), Pool.power(4097) }, { 1, 4096, 8192 })
end)

check.test("a pool gives a part to one, and again when nobody has it", function()
  local pool = Pool.new({ [40] = 1, [5000] = 2 }, Pool.power)
  check.equal({ pool.bytes, pool.memory }, { 4096 + 2 * 8192, 32768 })
  local function like(n, dtype) return ty.empty({ n }, { dtype = dtype or "f32", device = "meta" }) end
  local a, b, c = pool:take(like(10)), pool:take(like(1500)), pool:take(like(1500))
  a:fill_(1)
  b:fill_(2)
  c:fill_(2)
  check.equal({ a:sum():item(), b:sum():item(), c:sum():item() }, { 10.0, 3000.0, 3000.0 })
  check.fails(function() pool:take(like(10)) end, "no buffer of 40 bytes is free, of a pool of 20480 bytes")
  local view = b:narrow(0, 0, 5)
  b:free()
  check.fails(function() pool:take(like(1500)) end, "no buffer")
  view:free()
  check.fails(function() pool:take(like(10000)) end, "no buffer of 40000 bytes")
  check.equal(pool:take(like(1000, "f64")):numel(), 1000)
  check.equal(pool.most, 40 + 6000 + 8000)
  a:fill_(5)
  local tier <close> = ty.core.tier_core.open(scratch.folder, "threads", true)
  tier:wait(tier:write(a, 0))
  tier:wait(tier:read(a:zero_(), 0))
  check.equal({ a:sum():item(), tier:stats().copied }, { 50.0, 0 }, "straight from the disk")
end)

check.test("the file is not in the kernel's memory as well", function()
  local _, _, _, through = train({ direct = false })
  local tier <close> = ty.core.tier_core.open(scratch.folder, "threads", false)
  tier:wait(tier:write(ty.ones(100000), 0))
  check.ok(tier:cached() >= 400000, "through the page cache: " .. tier:cached())
  check.equal(through.file.direct, false)
  local past <close> = ty.core.tier_core.open(scratch.folder, "threads", true)
  past:wait(past:write(ty.ones(100000), 0))
  check.ok(not past:stats().direct or past:cached() == 0, "past it: " .. past:cached())
end)

check.fails(function() offload.wide_states {} end, "wide_states: optimizer: expected one of ty.optim")
check.fails(function()
  local model = llama()
  offload.engine(model, optim.AdamW(model), { gradients = "host", policy = offload.memascend {} })
end, 'plan.gradients: expected "device"')
check.fails(function() offload.memascend { window = 0 } end, "window: expected an integer >= 1")
check.finish()
