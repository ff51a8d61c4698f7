-- A small training run for train_test.lua, which kills it: train_child.lua CHECKPOINT STEPS RESULT
local check = dofile(arg[0]:match ".*/" .. "check.lua")
local ty = require "tycho"
local nn, optim, train = ty.nn, ty.optim, ty.train

local path, steps, result = arg[1], math.tointeger(tonumber(arg[2])), arg[3]
ty.manual_seed(11)
local model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 2))
local opt = optim.AdamW(model:parameters(), { lr = 1e-2, clip_norm = 1, schedule = optim.cosine { steps = steps } })
local ema = optim.EMA(model, { decay = 0.9 })
local inputs = ty.randn(40, 6)
local dataset = ty.data.TensorDataset { x = inputs, y = inputs:select(1, 0):gt(0):to "i64" }
local loader = ty.data.DataLoader(dataset, { batch_size = 7, shuffle = true, seed = 3 })
local parts = { model = model, optimizer = opt, ema = ema, loader = loader }

local start, history = 0, {}
if train.has_checkpoint(path) then
  local values = train.load_checkpoint(path, parts)
  start, history = values.step, values.history
end
for step, batch in train.steps(loader, steps, { start = start, quiet = true }) do
  local loss = nn.cross_entropy(model(batch.x + ty.randn_like(batch.x) * 0.1), batch.y)
  opt:step(loss)
  ema:update()
  history[step] = loss:item()
  if step % 3 == 0 or step == steps then
    parts.step, parts.history = step, history
    train.save_checkpoint(path, parts)
  end
end
local state = ema.model:state_dict()
for name, tensor in pairs(model:state_dict()) do state["trained." .. name] = tensor end
state.history = ty.tensor(history, { dtype = "f64" })
ty.io.save_safetensors(result, state)
check.test("done", function() end)
