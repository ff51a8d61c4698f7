-- Floats of four bits: every code of every format, ties, rounding, packing, the transform, layers with three products.
local here = (arg and arg[0]:match ".*/" or "tests/modules/quant/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local quant = require "tycho.quant"
local nn = ty.nn

local fp4, hadamard, linear = quant.fp4, quant.hadamard, quant.linear
local magnitudes = { 0, 0.5, 1, 1.5, 2, 3, 4, 6 }

-- All numbers of a small float in order of their codes, from its definition.
local function all_of(mantissa, bias, count)
  local list = {}
  for code = 0, count - 1 do
    local e, m = code >> mantissa, code & (1 << mantissa) - 1
    list[code + 1] = e == 0 and m * 2.0 ^ (1 - bias - mantissa) or (1 + m / 2.0 ^ mantissa) * 2.0 ^ (e - bias)
  end
  return list
end

-- The nearest of a sorted list of numbers, ties to the even code (codes count from 0).
local function nearest(list, x)
  for i = 1, #list - 1 do
    if x <= list[i + 1] then
      local middle = (list[i] + list[i + 1]) / 2
      if x < middle or x == middle and i % 2 == 1 then return list[i] end
      return list[i + 1]
    end
  end
  return list[#list]
end

check.test("every code of E2M1 is a fixed point, and halves between codes go to the even one", function()
  check.equal(fp4.values, magnitudes, "values")
  local row, want = { 6 }, { 6 } -- the 6 makes the scale 1
  for i = 1, #magnitudes do
    for _, sign in ipairs { 1, -1 } do
      row[#row + 1], want[#want + 1] = sign * magnitudes[i], sign * magnitudes[i]
      if i < #magnitudes then
        local half = (magnitudes[i] + magnitudes[i + 1]) / 2
        row[#row + 1], want[#want + 1] = sign * half, sign * magnitudes[i % 2 == 1 and i or i + 1]
      end
    end
  end
  while #row < 32 do row[#row + 1], want[#want + 1] = 0, 0 end
  local value = fp4.quantize(ty.tensor(row, { dtype = "f32" }), { block = 32 })
  check.equal(value:tolist(), ty.tensor(want, { dtype = "f32" }):tolist(), "values")
end)

check.test("scales: all codes and the ties between them", function()
  for format, list in pairs { e4m3 = all_of(3, 7, 127), ue5m3 = all_of(3, 15, 255) } do
    check.equal(list[#list], format == "e4m3" and 448.0 or 114688.0, format .. ": greatest")
    local x, want = {}, {}
    for i = 1, #list do
      x[#x + 1], want[#want + 1] = list[i], list[i]
      if i < #list then
        for _, part in ipairs { 0.3, 0.5, 0.7 } do
          local between = list[i] + part * (list[i + 1] - list[i])
          x[#x + 1], want[#want + 1] = between, nearest(list, between)
        end
      end
    end
    x[#x + 1], want[#want + 1] = 2 * list[#list], list[#list]
    check.equal(fp4.round_scale(ty.tensor(x, { dtype = "f32" }), format):tolist(),
      ty.tensor(want, { dtype = "f32" }):tolist(), format)
  end
  local x, want = {}, {}
  for e = -120, 120, 7 do
    for _, part in ipairs { 1, 1.5, 1.9999999 } do x[#x + 1], want[#want + 1] = part * 2.0 ^ e, 2.0 ^ e end
  end
  check.equal(fp4.round_scale(ty.tensor(x, { dtype = "f32" }), "e8m0"):tolist(), want, "e8m0")
end)

-- One block by the definitions, in doubles but for what is f32 in the format.
local function block_by_hand(x, o)
  local top = 0
  for _, v in ipairs(x) do top = math.max(top, math.abs(v)) end
  local scale
  if o.scale == "e8m0" then
    scale = 2.0 ^ (math.floor(math.log(top, 2)) - 2)
  else
    scale = nearest(o.scale == "e4m3" and all_of(3, 7, 127) or all_of(3, 15, 255), top / 6)
  end
  local out = {}
  for i, v in ipairs(x) do
    out[i] = scale == 0 and 0 or (v < 0 and -1 or 1) * nearest(magnitudes, math.abs(v) / scale) * scale
  end
  return out
end

check.test("a block's values are those of the definitions", function()
  ty.manual_seed(3)
  for _, o in ipairs { { scale = "e8m0" }, { scale = "e4m3", block = 16 }, { scale = "ue5m3", block = 8 } } do
    o.block = o.block or 32
    for _, size in ipairs { 1, 1e-3, 30 } do
      local x = ty.randn(4, 32) * size
      local want, rows = {}, x:reshape(-1, o.block):tolist()
      for i, row in ipairs(rows) do want[i] = block_by_hand(row, o) end
      check.close(fp4.quantize(x, o):reshape(-1, o.block):tolist(), want, 1e-6 * size, o.scale)
    end
  end
  -- What is below the range of E4M3 is lost without the tensor's factor, and kept with it.
  local x = ty.randn(2, 16) * 1e-5
  check.equal(fp4.quantize(x, { scale = "e4m3", block = 16 }):abs():max():item(), 0.0, "lost")
  local kept = fp4.quantize(x, { scale = "e4m3", block = 16, tensor = true })
  check.ok((kept - x):norm():item() < 0.2 * x:norm():item(), "kept")
  local largest = x:abs():max():item()
  check.close(kept:abs():max():item(), largest, 1e-6 * largest, "the largest element is exact")
end)

check.test("packed codes decode to the same numbers, bit for bit", function()
  ty.manual_seed(4)
  local x = ty.randn(6, 64) * ty.randn(6, 1):exp()
  x:select(0, 2):zero_()
  for _, o in ipairs {
    { scale = "e8m0" }, { scale = "e8m0", rounding = "stochastic", shrink = 0.75 }, { scale = "e8m0", range = "quest" },
    { scale = "e4m3", block = 16, tensor = true }, { scale = "e4m3", block = 16 }, { scale = "ue5m3", block = 16 },
    { scale = "ue5m3", block = 32, tensor = true, rounding = "stochastic" }, { scale = "float", block = 8 },
    { scale = "e8m0", tensor = true },
  } do
    local packed, value = fp4.encode(x, o)
    check.equal(ty.io.to_bytes(fp4.decode(packed)) == ty.io.to_bytes(value), true, o.scale)
    check.equal(packed.codes.shape, { 6, 32 }, "two codes a byte")
    if o.rounding ~= "stochastic" then
      check.equal(ty.io.to_bytes(value) == ty.io.to_bytes((fp4.quantize(x, o))), true, "quantize gives the same")
    end
    local bytes = packed.codes:nbytes() + packed.scales:nbytes()
    check.close(8 * bytes / x:numel(), fp4.bits(o), 1e-9, "bits")
  end
  -- Every code, with every scale of the format.
  local codes = ty.arange(256):to "u8":reshape(1, 256)
  local packed = { codes = codes, factor = 1.0, options = { scale = "e4m3", block = 512 }, scales = nil }
  for scale = 0, 126 do
    packed.scales = ty.tensor({ { scale } }, { dtype = "u8" })
    local value = fp4.decode(packed):reshape(256, 2)
    local s = all_of(3, 7, 127)[scale + 1]
    for _, byte in ipairs { 0, 1, 15, 16, 128, 200, 255 } do
      local function of(code) return magnitudes[code % 8 + 1] * (code < 8 and 1 or -1) * s end
      check.equal(value:select(0, byte):tolist(), { of(byte % 16), of(byte // 16) }, "code " .. byte)
    end
  end
end)

check.test("stochastic rounding has the number as its mean, and its neighbours as values", function()
  ty.manual_seed(5)
  local x = ty.tensor { { 6, 0.1, 0.4, 0.9, 1.2, 1.6, 2.3, 2.9, 3.6, 4.5, 5.5, -0.3, -2.7, -4.1, 0, -5.9 } }
  local draws, o = 4000, { scale = "float", block = 16, rounding = "stochastic" }
  local values = fp4.quantize(x:expand(draws, 16):contiguous(), o)
  local mean, list = values:mean(0):tolist(), x:tolist()[1]
  for i, v in ipairs(list) do
    local low = 1
    while low < 8 and magnitudes[low + 1] <= math.abs(v) do low = low + 1 end
    local step = low < 8 and magnitudes[low + 1] - magnitudes[low] or 0
    local deviation = 0.5 * step / draws ^ 0.5
    check.ok(math.abs(mean[i] - v) <= 4.5 * deviation + 1e-6, ("mean of %g is %g"):format(v, mean[i]))
  end
  local distances = (values - x):abs():max(0):tolist()
  for i, d in ipairs(distances) do check.ok(d < (math.abs(list[i]) > 4 and 2 or math.abs(list[i]) > 2 and 1 or 0.5),
    "a neighbour") end
  check.ok(values:select(1, 3):std():item() > 0, "it draws")
end)

check.test("the Hadamard matrix is orthogonal, symmetric without signs, and products do not see it", function()
  ty.manual_seed(6)
  for _, n in ipairs { 1, 2, 16, 32 } do
    for _, m in ipairs { hadamard.matrix(n), hadamard.random(n) } do
      check.close(ty.matmul(m, m:transpose(0, 1)):tolist(), ty.eye(n):tolist(), 1e-6, "H H'")
    end
  end
  check.equal(hadamard.matrix(8):tolist(), hadamard.matrix(8):transpose(0, 1):contiguous():tolist(), "symmetric")
  local m, a, b = hadamard.random(32), ty.randn(3, 64), ty.randn(5, 64)
  check.close(hadamard.unrotate(hadamard.rotate(a, m), m):tolist(), a:tolist(), 1e-5, "inverse")
  check.close(ty.linear(hadamard.rotate(a, m), hadamard.rotate(b, m)):tolist(), ty.linear(a, b):tolist(), 1e-4, "ab")
  check.fails(function() hadamard.matrix(12) end,
    "quant.hadamard.matrix: block: expected a power of 2 up to 4096, got 12")
  check.fails(function() hadamard.rotate(ty.ones(3, 30), m) end, "quant.hadamard.rotate: x: expected %[%.%.%., n%]")
end)

-- vjp() against finite differences of the function of which it is the gradient at x: codes stay, and move from there
-- as `staircase` does; the scale goes by the largest element.
check.test("gradients through the quantizer", function()
  ty.manual_seed(7)
  local n, x = 8, ty.randn(1, 8):tolist()[1]
  local g = ty.randn(1, 8)
  local gs = g:tolist()[1]
  local function soft(q) -- of Wang et al., on the steps of E2M1
    local a = math.abs(q)
    local step = a < 2 and 0.5 or a < 4 and 1 or 2
    local low = math.floor(a / step) * step
    local t = 2 * (a - low) / step - 1
    return (q < 0 and -1 or 1) * (low + step / 2 * (1 + (t < 0 and -1 or 1) * math.abs(t) ^ (1 / 5)))
  end
  for how, part in pairs { ste = false, absmax = true, absmax_adjusted = true, dge = false } do
    for _, scale_format in ipairs { "float", "e8m0" } do
      local o = { scale = scale_format, block = n, gradient = how }
      local value, saved = fp4.quantize(ty.tensor { x }, o)
      local grad = fp4.vjp(g, saved, o):tolist()[1]
      local top = 0
      for _, v in ipairs(x) do top = math.max(top, math.abs(v)) end
      local s0 = scale_format == "float" and top / 6 or 2.0 ^ (math.floor(math.log(top, 2)) - 2)
      local values = value:tolist()[1]
      local function f(y)
        local largest, sum = 0, 0
        for _, v in ipairs(y) do largest = math.max(largest, math.abs(v)) end
        local s = not part and s0 or how == "absmax" and s0 + (largest - top) / 6 or s0 * largest / top
        for i = 1, n do
          local move = how == "dge" and soft(y[i] / s) - soft(x[i] / s0) or y[i] / s - x[i] / s0
          sum = sum + gs[i] * s * (values[i] / s0 + move)
        end
        return sum
      end
      for i = 1, n do
        local y, h = { table.unpack(x) }, 1e-5
        y[i] = x[i] + h
        local up = f(y)
        y[i] = x[i] - h
        local slope = (up - f(y)) / (2 * h)
        local q = math.abs(x[i]) / s0
        local at_edge = how == "dge" and (q > 5.99 or math.abs(slope / gs[i]) > 2.9) -- capped at 3, or at the end
        if not at_edge then check.close(grad[i], slope, 2e-3 * (1 + math.abs(slope)), how .. " " .. scale_format) end
      end
    end
  end
  local o = { range = "quest", gradient = "clip", block = 32 }
  local y = ty.randn(1, 32)
  y:narrow(1, 0, 1):fill_(40)
  local _, saved = fp4.quantize(y, o)
  local back = fp4.vjp(ty.ones(1, 32), saved, o):tolist()[1]
  check.equal(back[1], 0.0, "what was clipped gets none")
  check.equal(back[2], 1.0, "what was not gets all")
end)

local off = linear.policy {}

check.test("a policy that quantizes nothing is the layer, rotated or not", function()
  ty.manual_seed(8)
  local x, w = ty.randn(2, 5, 64):requires_grad_(), ty.randn(32, 64):requires_grad_()
  local g = ty.randn(2, 5, 32)
  local y = ty.linear(x, w)
  local want = ty.grad({ y }, { x, w }, { grad_outputs = { g }, keep_graph = true })
  for _, policy in ipairs { off, linear.policy { forward = { hadamard = "fixed" }, input = { hadamard = "random" },
    weight = { hadamard = "random" } }, linear.policy { forward = { hadamard = "random" }, saved = "exact" } } do
    local out = linear.linear(x, w, policy)
    check.close(out:tolist(), y:tolist(), 2e-5, "forward")
    local got = ty.grad({ out }, { x, w }, { grad_outputs = { g } })
    check.close(got[1]:tolist(), want[1]:tolist(), 2e-5, "input gradient")
    check.close(got[2]:tolist(), want[2]:tolist(), 2e-5, "weight gradient")
  end
end)

check.test("a policy on a model, and off again", function()
  ty.manual_seed(9)
  local model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 20), nn.Linear(20, 32, { bias = false }))
  local x = ty.randn(7, 32)
  local before = model(x):tolist()
  local report = linear.attach(model, linear.policy { forward = { x = {}, w = {} }, input = { g = {}, w = {} },
    weight = { g = {}, x = {} } })
  check.equal(report.layers, 1, "of whole blocks")
  check.equal(report.left, { "2", "3" }, "left")
  check.close(report.share, 32 * 64 / (32 * 64 + 64 * 20 + 20 * 32), 1e-9, "share")
  local want = ty.linear((fp4.quantize(x)), (fp4.quantize(model[1].weight:detach())), model[1].bias)
  check.equal(model[1](x):tolist(), want:tolist(), "forward")
  model(x):sum():backward()
  check.ok(model[1].weight.grad:isfinite():all():item(), "gradients")
  check.fails(function() linear.attach(model, off, {}) end, "wrapped already")
  check.equal(linear.detach(model), 1, "taken off")
  check.equal(model(x):tolist(), before, "as before")
end)

check.test("blocks of zeros stay zeros beside the smallest numbers, in every format", function()
  local x = ty.zeros(4, 32)
  x:select(0, 1):fill_(2e-7) -- the factor of the tensor makes the least scale of E8M0 smaller than any float
  for _, scale in ipairs { "e8m0", "e4m3", "ue5m3", "float" } do
    for _, tensor in ipairs { false, true } do
      for _, rounding in ipairs { "nearest", "stochastic" } do
        for _, values in ipairs { x, ty.zeros(4, 32) } do
          local y = fp4.quantize(values, { scale = scale, tensor = tensor, rounding = rounding })
          check.ok(y:isfinite():all():item(), ("%s, %s, %s"):format(scale, tensor, rounding))
          check.equal(y:select(0, 0):abs():max():item(), 0.0)
        end
      end
    end
  end
  local y = fp4.quantize(ty.zeros(2, 32), { element = "e4m3", tensor = true })
  check.equal(y:abs():max():item(), 0.0)
end)

check.test("what is refused", function()
  check.fails(function() fp4.quantize(ty.ones(3, 30)) end, "quant.fp4.quantize: x: expected %[%.%.%., n%]")
  check.fails(function() fp4.quantize(ty.ones(32):to "f64") end, "x: expected a tensor of f32, got f64")
  check.fails(function() fp4.quantize(ty.ones(32), { scale = "e5m2" }) end, 'scale: expected "e8m0" or "e4m3"')
  check.fails(function() fp4.options("who", { element = "e4m3", scale = "e4m3" }) end, "who: scale: expected \"e8m0\"")
  check.fails(function() fp4.encode(ty.ones(32), { element = "bf16" }) end, "quant.fp4.encode: options: expected")
  check.fails(function() fp4.decode { codes = ty.ones(4):to "u8", scales = ty.ones(4):to "u8", factor = 1 } end,
    "quant.fp4.decode: packed: expected a scale for each 32 codes")
  check.fails(function() linear.policy { forward = { g = {} } } end, "quant.linear.policy: forward: no option 'g'")
  check.fails(function() linear.policy { input = { g = { block = 0 } } } end, "input: g: block: expected an integer")
  check.fails(function() linear.linear(ty.ones(2, 32), ty.ones(32, 16), off) end, "x: expected %[%.%.%., in%]")
  check.fails(function() linear.linear(ty.ones(2, 20), ty.ones(32, 20), linear.policy { forward = { x = {} } }) end,
    "w: expected %[out, in%] of whole blocks")
  check.fails(function() linear.attach(nn.Linear(2, 2), {}) end, "policy: expected one of quant.linear.policy")
end)

check.test("a tensor without dimensions is refused by name", function()
  check.fails(function() require("tycho.quant").fp4.quantize(ty.ones({})) end, "quant.fp4.quantize: x: expected")
end)

local fixture = ty.io.load_npz(check.root .. "tests/fixtures/fp4.npz")

check.test("MXFP4 and NVFP4 are those of torchao, bit for bit, and of files with codes and scales apart", function()
  local x = fixture.x
  local mx = { scale = "e8m0", block = 32 }
  check.equal(fp4.quantize(x, mx):tolist(), fixture.mx_values:tolist())
  check.equal(x:to "mxfp4":to "f32":tolist(), fixture.mx_values:tolist())
  local packed = fp4.encode(x, mx)
  check.equal(packed.scales:tolist(), fixture.mx_scales:tolist())
  check.equal(ty.io.to_bytes(fp4.tensor(packed)), ty.io.to_bytes(x:to "mxfp4"))

  local nv, factor = { scale = "e4m3", block = 16, tensor = true }, fixture.nv_factor:tolist()[1]
  local ours = fp4.encode(x, nv)
  check.close(ours.factor, factor, 1e-7)
  -- torchao has no scales below the smallest normal number, which the last row, of small weights, would need.
  check.equal(ours.scales["0:5"]:tolist(), fixture.nv_scales["0:5"]:tolist())
  local theirs = fp4.tensor { codes = fixture.nv_packed, scales = fixture.nv_scales, factor = factor, options = nv }
  check.equal(theirs.dtype, "nvfp4")
  local unit = x:abs():max(1, true)
  check.close(((theirs:to "f32" - fixture.nv_values) / unit):abs():max():item(), 0, 1e-6)
  check.close(((fp4.tensor(ours):to "f32" - fixture.nv_values) / unit)["0:5"]:abs():max():item(), 0, 1e-6)
  -- A factor for each row loses no more than one for all of them, and where rows differ much less.
  local function lost(y) return ((y - x) / unit):square():mean():item() end
  check.ok(lost(fp4.tensor(ours):to "f32") < lost(fixture.nv_values))
  check.ok(lost(x:to "nvfp4":to "f32") < lost(fixture.nv_values))

  check.fails(function() fp4.tensor { codes = packed.codes, scales = packed.scales, options = nv } end,
    "quant.fp4.tensor: scales: expected u8 %[6, 16%]")
  check.fails(function() fp4.tensor { codes = packed.codes["0:3, 0:9"], scales = packed.scales, options = mx } end,
    "quant.fp4.tensor: codes: expected u8")
  check.fails(function() fp4.tensor { codes = packed.codes, scales = packed.scales, options = { scale = "ue5m3" } } end,
    "quant.fp4.tensor: options: expected")
end)

check.finish()
