--- The cost of one op on next to no data on a GPU, with and without waiting for it, and of a step of a small network.
local ty = require "tycho"

local nn, optim = ty.nn, ty.optim

return function(on)
  local width, batch = 64, 64
  local function mlp()
    local model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
      nn.Linear(width, width)):to(on.device)
    local opt = optim.SGD(model:parameters(), { lr = 1e-3 })
    local x, target = on.randn { batch, width }, on.randn { batch, width }
    return function()
      local loss = ty.mse_loss(model(x), target)
      opt:step(loss)
      return loss
    end
  end
  local arguments = { batch = batch, width = width }
  return {
    { name = "mlp_step", bars = { peer = 5 }, peer = { "mlp_step", arguments }, setup = mlp },
    { name = "mlp_step_compiled", bars = { peer = 1 }, peer = { "mlp_step_graph", arguments },
      setup = function() return { compiled = ty.compile(mlp()) } end },
    { name = "add", bars = {}, peer = { "add" }, setup = function()
      local a, b = on.ones { 1 }, on.ones { 1 }
      return function() return a + b end
    end },
    { name = "add_recorded", bars = {}, peer = { "add_recorded" }, setup = function()
      local w, b = on.ones({ 1 }):requires_grad_(), on.ones { 1 }
      return function() return w + b end
    end },
    { name = "add_and_wait", bars = {}, peer = { "add_and_wait" }, setup = function()
      local a, b = on.ones { 1 }, on.ones { 1 }
      return function() return (a + b):item() end
    end },
  }
end
