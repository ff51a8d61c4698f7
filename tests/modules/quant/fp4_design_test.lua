-- The simulator: designs and policies, the cost against operations that a scalar version counts as it does them.
local here = (arg and arg[0]:match ".*/" or "tests/modules/quant/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local quant = require "tycho.quant"

local fp4, design = quant.fp4, quant.fp4_design

-- ---- a quantizer that counts ----

local magnitudes = { 0, 0.5, 1, 1.5, 2, 3, 4, 6 }

-- A counter, and operations that go through it.
local function counter()
  local c = { operations = 0 }
  local function one(f) return function(...)
    c.operations = c.operations + 1
    return f(...)
  end end
  c.add = one(function(a, b) return a + b end)
  c.mul = one(function(a, b) return a * b end)
  c.max = one(math.max)
  c.negate = one(function(a) return -a end)
  c.draw = one(function() return 0.5 end)
  c.less = one(function(a, b) return a < b end)
  c.scale = one(function(x, format) return fp4.round_scale(ty.tensor({ x }, { dtype = "f32" }), format):item() end)
  c.round = one(function(q)
    local a, best = math.abs(q), 1
    for k = 2, 8 do
      local gap, least = math.abs(magnitudes[k] - a), math.abs(magnitudes[best] - a)
      if gap < least or gap == least and k % 2 == 1 then best = k end
    end
    return (q < 0 and -1 or 1) * magnitudes[best]
  end)
  return c
end

-- The fast transform of a block in place, without its factor.
local function transform(c, x, from, size, signs)
  if signs then for i = 0, size - 1 do -- a change of sign counts where it does nothing as well
    local turned = c.negate(x[from + i])
    if i % 2 == 1 then x[from + i] = turned end
  end end
  local half = 1
  while half < size do
    for i = 0, size - 1, 2 * half do
      for j = i, i + half - 1 do
        local a, b = x[from + j], x[from + j + half]
        x[from + j], x[from + j + half] = c.add(a, b), c.add(a, -b)
      end
    end
    half = half * 2
  end
end

-- All blocks of a list of numbers, quantized to nearest (or with a draw, of which only the count matters).
local function counted(c, x, o, hadamard, size)
  if hadamard then
    for from = 1, #x, size do transform(c, x, from, size, hadamard == "random") end
  end
  local norm = hadamard and size ^ -0.5 or 1 -- goes into the scale
  local tops, greatest = {}, ({ e4m3 = 448, ue5m3 = 114688, e8m0 = 1 })[o.scale]
  for from = 1, #x, o.block do
    local top = math.abs(x[from])
    for i = from + 1, from + o.block - 1 do top = c.max(top, math.abs(x[i])) end
    tops[#tops + 1] = top
  end
  local factor = 1
  local whole = o.tensor and o.scale ~= "float"
  if whole then
    local top = tops[1]
    for i = 2, #tops do top = c.max(top, tops[i]) end
    factor = top * norm / (6 * greatest)
  end
  local out = {}
  for b, top in ipairs(tops) do
    if whole then top = c.mul(top, norm / factor) end
    local part = (o.scale == "e8m0" and 0.25 or 1 / 6) * (whole and 1 or norm)
    local scale = c.mul(top, part)
    if o.scale ~= "float" then scale = c.scale(scale, o.scale) end
    if whole then scale = c.mul(scale, factor) end
    for i = (b - 1) * o.block + 1, b * o.block do
      local q = c.mul(x[i], norm / scale)
      if o.rounding == "stochastic" then q = c.add(q, c.draw()) end
      out[i] = c.round(q) * scale
    end
  end
  return out
end

local function flat(t) return t:reshape(-1):tolist() end

check.test("the cost is what a scalar version counts, and its values are those of quant.fp4", function()
  ty.manual_seed(1)
  local rows, inputs, outputs = 32, 32, 64
  local tensors = { x = ty.randn(rows, inputs), w = ty.randn(outputs, inputs), g = ty.randn(rows, outputs) }
  for _, d in ipairs(design.grid { scale = { "e8m0", "e4m3", "ue5m3", "float" }, tensor = { false, true },
    hadamard = { "none", "both" }, rounding = { "nearest", "gradient", "everywhere" } }) do
    local policy, total, cost = design.policy(d), 0, design.cost(d, rows, inputs, outputs)
    for _, name in ipairs { "forward", "input", "weight" } do
      local product, here_alone = policy[name], 0
      for key, t in pairs(tensors) do
        if product[key] then
          local c, list = counter(), flat(t)
          local out = counted(c, list, product[key], product.hadamard, product.size)
          here_alone = here_alone + c.operations
          if name == "forward" and d.rounding == "nearest" then
            local matrix = product.hadamard and quant.hadamard.matrix(product.size)
            local want = fp4.quantize(matrix and quant.hadamard.rotate(t, matrix) or t, product[key])
            local off = (ty.tensor(out, { dtype = "f32" }) - want:reshape(-1)):abs():gt(1e-5):to("f32"):sum():item()
            check.ok(off <= (matrix and 3 or 0), ("%s: %g values differ"):format(design.name(d), off)) -- by ties
          end
        end
      end
      check.equal(cost[name].operations, here_alone, design.name(d) .. ": " .. name)
      total = total + here_alone
    end
    if not policy.forward.hadamard then check.equal(cost.operations, total, "in all") end
  end
end)

check.test("the cost of gradient rules", function()
  local n, blocks = 32 * 64 + 96 * 64, (32 * 64 + 96 * 64) / 32
  local function of(gradient) return design.cost({ gradient = gradient }, 32, 64, 96).gradient end
  check.equal(of "ste", { operations = 0, bytes = 0 }, "ste")
  check.equal(of "clip", { operations = 2 * n, bytes = n / 8 }, "clip: a comparison, a mask")
  -- difference and product for each element, their sum over the block; by the scale, times a slope, added to one
  check.equal(of "absmax".operations, math.tointeger(2 * n + (n - blocks) + 3 * blocks), "absmax")
  check.equal(of "absmax_adjusted".operations, math.tointeger(of "absmax".operations + blocks), "adjusted")
  check.equal(of "dge".operations, 8 * n, "dge")
end)

check.test("the order of the costs, and what a larger layer takes", function()
  local function of(d, size) return design.cost(d, size, size, size) end
  local plain = of({}, 128)
  for _, d in ipairs { { tensor = true }, { hadamard = "both" }, { rounding = "gradient" }, { gradient = "dge" } } do
    check.ok(of(d, 128).operations > plain.operations, design.name(d) .. " costs more")
  end
  check.ok(of({ tensor = true }, 128).bytes > plain.bytes, "another pass over memory")
  check.close(of({}, 1024).overhead, plain.overhead / 8, 1e-12, "overhead goes by 1 / size")
  check.equal(plain.products, 3 * 2 * 128 ^ 3 // 1, "products")
end)

check.test("designs, names, policies", function()
  check.equal(design.name {}, "e8m0/32", "default")
  check.equal(design.name { scale = "e4m3", tensor = true, rounding = "gradient" }, "e4m3/16 tensor rounding=gradient",
    "name")
  local list, seen = design.grid { scale = { "e8m0", "ue5m3" }, tensor = { false, true }, block = { 16, 32 } }, {}
  check.equal(#list, 8, "all of them")
  for _, d in ipairs(list) do seen[design.name(d)] = true end
  local count = 0
  for _ in pairs(seen) do count = count + 1 end
  check.equal(count, 8, "all different")
  local p = design.policy { hadamard = "backward", rounding = "backward", gradient = "clip" }
  check.equal({ p.forward.hadamard, p.input.hadamard }, { nil, "random" }, "rotations")
  check.equal({ p.forward.x.rounding, p.input.w.rounding, p.weight.x.rounding, p.forward.w.gradient },
    { "nearest", "stochastic", "stochastic", "clip" }, "rounding")
  check.equal({ p.input.g.shrink, p.forward.x.shrink }, { 0.75, 1 }, "shrink")
  check.equal(design.policy { rounding = "gradient" }.input.w.rounding, "nearest", "the gradient alone")
end)

check.test("every choice computes", function()
  ty.manual_seed(2)
  local x, w = ty.randn(20, 64):requires_grad_(), ty.randn(32, 64):requires_grad_()
  local g = ty.randn(20, 32)
  local want = ty.grad({ ty.linear(x, w) }, { x, w }, { grad_outputs = { g } })
  for key, list in pairs(design.choices) do
    for _, choice in ipairs(list) do
      local y = quant.linear.linear(x, w, design.policy { [key] = choice })
      local got = ty.grad({ y }, { x, w }, { grad_outputs = { g } })
      for i = 1, 2 do
        local off = ((got[i] - want[i]):norm() / want[i]:norm()):item()
        check.ok(off > 0.01 and off < 1, ("%s=%s: off by %.3f"):format(key, tostring(choice), off))
      end
    end
  end
end)

check.test("the effect of a choice over all others", function()
  local results = {}
  for i, d in ipairs(design.grid { scale = { "e8m0", "e4m3" }, tensor = { false, true } }) do
    results[i] = { design = d, gaps = { i, 10 * i } }
  end
  local by = {}
  for _, one in ipairs(results) do by[one.design.scale .. tostring(one.design.tensor)] = one.gaps[1] end
  local ratios, means = design.effect(results, "tensor", true, false)
  local with, without = by.e8m0true + by.e4m3true, by.e8m0false + by.e4m3false
  check.close(ratios, { with / without, with / without }, 1e-12)
  check.close(means, { without / 2, 10 * without / 2 }, 1e-12)
  check.fails(function() design.effect(results, "rotation", 1, 2) end, "no option 'rotation'")
end)

check.test("what is refused", function()
  check.fails(function() design.design { scale = "e5m2" } end, "quant.fp4_design.design: scale: expected")
  check.fails(function() design.design { tensor = 1 } end, "tensor: expected a boolean, got 1")
  check.fails(function() design.grid { rotation = { 1 } } end, "no option 'rotation'")
  check.fails(function() design.grid { scale = "e8m0" } end, "quant.fp4_design.grid: scale: expected a list")
  check.fails(function() design.cost({}, 0, 4, 4) end, "quant.fp4_design.cost: rows: expected an integer >= 1")
end)

check.finish()
