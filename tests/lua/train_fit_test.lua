-- train.fit: the loop under the fits of all domains.
local here = (arg and arg[0]:match ".*/") or "tests/lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local nn, train, data = ty.nn, ty.train, ty.data
local folder = os.tmpname()
os.remove(folder)

local points = data.TensorDataset(ty.no_grad(function()
  ty.manual_seed(5)
  local x = ty.randn(64, 3)
  return { x = x, y = x:matmul(ty.tensor { { 1.0 }, { -2.0 }, { 0.5 } }) + 0.25 }
end))

local function model()
  ty.manual_seed(1)
  return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.1), nn.Linear(8, 1))
end

local function loader() return data.DataLoader(points, { batch_size = 16, shuffle = true, seed = 2 }) end

local function options(more)
  local o = { steps = 12, lr = 1e-2, warmup = 2, quiet = true, average = 0.9,
    loss = function(m, batch) return nn.mse_loss(m(batch.x), batch.y) end }
  for key, value in pairs(more or {}) do o[key] = value end
  return o
end

local function weights(m)
  local list = {}
  for _, p in ipairs(m:parameters()) do list[#list + 1] = p:flatten():tolist() end
  return list
end

check.test("a run that was stopped twice goes on bit for bit, with its average", function()
  local whole = model()
  local losses, averaged = train.fit(whole, loader(), options())
  check.equal(#losses, 12)
  check.ok(losses[12] < losses[1])
  local parts, again, average
  for i, pause in ipairs { 5, 8, 12 } do
    parts = model()
    again, average = train.fit(parts, loader(), options { folder = folder .. "/c", pause = pause, save_every = 3,
      resume = i > 1 })
  end
  check.equal(again, losses)
  check.equal(weights(parts), weights(whole))
  check.equal(weights(average), weights(averaged))
  check.ok(weights(averaged)[1][1] ~= weights(whole)[1][1])
end)

check.test("it is the loop written by hand", function()
  local by_fit = model()
  local _, averaged = train.fit(by_fit, loader(), options())
  local by_hand = model() -- which sets the generator that dropout draws from
  local batches = loader()
  local ema = ty.optim.EMA(by_hand, { decay = 0.9 })
  local matrices, rest = {}, {}
  for _, p in ipairs(by_hand:parameters()) do table.insert(p.ndim > 1 and matrices or rest, p) end
  local opt = ty.optim.AdamW({ { params = matrices, weight_decay = 0.1 }, { params = rest, weight_decay = 0 } },
    { lr = 1e-2, beta2 = 0.95, clip_norm = 1, schedule = ty.optim.cosine { steps = 12, warmup = 2, final = 0.1 } })
  by_hand:train()
  for _ = 1, 12 do
    local batch = batches:next()
    nn.mse_loss(by_hand(batch.x), batch.y):backward()
    opt:step()
    opt:zero_grad()
    ema:update()
  end
  check.equal(weights(by_fit), weights(by_hand))
  check.close(weights(averaged), weights(ema.model), 1e-6)
end)

check.test("evaluation sees the average, and training goes on in training mode", function()
  local steps, modes = {}, {}
  local m = model()
  train.fit(m, loader(), options { every = 5, evaluate = function(step, averaged)
    steps[#steps + 1], modes[#modes + 1] = step, averaged.training
    m:eval()
    return { score = 1 }
  end, loss = function(given, batch)
    check.ok(given.training)
    return nn.mse_loss(given(batch.x), batch.y), { extra = 2 }
  end })
  check.equal(steps, { 5, 10, 12 })
  check.equal(modes, { false, false, false })
end)

check.test("frozen weights, other optimizers, own backward passes", function()
  local m = model()
  m[1]:requires_grad_(false)
  local before = weights(m)
  local losses = train.fit(m, loader(), { steps = 3, quiet = true, warmup = 0,
    optimizer = function(given, o) return ty.optim.SGD(given:parameters(), { lr = o.lr, schedule = o.schedule }) end,
    backward = function(given, next_batch)
      local batch = next_batch()
      local loss = nn.mse_loss(given(batch.x), batch.y)
      loss:backward()
      return { loss = loss:item() }
    end })
  check.equal(#losses, 3)
  check.equal(weights(m)[1], before[1])
  check.ok(weights(m)[3][1] ~= before[3][1])
end)

check.test("batches from a function: as from a loader", function()
  local source, by_loader = loader(), model()
  local losses = train.fit(by_loader, loader(), options())
  local by_function = model() -- which seeds what dropout draws
  local again = train.fit(by_function, function() return source:next() end, options { folder = folder .. "/drawn" })
  check.equal(again, losses)
  check.equal(weights(by_function), weights(by_loader))
end)

check.test("no steps leave a model as it is", function()
  local m, before = model(), weights(model())
  local losses, averaged = train.fit(m, loader(), options { steps = 0 })
  check.equal(losses, {})
  check.equal(weights(m), before)
  check.equal(weights(averaged), before)
end)

check.test("its log says what the run is", function()
  train.fit(model(), loader(), options { log = folder .. "/log", pause = 5, title = "short" })
  local about = ty.io.load_json(folder .. "/log/run.json")
  check.equal({ about.steps, about.stop, about.start, about.title }, { 12, 5, 0, "short" })
  check.equal({ about.options.lr, about.options.average, about.options.loss }, { 1e-2, 0.9 })
end)

check.test("mistakes are errors", function()
  local m = model()
  check.fails(function() train.fit(3, loader(), options()) end, "train.fit: model: expected a module, got 3")
  check.fails(function() train.fit(m, points, options()) end, "train.fit: loader: expected a DataLoader or a function")
  check.fails(function() train.fit(m, loader(), { steps = 3 }) end, "one of the options loss and backward, got none")
  check.fails(function() train.fit(m, loader(), options { backward = print }) end, "got both")
  check.fails(function() train.fit(m, loader(), options { average = 1 }) end, "average: expected a number in [0, 1)")
  check.fails(function() train.fit(m, loader(), options { resume = true }) end, "resume needs the folder")
  check.fails(function() train.fit(m, loader(), options { resume = true, folder = folder .. "/none" }) end,
    "nothing to resume")
  check.fails(function() train.fit(m, loader(), options { stesp = 3 }) end, "stesp")
end)

os.execute("rm -rf '" .. folder .. "'")
check.finish()
