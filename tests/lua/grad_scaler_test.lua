-- optim.GradScaler, on the CPU and, where there is one, on a GPU.
local here = arg and arg[0]:match ".*/" or "tests/lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local nn, optim = ty.nn, ty.optim

local devices = { "cpu" }
if ty.cuda.count() > 0 then devices[2] = "cuda" end

local optimizers = {
  sgd = function(p, o) return optim.SGD(p, { lr = 0.1, momentum = 0.9, dampening = 0.2, clip_norm = o.clip_norm }) end,
  adamw = function(p, o)
    return optim.AdamW(p, { lr = 1e-2, clip_norm = o.clip_norm, clip_value = o.clip_value, ema = o.ema })
  end,
  adam8 = function(p, o) return optim.Adam(p, { lr = 1e-2, bits = 8, clip_norm = o.clip_norm }) end,
  lion = function(p, o) return optim.Lion(p, { lr = 1e-2, clip_norm = o.clip_norm }) end,
  nadam = function(p, o) return optim.NAdam(p, { lr = 1e-2, clip_norm = o.clip_norm, ema = o.ema }) end,
}

-- Some steps; o.bad: those whose loss is infinite. Without a scaler they are not taken at all.
local function train(device, make, o)
  ty.manual_seed(3)
  local model = nn.Sequential(nn.Linear(12, 64), nn.GELU(), nn.Linear(64, 80), nn.Linear(80, 5)):to(device)
  local opt = make(model:parameters(), o)
  local scaler = o.scaled and optim.GradScaler { interval = o.interval or 2000 }
  local norms = {}
  local function step(x, y, weight)
    local loss = nn.cross_entropy(model(x), y) * weight
    if scaler then return scaler:step(opt, loss), loss end
    return opt:step(loss), loss
  end
  if o.compile then step = ty.compile(step) end
  for i = 1, 8 do
    ty.manual_seed(100 + i)
    local x, y = ty.randn(8, 12):to(device), ty.randint(0, 5, { 8 }):to(device)
    local bad = o.bad and o.bad[i]
    if scaler or not bad then
      local norm = step(x, y, ty.tensor(bad and math.huge or 1.0, { device = device }))
      if ty.is_tensor(norm) and o.clip_norm and not bad then norm = norm:item() end
      if not bad and o.clip_norm then norms[#norms + 1] = norm end
    end
  end
  local all = {}
  for i, p in ipairs(model:parameters()) do all[i] = p:detach():reshape(-1):tolist() end
  return all, norms, scaler, opt
end

for _, device in ipairs(devices) do
  for name, make in pairs(optimizers) do
    check.test(("scaled and not, %s on %s"):format(name, device), function()
      check.close(train(device, make, { scaled = true }), train(device, make, {}), 1e-6)
      local bad = { [1] = true, [2] = true, [5] = true } -- left out: Adam's corrections do not count them
      for _, clip_norm in ipairs { 0, 0.5 } do
        local expected, norms = train(device, make, { bad = bad, clip_norm = clip_norm })
        for _, compile in ipairs { false, true } do
          local got, scaled_norms = train(device, make,
            { scaled = true, bad = bad, clip_norm = clip_norm, compile = compile })
          check.close(got, expected, 2e-5, compile and "compiled" or "plain")
          if clip_norm > 0 then check.close(scaled_norms, norms, 1e-4) end
        end
      end
    end)
  end

  check.test("the factor, on " .. device, function()
    local make = optimizers.adamw
    local _, _, scaler, opt = train(device, make, { scaled = true, bad = { [1] = true, [4] = true }, interval = 3 })
    check.equal(scaler:get_scale(), 65536.0 / 4 * 2) -- 1 bad, 2 and 3 good, 4 bad, 5 to 7 good: it grows, 8 good
    check.equal(scaler:state_dict(), { scale = 32768.0, good = 1 })
    check.equal(opt.steps, 8)
    check.equal(opt:state_dict().state["0"].step, 6)
    local other = optim.GradScaler()
    other:load_state_dict(scaler:state_dict())
    check.equal(other:get_scale(), 32768.0)
    check.equal(other:scale(ty.tensor(2.0, { device = device })):item(), 65536.0)
    scaler:load_state_dict { scale = 8, good = 2 }
    check.equal(scaler:state_dict(), { scale = 8.0, good = 2 })
  end)

  check.test("cut elements and averages, on " .. device, function()
    local make = optimizers.adamw
    check.close(train(device, make, { scaled = true, clip_value = 0.01 }), train(device, make, { clip_value = 0.01 }),
      1e-5)
    check.close(train(device, make, { scaled = true, clip_value = 0.01, bad = { true } }),
      train(device, make, { clip_value = 0.01, bad = { true } }), 1e-5)
  end)

  check.test("f16 with small gradients, on " .. device, function()
    -- A loss so small that its gradients are zeros in f16.
    local function weight_after(scaler)
      local w = ty.full({ 4, 4 }, 0.5):to(device):requires_grad_()
      local opt = optim.SGD({ w }, { lr = 1e6 })
      local loss = ty.autocast("f16", function() return ty.matmul(ty.ones(2, 4):to(device), w):sum() * 1e-8 end)
      if scaler then scaler:step(opt, loss) else opt:step(loss) end
      return w:detach():tolist()[1][1]
    end
    check.equal(weight_after(), 0.5)
    check.close(weight_after(optim.GradScaler()), 0.5 - 2e-2, 1e-2)
    check.equal(weight_after(optim.GradScaler { enabled = false }), 0.5)
  end)

  check.test("several optimizers and one factor, on " .. device, function()
    local a, b = ty.ones(3):to(device):requires_grad_(), ty.ones(3):to(device):requires_grad_()
    local first, second, scaler = optim.SGD({ a }, { lr = 1 }), optim.SGD({ b }, { lr = 1 }), optim.GradScaler()
    scaler:scale((a * 2 + b * math.huge):sum()):backward()
    scaler:step(first)
    scaler:step(second)
    scaler:update()
    check.equal({ a:tolist(), b:tolist(), scaler:get_scale() }, { { -1, -1, -1 }, { 1, 1, 1 }, 32768.0 })
  end)
end

check.test("wrong use", function()
  check.fails(function() optim.GradScaler { scale = 0 } end, "GradScaler: scale: expected a finite number > 0, got 0")
  check.fails(function() optim.GradScaler { factor = 1 } end, "GradScaler: ")
  local w = ty.ones(3):requires_grad_()
  check.fails(function() optim.GradScaler():step(optim.SGD { w }) end, "no loss was scaled before")
  check.fails(function() ty.sgd_({ ty.ones(3) }, { ty.ones(3) }, {}, {}, 0.1, { control = ty.ones(2) }) end,
    "sgd_: control: expected two f64 where the parameters are, got [2] f32 cpu")
end)

check.finish()
