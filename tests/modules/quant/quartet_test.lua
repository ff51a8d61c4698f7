-- Quartet: the forward product against its parts, the mean of the backward products, the mask, policies.
local here = (arg and arg[0]:match ".*/" or "tests/modules/quant/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local quant = require "tycho.quant"
local nn = ty.nn

local hadamard, linear, quartet = quant.hadamard, quant.linear, quant.quartet

-- QuEST's quantizer by its definition: blocks rotated, the scale the power of 2 below 2.9225 / 6 of their standard
-- deviation, nearest codes. Tables of rows; besides the values what was not clipped.
local function quest(x)
  local rotated = hadamard.rotate(x, hadamard.matrix(32))
  local blocks, mask = rotated:reshape(-1, 32):tolist(), {}
  local codes = { 0, 0.5, 1, 1.5, 2, 3, 4, 6 }
  for i, row in ipairs(blocks) do
    local sum, squares = 0, 0
    for _, v in ipairs(row) do sum, squares = sum + v, squares + v * v end
    local deviation = math.sqrt(squares / 32 - (sum / 32) ^ 2)
    local scale = 2.0 ^ math.floor(math.log(2.92247856 / 6 * deviation + 1e-8, 2))
    mask[i] = {}
    for j, v in ipairs(row) do
      local a, best = math.abs(v) / scale, 1
      for k = 2, 8 do
        if math.abs(codes[k] - a) < math.abs(codes[best] - a) then best = k end
      end
      row[j], mask[i][j] = (v < 0 and -1 or 1) * codes[best] * scale, a < 6 and 1 or 0
    end
  end
  return ty.tensor(blocks, { dtype = "f32" }):reshape(x.shape), ty.tensor(mask, { dtype = "f32" }):reshape(x.shape)
end

local function draw(rows, inputs, outputs)
  local x, w, g = ty.randn(rows, inputs), ty.randn(outputs, inputs), ty.randn(rows, outputs)
  x:select(1, 3):mul_(6) -- a large feature
  return x, w, g
end

check.test("the forward product is that of QuEST's values", function()
  ty.manual_seed(1)
  local x, w = draw(5, 64, 32)
  local want = ty.linear((quest(x)), (quest(w)))
  check.close(linear.linear(x, w, quartet.policy()):tolist(), want:tolist(), 1e-4, "product")
end)

-- The gradients without the second rounding: of the products of the quantized operands, masked and rotated back.
local function exact(x, w, g)
  local qx, mx = quest(x)
  local qw, mw = quest(w)
  local h = hadamard.matrix(32)
  return hadamard.unrotate(ty.matmul(g, qw) * mx, h), hadamard.unrotate(ty.matmul(g:transpose(0, 1), qx) * mw, h), mx
end

check.test("the mean of the backward products is the exact product, and nears it as 1 over the root of the draws",
  function()
    ty.manual_seed(2)
    local x, w, g = draw(40, 64, 32) -- 40 rows are no whole blocks
    local want_x, want_w, mask = exact(x, w, g)
    check.ok(mask:sum():item() < mask:numel(), "something is clipped")
    x:requires_grad_()
    w:requires_grad_()
    local sums = { ty.zeros_like(want_x), ty.zeros_like(want_w) }
    local policy, draws, off = quartet.policy(), 0, {}
    local function wrong(sum, want) return ((sum / draws - want):norm() / want:norm()):item() end
    for _, until_draws in ipairs { 25, 400 } do
      while draws < until_draws do
        ty.scope(function()
          local grads = ty.grad({ linear.linear(x, w, policy) }, { x, w }, { grad_outputs = { g } })
          sums[1]:add_(grads[1])
          sums[2]:add_(grads[2])
        end)
        draws = draws + 1
      end
      off[#off + 1] = { wrong(sums[1], want_x), wrong(sums[2], want_w) }
    end
    for i, name in ipairs { "input", "weight" } do
      check.ok(off[2][i] < 0.05, ("%s gradient: off by %.4f after 400 draws"):format(name, off[2][i]))
      local ratio = off[1][i] / off[2][i] -- 4 by the law
      check.ok(ratio > 2.8 and ratio < 5.6, ("%s gradient: a ratio of %.2f of the errors"):format(name, ratio))
    end
  end)

check.test("rounding to nearest in the backward pass has another mean", function()
  ty.manual_seed(3)
  local x, w, g = draw(32, 64, 32)
  local given = quartet.policy()
  local nearest = linear.policy { forward = { hadamard = "fixed", x = given.forward.x, w = given.forward.w },
    input = { g = {}, w = {} }, weight = { g = {}, x = {} } }
  local want = exact(x, w, g)
  x:requires_grad_()
  local grad = ty.grad({ linear.linear(x, w, nearest) }, { x }, { grad_outputs = { g } })[1]
  check.ok(((grad - want):norm() / want:norm()):item() > 0.05, "biased")
end)

check.test("every policy, on a model that learns", function()
  for _, name in ipairs { "quartet", "nearest", "stochastic", "luq", "fp8", "bf16" } do
    ty.manual_seed(4)
    local model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
    local x = ty.randn(64, 32)
    local y = x:tanh()
    local report = linear.attach(model, quartet.policy(name))
    check.equal(report.share, 1.0, name .. ": all in the format")
    local optimizer = ty.optim.AdamW(model:parameters(), { lr = 1e-2, weight_decay = 0 })
    local first, last
    for _ = 1, 60 do
      ty.scope(function()
        local loss = nn.mse_loss(model(x), y)
        last = loss:item()
        first = first or last
        optimizer:step(loss)
      end)
    end
    check.ok(last < 0.35 * first, ("%s: loss %.3f to %.3f"):format(name, first, last))
  end
  local model = nn.Sequential(nn.Linear(32, 64))
  check.equal(quartet.attach(model).layers, 1, "attach")
end)

check.test("what is refused", function()
  check.fails(function() quartet.policy "fp3" end, 'quant.quartet.policy: name: expected "quartet" or "nearest"')
  check.fails(function() quartet.attach({}) end, "quant.quartet.attach: model: expected a module")
end)

check.finish()
