-- ty.compile and ty.fuse: the same numbers as without them, memory, errors, what changes between calls.
local here = arg and arg[0]:match ".*/" or "tests/lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local nn, optim = ty.nn, ty.optim
local program = ty.core.program

local function same(a, b, what)
  if a:shape_text() ~= b:shape_text() then error(what .. ": shapes differ", 2) end
  check.equal(ty.all(ty.logical_or(a:eq(b), ty.logical_and(a:ne(a), b:ne(b)))):item(), true, what)
end

function ty.Tensor.methods.shape_text(t) return t.dtype .. table.concat(t.shape, ",") end

-- Trains two copies, one of them compiled, and compares results and all state after every step. make(): a step
-- function of a batch, and a list of tensors to compare; batch(i): the arguments of call i.
local function train(what, steps, make, batch)
  local sides, results = {}, {}
  for side = 1, 2 do
    ty.manual_seed(7)
    local step, state = make()
    sides[side] = { step = side == 2 and ty.compile(step) or step, state = state, rng = ty.rng_state() }
  end
  for i = 1, steps do
    ty.rng_state { 99, 1000 * i }
    local arguments = table.pack(batch(i))
    for side, s in ipairs(sides) do
      ty.rng_state(s.rng)
      results[side] = table.pack(s.step(table.unpack(arguments, 1, arguments.n)))
      s.rng = ty.rng_state()
    end
    for k = 1, results[1].n do
      local a, b = results[1][k], results[2][k]
      if ty.is_tensor(a) then same(a:detach(), b, ("%s: result %d of step %d"):format(what, k, i)) end
    end
    check.equal(sides[2].rng, sides[1].rng, what .. ": the generator after step " .. i)
  end
  for k, t in ipairs(sides[1].state()) do
    same(t:detach(), sides[2].state()[k]:detach(), ("%s: tensor %d of the state"):format(what, k))
  end
  return sides[2].step
end

local function mlp(width)
  return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
end

local function classes(i) return ty.randn(8, 32) + i, ty.randint(0, 10, { 8 }) end

local function state_of(model)
  return function()
    local list = model:parameters()
    for _, buffer in model:named_buffers() do list[#list + 1] = buffer end
    return list
  end
end

check.test("an MLP with SGD", function()
  local step = train("mlp", 8, function()
    local model = mlp(32)
    local optimizer = optim.SGD(model:parameters(), { lr = 0.05, momentum = 0.9, nesterov = true, weight_decay = 0.01 })
    return function(x, y)
      local loss = ty.cross_entropy(model(x), y)
      loss:backward()
      optimizer:step()
      optimizer:zero_grad()
      return loss
    end, state_of(model)
  end, classes)
  local stats = program.stats(step)
  check.equal(#stats, 1, "programs")
  check.equal(stats[1].arena < stats[1].temporaries, true, "temporaries share memory")
end)

check.test("AdamW with a schedule, clipping, dropout and EMA", function()
  train("adamw", 9, function()
    local model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.3), nn.LayerNorm(64), nn.Linear(64, 10))
    local optimizer = optim.AdamW(model:parameters(), { lr = 0.01, weight_decay = 0.1, clip_norm = 0.5,
      schedule = optim.cosine { steps = 9, warmup = 3 } })
    local ema = optim.EMA(model)
    return function(x, y)
      local loss = ty.cross_entropy(model(x), y)
      local norm = optimizer:step(loss)
      ema:update()
      return loss, type(norm) == "number" and ty.tensor(norm, { dtype = "f64" }) or norm
    end, function()
      local list = model:parameters()
      for _, p in ipairs(ema.model:parameters()) do list[#list + 1] = p end
      for _, p in ipairs(model:parameters()) do list[#list + 1] = p.grad end
      return list
    end
  end, classes)
end)

check.test("clip_grad_norm and optim.Scheduler", function()
  train("clip", 6, function()
    local model = mlp(32)
    local optimizer = optim.SGD(model:parameters(), { lr = 0.1 })
    local scheduler = optim.Scheduler(optimizer, optim.exponential(0.5))
    return function(x, y)
      ty.cross_entropy(model(x), y):backward()
      local norm = optim.clip_grad_norm(model:parameters(), 0.3)
      optimizer:step()
      optimizer:zero_grad()
      scheduler:step()
      return type(norm) == "number" and ty.tensor(norm, { dtype = "f64" }) or norm
    end, state_of(model)
  end, classes)
end)

check.test("a convolutional net with batch norm and pooling", function()
  train("conv", 5, function()
    local model = nn.Sequential(nn.Conv2d(3, 8, 3, { padding = 1 }), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
      nn.Conv2d(8, 8, 3, { padding = 1, groups = 2 }), nn.SiLU(), nn.Flatten(), nn.Linear(8 * 8 * 8, 10))
    local optimizer = optim.Adam(model:parameters(), { lr = 0.01 })
    return function(x, y)
      local loss = ty.cross_entropy(model(x), y)
      optimizer:step(loss)
      return loss
    end, state_of(model)
  end, function() return ty.randn(4, 3, 16, 16), ty.randint(0, 10, { 4 }) end)
end)

check.test("attention with checkpoint", function()
  train("attention", 5, function()
    local embedding, norm, project, head = nn.Embedding(20, 32), nn.RMSNorm(32), nn.Linear(32, 96), nn.Linear(32, 20)
    local parameters = {}
    for _, m in ipairs { embedding, norm, project, head } do
      for _, p in ipairs(m:parameters()) do parameters[#parameters + 1] = p end
    end
    local optimizer = optim.AdamW(parameters, { lr = 0.01 })
    local function attend(x)
      local qkv = project(norm(x)):reshape(2, 12, 3, 4, 8):permute(2, 0, 3, 1, 4)
      local y = ty.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], { causal = true })
      return ty.dropout(y:transpose(1, 2):reshape(2, 12, 32), 0.2)
    end
    return function(ids, target)
      local x = embedding(ids)
      x = x + ty.checkpoint(attend, x)
      local loss = ty.cross_entropy(head(x):reshape(-1, 20), target:reshape(-1))
      optimizer:step(loss)
      return loss
    end, function() return parameters end
  end, function() return ty.randint(0, 20, { 2, 12 }), ty.randint(0, 20, { 2, 12 }) end)
end)
check.finish()
