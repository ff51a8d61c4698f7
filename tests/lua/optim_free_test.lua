-- Optimizers that find their rate: DoG by hand, the others against the papers' algorithms in plain Lua, on lists of
-- numbers; what the papers prove; going on from a saved state; mistakes.
local check = dofile((arg[0]:match ".*/" or "./") .. "check.lua")
local ty = require "tycho"
local optim = ty.optim

local function leaf(list, dtype) return ty.tensor(list, { dtype = dtype or "f64" }):requires_grad_() end
local function flat(t) return t:detach():reshape(-1):tolist() end

-- Gradients of two parameters of 3 and 2 elements that depend on where they are and on the step.
local first = { { 0.5, -1.5, 2 }, { 0.1, -0.3 } }
local function slope(x, step, j) return x - math.sin(step * 0.7 + j) end

-- Makes the steps of `opt(list of leaves)`; reference(x, g, step) gets and returns all five elements.
local function compare(make, reference, steps, tolerance, rate)
  local list = { leaf(first[1]), leaf(first[2]) }
  local opt, x = make(list), { 0.5, -1.5, 2, 0.1, -0.3 }
  for step = 1, steps do
    local g = {}
    for j = 1, 5 do g[j] = slope(x[j], step, j) end
    list[1]:set_grad(ty.tensor({ g[1], g[2], g[3] }, { dtype = "f64" }))
    list[2]:set_grad(ty.tensor({ g[4], g[5] }, { dtype = "f64" }))
    opt:step()
    x = reference(x, g, step, rate and rate(step) or 1)
    local found = flat(list[1])
    table.move(flat(list[2]), 1, 2, 4, found)
    check.close(found, x, tolerance or 1e-10, "step " .. step)
  end
  return opt, list, x
end

local function map(fn, ...)
  local result, lists = {}, { ... }
  for j = 1, 5 do
    local at = {}
    for k, list in ipairs(lists) do at[k] = list[j] end
    result[j] = fn(table.unpack(at))
  end
  return result
end

local function total(list)
  local sum = 0.0
  for _, x in ipairs(list) do sum = sum + x end
  return sum
end

local zero = { 0, 0, 0, 0, 0 }

check.test("DoG by hand on three steps", function()
  local x = leaf { 3, 4 }
  local opt = optim.DoG({ x }, { first_distance = 0.1, eps = 0, averaging = 1 })
  -- The first distance is 0.1 (1 + 5), the rate 0.6 / 5.
  x:set_grad(ty.tensor({ 3, 4 }, { dtype = "f64" }))
  opt:step()
  check.close(flat(x), { 2.64, 3.52 }, 1e-14)
  -- It has moved by 0.6, no further than was thought; squares 25 + 144.
  x:set_grad(ty.tensor({ 0, 12 }, { dtype = "f64" }))
  opt:step()
  local second = 3.52 - 12 * 0.6 / 13
  check.close(flat(x), { 2.64, second }, 1e-14)
  -- Squares 25 + 144 + 120^2 = 14569.
  x:set_grad(ty.tensor({ -120, 0 }, { dtype = "f64" }))
  opt:step()
  local moved = math.sqrt(0.36 ^ 2 + (4 - second) ^ 2)
  check.ok(moved > 0.6)
  check.close(flat(x), { 2.64 + 120 * moved / math.sqrt(14569), second }, 1e-14)
  -- The average: all of the first, two thirds of the second and half of the third.
  local trained, middle = flat(x), { 2.64, (3.52 + 2 * second) / 3 }
  opt:eval()
  check.close(flat(x), { (middle[1] + trained[1]) / 2, (middle[2] + second) / 2 }, 1e-14)
  check.fails(function() opt:step() end, "DoG: step: the parameters are the averages; call train() first")
  opt:eval():train()
  check.equal(flat(x), trained, "the weights are back")
end)

check.test("DoG of two tensors is one vector, L-DoG two", function()
  for _, layers in ipairs { false, true } do
    local parts = layers and { { 1, 2, 3 }, { 4, 5 } } or { { 1, 2, 3, 4, 5 } }
    local start, far, squares = { 0.5, -1.5, 2, 0.1, -0.3 }, {}, {}
    compare(function(list) return optim.DoG(list, { first_distance = 0.01, layers = layers, weight_decay = 0.1 }) end,
      function(x, g, step)
        g = map(function(a, b) return a + 0.1 * b end, g, x)
        local new = {}
        for k, part in ipairs(parts) do
          local moved, size = 0, 0
          squares[k] = squares[k] or 1e-8
          for _, j in ipairs(part) do
            moved, size = moved + (x[j] - start[j]) ^ 2, size + start[j] ^ 2
            squares[k] = squares[k] + g[j] ^ 2
          end
          far[k] = step == 1 and 0.01 * (1 + math.sqrt(size)) or math.max(far[k], math.sqrt(moved))
          for _, j in ipairs(part) do new[j] = x[j] - far[k] / math.sqrt(squares[k]) * g[j] end
        end
        return new
      end, 12)
  end
end)

local function warm(steps) return function(step) return math.min(1, step / steps) end end

check.test("D-Adaptation by the paper's Algorithm, decay, a schedule and the limit of growth", function()
  for _, growth in ipairs { math.huge, 1.5 } do
    local b1, b2, eps, decay, d = 0.9, 0.99, 1e-8, 0.1, 1e-3
    local m, v, s, r, held = zero, zero, zero, 0, false
    compare(function(list)
      return optim.DAdaptAdamW({ { params = { list[1] } }, { params = { list[2] } } }, { beta2 = b2, growth = growth,
        first_distance = d, weight_decay = decay, schedule = function(step) return warm(4)(step + 1) end })
    end, function(x, g, _, rate)
      local root = math.sqrt(b2)
      local product = total(map(function(gj, sj, vj) return gj * sj / (math.sqrt(vj) + eps) end, g, s, v))
      r = root * r + (1 - root) * d * rate * product
      m = map(function(mj, gj) return b1 * mj + (1 - b1) * d * rate * gj end, m, g)
      v = map(function(vj, gj) return b2 * vj + (1 - b2) * gj * gj end, v, g)
      s = map(function(sj, gj) return root * sj + (1 - root) * d * rate * gj end, s, g)
      local found = r / ((1 - root) * total(map(math.abs, s)))
      local new = map(function(xj, mj, vj) return xj * (1 - decay * d * rate) - mj / (math.sqrt(vj) + eps) end, x, m, v)
      held = held or found > growth * d
      d = math.max(d, math.min(found, growth * d))
      return new
    end, 60, 1e-9, warm(4))
    check.ok(d > 0.05, "the bound grows")
    check.equal(held, growth < 2)
  end
end)

check.test("Prodigy by the paper's Algorithm 4", function()
  local b1, b2, eps, decay, d = 0.9, 0.99, 1e-8, 0.1, 1e-3
  local m, v, s, r, start = zero, zero, zero, 0, { 0.5, -1.5, 2, 0.1, -0.3 }
  local opt = compare(function(list)
    return optim.Prodigy(list, { beta2 = b2, first_distance = d, weight_decay = decay,
      schedule = function(step) return warm(4)(step + 1) end })
  end, function(x, g, _, rate)
    local root = math.sqrt(b2)
    m = map(function(mj, gj) return b1 * mj + (1 - b1) * d * gj end, m, g)
    v = map(function(vj, gj) return b2 * vj + (1 - b2) * d * d * gj * gj end, v, g)
    r = root * r + (1 - root) * rate * d * d * total(map(function(gj, x0, xj) return gj * (x0 - xj) end, g, start, x))
    s = map(function(sj, gj) return root * sj + (1 - root) * rate * d * d * gj end, s, g)
    local new = map(function(xj, mj, vj)
      return xj * (1 - decay * d * rate) - rate * d * mj / (math.sqrt(vj) + d * eps)
    end, x, m, v)
    d = math.max(d, r / total(map(math.abs, s)))
    return new
  end, 60, 1e-9, warm(4))
  check.close(opt.groups[1].distance, d, 1e-10)
end)

-- |s|_1 |x_0 - x*|_inf >= <s, x_0 - x*> >= the sum of <g, x_0 - x> by convexity: what the bound rests on.
check.test("Prodigy's distance is a lower bound on convex functions, and comes near it", function()
  for _, kind in ipairs { "abs", "square" } do
    local goal = ty.tensor({ 3, -2, 0.5, 1 }, { dtype = "f64" })
    local x = leaf { 0, 0, 0, 0 }
    local opt = optim.Prodigy({ x })
    local last = 0
    for _ = 1, 400 do
      opt:step((x - goal)[kind](x - goal):sum())
      local now = opt.groups[1].distance
      check.ok(now >= last and now <= 3, ("the distance is %g, after %g"):format(now, last))
      last = now
    end
    check.ok(last > 0.3, ("%s: the distance found is %g of 3"):format(kind, last))
    check.ok((x - goal):abs():max():item() < 0.3, kind .. ": it comes there")
  end
end)

check.test("schedule-free: gradients between z and the average of all z", function()
  local b1, b2, eps, decay, lr, warmup = 0.8, 0.99, 1e-8, 0.1, 0.05, 5
  local z = { 0.5, -1.5, 2, 0.1, -0.3 }
  local v, all, weights = zero, {}, {}
  local opt, list, y = compare(function(list)
    return optim.ScheduleFree(list, { lr = lr, beta1 = b1, beta2 = b2, weight_decay = decay, warmup = warmup })
  end, function(x, g, step)
    local rate = lr * math.min(1, step / warmup)
    v = map(function(vj, gj) return b2 * vj + (1 - b2) * gj * gj end, v, g)
    z = map(function(zj, gj, vj, yj)
      return zj - rate * (gj / (math.sqrt(vj / (1 - b2 ^ step)) + eps) + decay * yj)
    end, z, g, v, x)
    all[step], weights[step] = z, rate * rate
    local mean = zero -- of all z, from the definition
    for k, past in ipairs(all) do
      mean = map(function(a, b) return a + weights[k] / total(weights) * b end, mean, past)
    end
    all.mean = mean
    return map(function(zj, xj) return (1 - b1) * zj + b1 * xj end, z, mean)
  end, 25)
  opt:eval()
  local found = flat(list[1])
  table.move(flat(list[2]), 1, 2, 4, found)
  check.close(found, all.mean, 1e-12, "eval() shows the average")
  check.fails(function() opt:step() end, "ScheduleFree: step: the parameters are the averages; call train() first")
  opt:train()
  found = flat(list[1])
  table.move(flat(list[2]), 1, 2, 4, found)
  check.close(found, y, 1e-12, "train() puts the weights back")
end)

check.test("Mechanic by the paper's Algorithm 1, over SGD with momentum", function()
  local betas, lambda, eps, s_init = { 0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999 }, 0.01, 1e-8, 1e-4
  local start, along, momentum = { 0.5, -1.5, 2, 0.1, -0.3 }, zero, zero
  local s, m, v, r = {}, {}, {}, {}
  for k = 1, 6 do s[k], m[k], v[k], r[k] = 0, 0, 0, 0 end
  local opt = compare(function(list)
    return optim.Mechanic(optim.SGD(list, { lr = 0.5, momentum = 0.9 }), { first_scale = s_init })
  end, function(x, g, step)
    momentum = step == 1 and g or map(function(a, b) return 0.9 * a + b end, momentum, g)
    local norm_g = math.sqrt(total(map(function(a) return a * a end, g)))
    local norm_x = math.sqrt(total(map(function(a) return a * a end, x)))
    local h = total(map(function(aj, gj, xj) return aj * (gj + lambda * total(s) * norm_g * xj / (norm_x + eps)) end,
      along, g, x))
    along = map(function(aj, uj) return aj - 0.5 * uj end, along, momentum)
    for k, beta in ipairs(betas) do
      m[k], v[k] = math.max(beta * m[k], math.abs(h)), beta ^ 2 * v[k] + h ^ 2
      r[k] = math.max(0, beta * r[k] - s[k] * h)
      s[k] = (s_init / 6 * m[k] + r[k]) / (math.sqrt(v[k]) + eps)
    end
    return map(function(x0, aj) return x0 + total(s) * aj end, start, along)
  end, 60, 1e-9)
  check.ok(opt.scale > 100 * s_init, "the scale grows")
  check.close(opt:rate(), 0.5 * opt.scale, 1e-12)
  check.equal(opt:state_bytes(), 3 * 5 * 8)
end)

local makers = {
  DAdaptAdamW = function(list) return optim.DAdaptAdamW(list, { first_distance = 1e-3 }) end,
  Prodigy = function(list) return optim.Prodigy(list, { first_distance = 1e-3, clip_norm = 1 }) end,
  DoG = function(list) return optim.DoG(list, { first_distance = 1e-2 }) end,
  ["DoG, layers"] = function(list) return optim.DoG(list, { first_distance = 1e-2, layers = true }) end,
  ScheduleFree = function(list) return optim.ScheduleFree(list, { lr = 0.1, warmup = 4 }) end,
  Mechanic = function(list) return optim.Mechanic(optim.AdamW(list, { lr = 1 }), { first_scale = 1e-4 }) end,
}

check.test("going on from a saved state is going on", function()
  for name, make in pairs(makers) do
    local function run(list, opt, from, to)
      for step = from, to do
        for i, p in ipairs(list) do
          local x, g = flat(p), {}
          for j = 1, #x do g[j] = slope(x[j], step, 3 * i + j) end
          p:set_grad(ty.tensor(g, { dtype = "f32" }))
        end
        opt:step()
      end
    end
    local whole = { leaf(first[1], "f32"), leaf(first[2], "f32") }
    local opt = make(whole)
    run(whole, opt, 1, 7)
    local path = os.tmpname()
    os.remove(path)
    local weights = { whole[1]:detach():clone(), whole[2]:detach():clone() }
    ty.train.save_checkpoint(path, { optimizer = opt, weights = weights })
    run(whole, opt, 8, 14)
    local part = { leaf(first[1], "f32"), leaf(first[2], "f32") }
    local again = make(part)
    local saved = ty.train.load_checkpoint(path, { optimizer = again })
    ty.no_grad(function()
      for i, p in ipairs(part) do p:copy_(saved.weights[i]) end
    end)
    run(part, again, 8, 14)
    for i, p in ipairs(part) do check.equal(flat(p), flat(whole[i]), name) end
    os.execute("rm -rf " .. path)
  end
end)

check.test("a parameter without a gradient rests; so does a group of rate 0", function()
  for name, make in pairs(makers) do
    local list = { leaf(first[1]), leaf(first[2]) }
    local opt = make(list)
    for _ = 1, 3 do
      list[1]:set_grad(ty.ones(3, { dtype = "f64" }))
      opt:step()
    end
    check.equal(flat(list[2]), first[2], name)
  end
  local list = { leaf(first[1]), leaf(first[2]) }
  local opt = optim.Prodigy { { params = { list[1] } }, { params = { list[2] }, lr = 0 } }
  for _ = 1, 3 do
    for i, p in ipairs(list) do p:set_grad(ty.ones(#first[i], { dtype = "f64" })) end
    opt:step()
  end
  check.equal(flat(list[2]), first[2])
end)

check.test("mistakes", function()
  local p, q = leaf(first[1]), leaf(first[2])
  check.fails(function() optim.DoG({ p }, { first_distance = 0 }) end,
    "DoG: first_distance: expected a finite number > 0, got 0")
  check.fails(function() optim.DAdaptAdamW({ p }, { growth = 0.5 }) end, "DAdaptAdamW: growth: expected a number >= 1")
  check.fails(function() optim.ScheduleFree({ p }, { beta1 = 0 }) end,
    "ScheduleFree: beta1: expected a number in (0, 1), got 0")
  check.fails(function() optim.Mechanic {} end, "Mechanic: optimizer: expected an optimizer, got ")
  check.fails(function() optim.Mechanic(optim.SGD { p }, { first_scale = 0 }) end,
    "Mechanic: first_scale: expected a finite number > 0, got 0")
  local opt = optim.DAdaptAdamW { { params = { p } }, { params = { q }, lr = 0.5 } }
  p:set_grad(ty.ones_like(p))
  q:set_grad(ty.ones_like(q))
  check.fails(function() opt:step() end, "DAdaptAdamW: lr: expected one rate for all groups (or 0), got 1 and 0.5")
  local state = optim.Mechanic(optim.SGD { p }):state_dict()
  state.scales = ty.zeros(2, { dtype = "f64" })
  check.fails(function() optim.Mechanic(optim.SGD { p }):load_state_dict(state) end,
    "Mechanic:load_state_dict: state.scales: expected 6 numbers, got 2")
end)

check.finish()
