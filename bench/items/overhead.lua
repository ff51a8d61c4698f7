--- The cost of one op on next to no data, from Lua and back, and of a small training step. One thread.
local ty = require "tycho"

local nn, optim = ty.nn, ty.optim
local one = { bare = 1 }

local function mlp()
  local model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
  local opt = optim.SGD(model:parameters(), { lr = 1e-3 })
  local x, target = ty.randn(8, 32), ty.randn(8, 32)
  local function step()
    local loss = ty.mse_loss(model(x), target)
    opt:step(loss)
    return loss
  end
  return step, model, x
end

local items = {
  { name = "add", bars = { peer = 4, limit = 1 / 2.5 }, work = one, setup = function()
    local a, b = ty.ones(1), ty.ones(1)
    return function() return a + b end
  end },
  { name = "add_recorded", bars = { peer = 4, limit = 1 / 2.5 }, work = one, setup = function()
    local w, b = ty.ones(1):requires_grad_(), ty.ones(1)
    return function() return w + b end
  end },
  { name = "mul_in_place", bars = { peer = 1 }, work = one, setup = function()
    local a = ty.ones(1)
    return function() return a:mul_(1.0) end
  end },
  { name = "view", bars = { peer = 1 }, work = one, setup = function()
    local a = ty.ones(1)
    return function() return a:unsqueeze(0) end
  end },
  { name = "matmul16", bars = { peer = 1 }, setup = function()
    local m = ty.ones(16, 16)
    return function() return m:matmul(m) end
  end },
  { name = "matmul16_recorded", bars = { peer = 1 }, setup = function()
    local m, w = ty.ones(16, 16), ty.ones(16, 16):requires_grad_()
    return function() return m:matmul(w) end
  end },
  { name = "add_backward", bars = { peer = 1 }, setup = function()
    local w, b = ty.ones(1):requires_grad_(), ty.ones(1)
    return function() (w + b):backward() end
  end },
  { name = "mlp_forward", bars = { peer = 1 }, setup = function()
    local _, model, x = mlp()
    return function() return ty.no_grad(model.forward, model, x) end
  end },
  { name = "mlp_step", bars = { peer = 5 }, setup = function() return (mlp()) end },
  { name = "mlp_step_compiled", bars = { peer = 10 },
    setup = function() return { compiled = ty.compile((mlp())) } end },
}

for _, item in ipairs(items) do
  item.threads = { 1 }
  item.peer = { item.name == "mlp_step_compiled" and "mlp_step" or item.name }
end
return items
