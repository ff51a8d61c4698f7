-- ty.autocast against the same in f32, on the CPU and, where there is one, on a GPU.
local here = arg and arg[0]:match ".*/" or "tests/lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local nn, optim = ty.nn, ty.optim

local devices = { "cpu" }
if ty.cuda.count() > 0 then devices[2] = "cuda" end

check.test("which dtype ops compute in", function()
  local x, h, d = ty.randn(4, 4), ty.randn(4, 4):to "bf16", ty.randn(4, 4):to "f64"
  local function dtypes()
    return { ty.matmul(x, h).dtype, ty.linear(x, x).dtype, ty.einsum("ij,jk->ik", x, x).dtype, x:exp().dtype,
      h:exp().dtype, h:sum().dtype, h:softmax(0).dtype, (h + x).dtype, (h * 2).dtype, h:relu().dtype, d:exp().dtype,
      ty.matmul(d, d).dtype, ty.mse_loss(h, h).dtype, (h ^ 2).dtype, ty.layer_norm(h).dtype,
      ty.conv2d(ty.randn(1, 2, 4, 4), ty.randn(3, 2, 3, 3)).dtype,
      ty.conv1d(ty.randn(1, 2, 4), ty.randn(3, 2, 3)).dtype,
      ty.scaled_dot_product_attention(ty.randn(1, 1, 2, 4), ty.randn(1, 1, 2, 4), ty.randn(1, 1, 2, 4)).dtype,
      ty.randint(0, 5, { 3 }):sum().dtype, ty.matmul(ty.arange(4), ty.arange(4)).dtype }
  end
  check.equal(ty.autocast("bf16", dtypes), { "bf16", "bf16", "bf16", "f32", "f32", "f32", "f32", "f32", "bf16", "bf16",
    "f64", "f64", "f32", "f32", "f32", "bf16", "bf16", "bf16", "i64", "i64" })
  check.equal(dtypes(), { "f32", "f32", "f32", "f32", "bf16", "bf16", "bf16", "f32", "bf16", "bf16", "f64", "f64",
    "bf16", "bf16", "bf16", "f32", "f32", "f32", "i64", "i64" })
end)

check.test("the scope", function()
  check.equal(ty.autocast_dtype(), false)
  check.equal({ ty.autocast("f16", function(...) return ty.autocast_dtype(), ... end, 1, 2) }, { "f16", 1, 2 })
  check.equal(ty.autocast("f16", function() return ty.autocast(false, ty.autocast_dtype) end), false)
  check.equal(ty.autocast("f16", function()
    ty.autocast("bf16", ty.autocast_dtype)
    return ty.autocast_dtype()
  end), "f16")
  check.fails(function() ty.autocast("bf16", error, "inside") end, "inside")
  check.equal(ty.autocast_dtype(), false)
  check.fails(function() ty.autocast("f64", print) end, 'autocast: expected "bf16", "f16", "f32" or false, got f64')
  check.equal(ty.autocast("bf16", ty.autocast, "f32", ty.autocast_dtype), false) -- "f32" is without
  check.fails(function() ty.autocast(print) end, 'got function')
  check.fails(function() ty.autocast "bf16" end, "autocast: argument 2: expected a function, got nothing")
  local x = ty.ones(3) -- in place nothing is cast
  ty.autocast("f16", function() x:exp_():add_(ty.ones(3)) end)
  check.equal(x.dtype, "f32")
end)

for _, device in ipairs(devices) do
  check.test("gradients have the dtypes of the parameters, and the values of f32: " .. device, function()
    for dtype, tolerance in pairs { bf16 = 0.05, f16 = 0.01 } do
      ty.manual_seed(1)
      local model = nn.Sequential(nn.Conv2d(2, 4, 3, { padding = 1, bias = false }), nn.BatchNorm2d(4), nn.SiLU(),
        nn.Flatten(),
        nn.Linear(64, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 5)):to(device)
      local x, y = ty.randn(6, 2, 4, 4):to(device), ty.randint(0, 5, { 6 }):to(device)
      local function run()
        local loss = nn.cross_entropy(model(x), y)
        loss:backward()
        local grads = {}
        for i, p in ipairs(model:parameters()) do
          check.equal(p.grad.dtype, "f32")
          grads[i] = p.grad:to "cpu"
          p:set_grad(nil)
        end
        return loss, grads
      end
      local loss, grads = run()
      local half_loss, half_grads = ty.autocast(dtype, run)
      check.equal(half_loss.dtype, "f32")
      check.close(half_loss:item(), loss:item(), tolerance)
      local different = false
      for i, g in ipairs(grads) do
        local off = ty.norm(g - half_grads[i]):item() / ty.norm(g):item()
        check.equal(off < 2 * tolerance, true, ("gradient %d: off by %g"):format(i, off))
        different = different or off > 0
      end
      check.equal(different, true, "it was computed in " .. dtype)
    end
  end)
end

check.test("weights are cast once while they stay the same", function()
  local w = ty.randn(64, 64):requires_grad_()
  local x = ty.randn(8, 64)
  local function allocations(f)
    ty.memory.fail_at(0)
    f()
    return ty.memory.allocation_count()
  end
  ty.autocast("bf16", function()
    local function pass() return ty.linear(x, w) end
    local first = allocations(pass)
    local second = allocations(pass)
    check.equal(second < first, true, "the second pass finds the cast")
    -- both passes go back through the same cast, one after the other
    pass():sum():backward()
    pass():sum():backward()
    ty.no_grad(function() w:mul_(2) end)
    local y = pass()
    check.close(y:to("f32"):tolist(), ty.autocast(false, ty.linear, x, w):tolist(), 0.3)
    check.equal(ty.no_grad(pass).requires_grad, false)
    check.equal(pass().requires_grad, true)
  end)
  check.close(w.grad:tolist(), (x:sum { 0 } * 2):unsqueeze(0):expand(64, 64):tolist(), 0.1)
end)

-- Steps of training on a device; the losses and what the compiled function does besides.
local function train(device, dtype, compile, outside)
  ty.manual_seed(3)
  local model = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 5)):to(device)
  local opt = optim.AdamW(model:parameters(), { lr = 1e-2 })
  local function step(x, y)
    local function forward() return nn.cross_entropy(model(x), y) end
    local loss = outside and forward() or ty.autocast(dtype, forward)
    opt:step(loss)
    return loss
  end
  if compile then step = ty.compile(step) end
  local losses = {}
  local function loop()
    for i = 1, 6 do
      ty.manual_seed(100 + i)
      local x, y = ty.randn(8, 12), ty.randint(0, 5, { 8 })
      losses[i] = step(x:to(device), y:to(device)):item()
    end
  end
  if outside then ty.autocast(dtype, loop) else loop() end
  return losses
end

for _, device in ipairs(devices) do
  check.test("inside and around ty.compile: " .. device, function()
    local plain = train(device, "bf16")
    check.close(plain, train(device, false), 0.05)
    check.close(train(device, "bf16", true), plain, 1e-5)
    check.close(train(device, "bf16", false, true), plain, 1e-5)
    check.close(train(device, "bf16", true, true), plain, 1e-5)
  end)
end

check.test("compiled functions know whether they run under autocast", function()
  local f = ty.compile(function(x) return ty.matmul(x, x) end)
  local x = ty.randn(4, 4)
  for _ = 1, 3 do
    check.equal(f(x).dtype, "f32")
    check.equal(ty.autocast("bf16", f, x).dtype, "bf16")
    check.equal(ty.autocast("f16", f, x).dtype, "f16")
  end
end)

check.test("with checkpoint, and linear_cross_entropy", function()
  ty.manual_seed(2)
  local w, v = ty.randn(16, 8):requires_grad_(), ty.randn(5, 16):requires_grad_()
  local x, y = ty.randn(6, 8), ty.randint(0, 5, { 6 })
  local function run(through)
    local loss = ty.autocast("bf16", function()
      local h = through(function() return ty.linear(x, w):tanh() end)
      return ty.linear_cross_entropy(h, v, y)
    end)
    check.equal(loss.dtype, "f32")
    loss:backward()
    local grad = w.grad:tolist()
    w:set_grad(nil)
    return grad
  end
  check.equal(run(ty.checkpoint), run(function(f) return f() end))
end)

for _, device in ipairs(devices) do
  check.test("weights that lie transposed stay so, with the numbers of those that do not: " .. device, function()
    ty.manual_seed(3)
    local x, w, g = ty.randn(7, 40):to(device), ty.randn(40, 24):to(device), ty.randn(7, 24):to(device)
    local plain = w:transpose(0, 1):contiguous():requires_grad_()
    local turned = w:clone():requires_grad_()
    ty.autocast("bf16", function()
      local y, z = ty.linear(x, plain), ty.linear(x, turned:transpose(0, 1))
      check.equal(z.dtype, "bf16")
      check.equal(y:eq(z):all():item(), true)
      check.equal(ty.matmul(x, w):eq(ty.matmul(x, plain:transpose(0, 1))):all():item(), true)
      local want = ty.grad((y * g):sum(), { plain })[1]
      local grad = ty.grad((z * g):sum(), { turned }, { create_graph = true })[1]
      check.equal({ grad.dtype, grad:transpose(0, 1):eq(want):all():item() }, { "f32", true })
      ;(ty.linear(x, turned:transpose(0, 1)) * g):sum():backward()
      check.equal({ turned.grad:is_contiguous(), turned.grad:eq(grad):all():item() }, { true, true })
    end)
  end)
end

check.finish()
