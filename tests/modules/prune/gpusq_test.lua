-- GPUSQ: packed integers against dense ones, rounding and its gradient, masks that hold through both stages, what a
-- deployed model computes and stores.
local here = arg and arg[0]:match ".*/" or "tests/modules/prune/"
local check = dofile(here .. "../../lua/check.lua")
local scratch = dofile(here .. "../../lua/scratch.lua")
local ty = require "tycho"
local models, prune = require "tycho.models", require "tycho.prune"

local gpusq, two_four = prune.gpusq, prune.two_four

-- Integers with at most two of four that are not zero; now and then fewer.
local function codes_of(rows, columns, most)
  local codes = ty.randint(-most, most + 1, { rows, columns })
  local groups = ty.rand(rows * columns // 4, 4)
  local _, at = groups:topk(2, 1)
  local mask = ty.zeros(groups.shape, { dtype = "i64" }):scatter(1, at, 1):reshape(rows, columns)
  return (codes * mask):to "i8"
end

check.test("packing: back as it was, of 20 and 12 bits in the place of 128", function()
  ty.manual_seed(1)
  for _, bits in ipairs { 8, 4, 3 } do
    for _, shape in ipairs { { 1, 4 }, { 5, 8 }, { 7, 64 }, { 3, 36 } } do
      local codes = codes_of(shape[1], shape[2], (1 << bits - 1) - 1)
      local packed = two_four.encode(codes, bits)
      check.equal(two_four.decode(packed):eq(codes):all():item(), true)
      local values, positions, dtype = two_four.sizes(shape[1], shape[2], bits)
      check.equal({ packed.values:numel(), packed.positions:numel(), packed.values.dtype },
        { values, positions, dtype })
      if shape[2] == 64 then check.equal(packed.bytes * 8, 7 * 16 * (bits == 8 and 20 or 12)) end
    end
  end
  check.equal(two_four.decode(two_four.encode(ty.zeros({ 2, 8 }, { dtype = "i8" }))):abs():sum():item(), 0)
  local three = ty.tensor({ { 1, 2, 0, 3 } }, { dtype = "i8" })
  check.fails(function() two_four.encode(three) end, "prune.two_four.encode: codes: expected two of four")
  check.fails(function() two_four.encode(codes_of(1, 4, 127), 4) end, "expected integers of 4 bits")
  check.fails(function() two_four.encode(ty.ones(2, 4)) end, "codes: expected i8")
end)

check.test("the packed product is the dense product of integers", function()
  ty.manual_seed(2)
  for _, bits in ipairs { 8, 4 } do
    local codes = codes_of(9, 32, (1 << bits - 1) - 1)
    local x = ty.randint(-127, 128, { 2, 3, 32 }):to "i8"
    local got = two_four.product(x, two_four.encode(codes, bits))
    check.equal(got.shape, { 2, 3, 9 })
    local a, w = x:reshape(6, 32):tolist(), codes:tolist()
    local list = got:reshape(6, 9):tolist()
    for i = 1, 6 do
      for j = 1, 9 do
        local sum = 0
        for k = 1, 32 do sum = sum + a[i][k] * w[j][k] end
        check.equal(list[i][j], sum)
      end
    end
  end
end)

check.test("rounding: to the nearest multiple, clipped; the gradient passes where nothing was clipped", function()
  local x = ty.tensor({ -9.0, -3.4, 0.2, 0.3, 3.49, 3.51, 8.0 }, { dtype = "f64" }):requires_grad_()
  local y = gpusq.round(x, 0.5, 7)
  check.equal(y:tolist(), { -3.5, -3.5, 0.0, 0.5, 3.5, 3.5, 3.5 })
  y = y * ty.arange(1, 8):to "f64"
  y:sum():backward()
  check.equal(x.grad:tolist(), { 0.0, 2.0, 3.0, 4.0, 5.0, 0.0, 0.0 })
  check.fails(function() gpusq.round(x, 0, 7) end, "prune.gpusq.round: scale: expected a number > 0")
end)

local function vit()
  return models.ViTForImageClassification { image_size = 12, patch_size = 3, num_channels = 1, hidden_size = 16,
    intermediate_size = 32, num_hidden_layers = 2, num_attention_heads = 2, num_labels = 10 }
end

local function groups_hold(model)
  local worst = 0
  for _, layer in ipairs(ty.nn.surgery.find("test", model)) do
    local groups = layer.module.weight:detach():ne(0):reshape(-1, 4):to("i64"):sum(1)
    worst = math.max(worst, groups:max():item())
  end
  return worst
end

check.test("both stages: two of four after every step; deployed, the same up to the rounding of sums", function()
  ty.manual_seed(3)
  local set = ty.data.TensorDataset { image = ty.randn(32, 1, 12, 12), label = ty.randint(0, 10, { 32 }) }
  local images = set:batch(ty.arange(32)).image
  for _, bits in ipairs { 8, 4 } do
    local plain = vit()
    local model = plain:clone()
    local worst, moved, scale_kept = 0, 0, nil
    local report = gpusq.compress(model, set, { bits = bits, images = images, prune_steps = 3, quantize_steps = 3,
      batch_size = 16, quiet = true, lr = 1e-2, quantize_lr = 1e-2, every = 1, evaluate = function(_, m)
        worst = math.max(worst, groups_hold(m))
        moved = moved + 1
        scale_kept = m.classifier._gpusq and m.classifier._gpusq.x_scale:item()
        return {}
      end })
    check.equal({ worst, moved, #report.losses, #report.weights }, { 2, 6, 6, 2 })
    check.close(report.weights[1] + report.weights[2], 2, 1e-9)
    check.ok(report.moved[1] / report.moved[2] - report.weights[1] / report.weights[2] < 1e-9)
    check.ok(scale_kept > 0)
    -- What deploy() rounds besides the layers is rounded here as well, so that the two can be compared.
    local same = model:clone()
    ty.no_grad(function()
      local linear = {}
      for _, layer in ipairs(ty.nn.surgery.find("test", same)) do linear[layer.name .. ".weight"] = true end
      for name, t in same:named_parameters() do
        local wide = 0
        for _, size in ipairs(t.shape) do wide = wide + (size > 1 and 1 or 0) end
        if wide < 2 then
          t:detach():copy_(t:detach():to "f16")
        elseif not linear[name] then
          local scale = t:detach():abs():max() / 127
          t:detach():copy_((t:detach() / scale):round() * scale)
        end
      end
    end)
    local made = gpusq.deploy(model)
    local want, got = ty.no_grad(same:eval(), images), ty.no_grad(model:eval(), images)
    -- A sum that ends on the other side of a rounding boundary is a step of the next layer's inputs apart.
    check.ok((want - got):abs():mean():item() < 0.02 * want:abs():mean():item())
    check.equal(#made.layers, 13)
    check.equal(#made.outside, 2) -- the kernel of the patches, and the positions
    local bytes = 0
    for _, layer in ipairs(made.layers) do
      check.equal(layer.bytes * 8, layer.weights // 4 * (bits == 8 and 20 or 12), layer.name)
      bytes = bytes + layer.bytes + 2
    end
    local rows = bits == 8 and 13 or 2 * (4 * 16 + 32 + 16) + 10
    bytes = bytes + 2 * rows
    for name, t in model:named_parameters() do
      bytes = bytes + (name:find "projection.weight" and t:numel() + 4 or name:find "position" and t:numel() + 4
        or 2 * t:numel())
    end
    check.equal(gpusq.bytes(model), bytes)
    check.equal(gpusq.save(model, scratch.file "small.safetensors"), bytes)
    local again = gpusq.load(plain, scratch.file "small.safetensors")
    check.equal((ty.no_grad(again, images) - got):abs():max():item(), 0)
  end
end)

check.test("rounded alone: 8 bits change little, the more bits the less; release gives the layers back", function()
  ty.manual_seed(4)
  local model, images, off = vit():eval(), ty.randn(8, 1, 12, 12), {}
  local want = ty.no_grad(model, images)
  for bits = 2, 8, 2 do
    local copy = gpusq.quantize(model:clone(), images, { bits = bits })
    off[#off + 1] = (ty.no_grad(copy, images) - want):norm():item() / want:norm():item()
    check.equal((ty.no_grad(gpusq.release(copy), images) - want):abs():max():item(), 0)
  end
  check.ok(off[1] > off[2] and off[2] > off[3] and off[3] > off[4] and off[4] < 0.05, table.concat(off, " "))
end)

check.test("the other way round, and dense: rounding stays above the masks", function()
  ty.manual_seed(5)
  local set = ty.data.TensorDataset { image = ty.randn(16, 1, 12, 12), label = ty.randint(0, 10, { 16 }) }
  local images = set:batch(ty.arange(16)).image
  local how = { bits = 4, images = images, prune_steps = 2, quantize_steps = 2, batch_size = 16, quiet = true,
    order = "quantize" }
  local model = vit()
  gpusq.compress(model, set, how)
  check.equal(groups_hold(model), 2)
  gpusq.deploy(model)
  local dense = vit()
  how.order = "dense"
  gpusq.compress(dense, set, how)
  check.fails(function() gpusq.deploy(dense) end, "expected two of four")
end)

check.test("a file that lacks something, or a model that is packed, is one error and changes nothing", function()
  ty.manual_seed(6)
  local plain, images = vit():eval(), ty.randn(4, 1, 12, 12)
  local model = plain:clone()
  prune.magnitude(model, { pattern = "2:4", targets = "" })
  gpusq.quantize(model, images, { bits = 8 })
  local path = scratch.file "packed.safetensors"
  local before = ty.no_grad(plain, images)
  gpusq.deploy(model)
  gpusq.save(model, path)
  local state, about = ty.io.load(path)
  local names = {}
  for name in pairs(state) do names[#names + 1] = name end
  table.sort(names)
  for i = 1, #names, 5 do
    local kept = state[names[i]]
    state[names[i]] = nil
    ty.io.save_safetensors(scratch.file "lacks.safetensors", state, about)
    state[names[i]] = kept
    local lacks = names[i]:match "%.values$" and "codes" or names[i]
    check.fails(function() gpusq.load(plain, scratch.file "lacks.safetensors") end, lacks)
    check.equal((ty.no_grad(plain, images) - before):abs():max():item(), 0, names[i])
  end
  check.fails(function() gpusq.load(model, path) end, "expected one as it was before prune.gpusq")
end)

check.test("what is refused", function()
  local model, images = vit(), ty.randn(2, 1, 12, 12)
  local set = ty.data.TensorDataset { image = images, label = ty.randint(0, 10, { 2 }) }
  check.fails(function() gpusq.compress(model, set, {}) end, "prune.gpusq.compress: images: expected a tensor")
  check.fails(function() gpusq.quantize(model, images, { bits = 9 }) end, "prune.gpusq.quantize: bits: expected")
  check.fails(function() gpusq.deploy(model) end, "prune.gpusq.deploy: model: expected one of prune.gpusq.quantize")
  check.fails(function() gpusq.save(model, "x") end, "prune.gpusq.save: model: expected one of prune.gpusq.deploy")
  ty.io.save_safetensors(scratch.file "other.safetensors", { a = ty.ones(1) })
  check.fails(function() gpusq.load(model, scratch.file "other.safetensors") end, "expected a file of prune.gpusq.save")
end)

scratch.clean()
check.finish()
