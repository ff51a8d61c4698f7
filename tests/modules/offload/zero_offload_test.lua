-- ZeRO-Offload: the numbers of the same arithmetic in memory, with the update at once and delayed by a step; four bytes
-- of a parameter on the device at most; threads end.
local here = (arg and arg[0]:match ".*/" or "tests/modules/offload/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local offload = require "tycho.offload"
local nn, optim = ty.nn, ty.optim

local function make(width, depth)
  ty.manual_seed(2)
  local model = nn.Sequential(nn.Linear(16, width), nn.GELU())
  for _ = 1, depth or 1 do model:append(nn.Linear(width, width)):append(nn.GELU()) end
  return model:append(nn.Linear(width, 4))
end

local function loss_of(model, i)
  ty.manual_seed(i)
  local x = ty.randn(8, 16):to(model[1].weight.dtype)
  return nn.cross_entropy(model(x):to "f32", ty.randint(0, 4, { 8 }))
end

-- The same arithmetic with everything in memory: half-precision copies of f32 parameters. from: the step from which
-- the update of a step comes after the gradients of the next one.
local function reference(name, settings, dtype, steps, from)
  local model = make(32)
  local masters = {}
  for i, p in ipairs(model:parameters()) do masters[i] = p:detach():clone() end
  model:to(dtype)
  local optimizer, losses, waiting = optim[name](masters, settings), {}, nil
  local function update(grads)
    for i, p in ipairs(masters) do p:set_grad(grads[i]) end
    optimizer:step()
    ty.no_grad(function() for i, p in ipairs(model:parameters()) do p:copy_(masters[i]) end end)
  end
  for i = 1, steps do
    local loss = loss_of(model, i)
    loss:backward()
    losses[i] = loss:item()
    local grads = {}
    for k, p in ipairs(model:parameters()) do grads[k] = p.grad:to "f32" end
    model:zero_grad()
    if waiting then update(waiting) end
    waiting = nil
    if i - 1 >= from then waiting = grads else update(grads) end
  end
  if waiting then update(waiting) end
  return losses, masters
end

check.test("the numbers of the same arithmetic in memory", function()
  for _, row in ipairs { { "AdamW", { lr = 1e-2 } }, { "SGD", { lr = 0.1, momentum = 0.9 } },
    { "Lion", { lr = 1e-3, clip_norm = 0.5 } } } do
    for _, dtype in ipairs { "bf16", "f16" } do
      for _, from in ipairs { 99, 2, 0 } do
        local wanted, masters = reference(row[1], row[2], dtype, 6, from)
        local model = make(32)
        local trainer = offload.zero_offload(model, { optimizer = row[1], settings = row[2], dtype = dtype,
          delayed = from < 99, from = from })
        local losses = {}
        for i = 1, 6 do losses[i] = trainer:step(loss_of, model, i) end
        trainer:close()
        trainer:close()
        check.equal(losses, wanted, ("%s, %s, delayed from %d"):format(row[1], dtype, from))
        local differ = 0
        for i, p in ipairs(model:parameters()) do differ = differ + (p:detach():equal(masters[i]) and 0 or 1) end
        check.equal(differ, 0, "parameters that differ")
        check.equal(model[1].weight.dtype, "f32")
      end
    end
  end
end)

check.test("two bytes of a parameter on the device between steps, and gradients that leave as they come", function()
  local model = make(128, 16)
  local count = model:count_parameters()
  collectgarbage()
  collectgarbage()
  local without = ty.memory.stats().live - 4 * count
  local trainer = offload.zero_offload(model, { settings = { lr = 1e-3 } })
  for i = 1, 2 do trainer:step(loss_of, model, i) end
  collectgarbage()
  collectgarbage()
  local live = (ty.memory.stats().live - without) / count
  check.ok(live < 2.2, live .. " bytes of a parameter")
  ty.memory.reset_peak()
  trainer:step(loss_of, model, 3)
  local peak = (ty.memory.stats().peak - without) / count
  check.ok(peak < 4, peak .. " bytes of a parameter at most")
  check.equal(trainer:host_bytes(), 12 * count)
  trainer:close()
end)

check.test("errors", function()
  local model = make(32)
  local trainer = offload.zero_offload(model)
  local first = trainer:step(loss_of, model, 1)
  check.fails(function() trainer:step(function() loss_of(model, 2):backward() error "no batch" end) end, "no batch")
  check.fails(function() trainer:step(function() return 1 end) end, "ZeroOffload:step: fn: expected a tensor, got 1")
  check.ok(trainer:step(loss_of, model, 1) < first, "it goes on")
  trainer:close()
  check.fails(function() offload.zero_offload(model, { optimizer = "Sgd" }) end, "expected a name in ty.optim")
  check.fails(function() offload.zero_offload(model, { dtype = "f32" }) end, 'dtype: expected "bf16" or "f16"')
  check.fails(function() offload.zero_offload(model, { from = -1 }) end, "from: expected an integer >= 0")
  model[1].weight:requires_grad_(false)
  check.fails(function() offload.zero_offload(model) end, "expected parameters on the CPU that require gradients")
end)

check.finish()
