-- Vector quantization: k-means, exact where there are codewords enough, plain and calibrated, ratios and what is
-- settled, sizes, what is refused.
local here = (arg and arg[0]:match ".*/" or "tests/modules/quant/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local quant = require "tycho.quant"

local nn = ty.nn
local vector = quant.vector

check.test("k-means finds all different vectors, and is no worse with more rounds", function()
  ty.manual_seed(1)
  local few = ty.randn(7, 3)
  local x = few:index_select(0, ty.randint(0, 7, { 200 }):to "i64")
  local codebook, nearest = vector.kmeans(x, { codewords = 12, rounds = 15 })
  check.close((codebook:index_select(0, nearest) - x):abs():max():item(), 0, 1e-5)
  local y, last = ty.randn(300, 4), math.huge
  for _, rounds in ipairs { 0, 1, 2, 5, 20 } do
    local c, near = vector.kmeans(y, { codewords = 16, rounds = rounds, seed = 3 })
    local error = (c:index_select(0, near) - y):square():sum():item()
    check.ok(error <= last * (1 + 1e-6), "rounds " .. rounds)
    check.equal(near:tolist(), ty.cdist(y, c):argmin(1):tolist())
    last = error
  end
  check.equal(vector.kmeans(ty.randn(5, 2), { codewords = 100 }).shape, { 5, 2 })
end)

local Block = nn.module "VectorTestBlock"
function Block:init(width)
  self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
end
function Block:forward(x) return x + self.down(self.up(x, nil, "gelu")) end

local Network = nn.module "VectorTestNetwork"
function Network:init(width)
  self.blocks = nn.ModuleList { Block(width), Block(width) }
  self.odd = nn.Linear(width, 3)
end
function Network:forward(x, t)
  for _, block in ipairs(self.blocks) do x = block(x + t) end
  return self.odd(x)
end

local function network()
  ty.manual_seed(2)
  return Network(16)
end
local calls = {}
ty.manual_seed(3)
for i = 1, 4 do calls[i] = table.pack(ty.randn(32, 16), i / 4) end

check.test("codewords enough are exact but for half precision", function()
  local model = network()
  local want = model(calls[1][1], 0)
  local report = vector.quantize(model, { codewords = 256, rounds = 2 })
  check.equal(#report, 4)
  check.close(model(calls[1][1], 0):tolist(), want:tolist(), 3e-3)
  check.ok(model.blocks[1].up.weight == nil and model.odd.weight ~= nil, "the blocks' layers alone")
  check.fails(function() vector.quantize(model, {}) end, "has codewords already")
end)

check.test("bits are those of codes and codebook, and the weight is what codes say", function()
  local model = network()
  local w = model.blocks[1].up.weight:detach():clone()
  local report = vector.quantize(model, { codewords = 16, rounds = 20 })
  check.close(report[1].bits, (128 * 4 + 16 * 4 * 16) / 512, 1e-9)
  local layer = model.blocks[1].up
  local value = vector.weight(layer)
  check.equal(value:tolist(), layer.codebook:index_select(0, layer.codes:flatten():to "i64"):reshape(32, 16):tolist())
  local nearest = ty.cdist(w:reshape(-1, 4), layer.codebook):min(1)
  check.close(((value - w):reshape(-1, 4):square():sum(1)):sqrt():tolist(), nearest:tolist(), 1e-3)
  local x = ty.randn(3, 16)
  check.close(layer(x):tolist(), ty.linear(x, value, layer.bias):tolist(), 1e-6)
end)

check.test("one candidate and no steps are k-means; so are two that start by distance", function()
  local plain, one, two = network(), network(), network()
  vector.quantize(plain, { codewords = 16 })
  local report = vector.calibrate(one, calls, { codewords = 16, candidates = 1, steps = 0 })
  vector.calibrate(two, calls, { codewords = 16, candidates = 2, steps = 0, start = "distance" })
  for i = 1, 2 do
    for _, name in ipairs { "up", "down" } do
      local want = vector.weight(plain.blocks[i][name]):tolist()
      check.equal(vector.weight(one.blocks[i][name]):tolist(), want)
      check.equal(vector.weight(two.blocks[i][name]):tolist(), want)
    end
  end
  check.equal(report.changed, 0.0)
end)

check.test("soft weights by hand; what is settled does not move and gets no gradient", function()
  local model = network()
  local layers = vector.begin(model, { codewords = 16, candidates = 2 })
  local module = layers[1].module
  module.logits:copy_(ty.randn_like(module.logits) * 3)
  local before = module.logits:softmax(1)
  check.close(vector.ratios(module):tolist(), before:tolist(), 1e-6)
  local picked = module.codebook:index_select(0, module.candidates:flatten()):reshape(-1, 2, 4)
  local want = picked:select(1, 0) * before:narrow(1, 0, 1) + picked:select(1, 1) * before:narrow(1, 1, 1)
  check.close(vector.weight(module):tolist(), want:reshape(16, 32):tolist(), 1e-6)
  local share = vector.settle({ layers[1] }, 0.9)
  local sure = before:max(1):gt(0.9)
  check.close(share, sure:to("f32"):mean():item(), 1e-6)
  check.ok(share > 0 and share < 1, "some of them")
  module.logits:requires_grad_(true);
  (vector.weight(module) * ty.randn(16, 32)):sum():backward()
  local gradient = module.logits.grad:abs():sum(1)
  check.equal(gradient:gt(0):tolist(), sure:logical_not():tolist(), "gradients")
  module.logits:requires_grad_(false)
  local settled = vector.ratios(module)
  module.logits:copy_(-module.logits)
  local after = vector.ratios(module)
  local still = sure:to("f32"):unsqueeze(1)
  check.equal((after * still):tolist(), (settled * still):tolist(), "settled")
  check.ok(((after - settled) * (1 - still)):abs():max():item() > 0, "the others move")
  check.close((settled * still):max(1):tolist(), sure:to("f32"):tolist(), 1e-7)
  -- A least share: the surest of the others, and no more of them than are needed.
  local open = vector.begin(network(), { codewords = 16, candidates = 2, start = "distance" })
  local ratios = vector.ratios(open[1].module):max(1)
  check.close(vector.settle({ open[1] }, 1, 0.25), 0.25, 1e-6)
  local chosen = open[1].module.settled:gt(0)
  check.ok(ratios:masked_select(chosen):min():item() >= ratios:masked_select(chosen:logical_not()):max():item())
  check.close(vector.settle({ open[1] }, 1, 0.25), 0.25, 1e-6)
  check.close(vector.settle({ open[1] }, 1, 1), 1, 1e-6)
end)

check.test("calibrated is nearer to the network than k-means, with and without assignments", function()
  local original = network()
  local function error(model)
    local sum = 0
    ty.no_grad(function()
      for _, call in ipairs(calls) do
        sum = sum + (model(call[1], call[2]) - original(call[1], call[2])):square():mean():item()
      end
    end)
    return sum
  end
  local plain, book, both = network(), network(), network()
  vector.quantize(plain, { codewords = 16 })
  vector.calibrate(book, calls, { codewords = 16, candidates = 1, steps = 60, codebook_lr = 3e-3 })
  local report = vector.calibrate(both, calls, { codewords = 16, steps = 60, codebook_lr = 3e-3, logits_lr = 0.3,
    ratio_weight = 0.01 })
  check.ok(error(book) < error(plain) * 0.8, ("the codebook: %g of %g"):format(error(book), error(plain)))
  check.ok(error(both) < error(plain) * 0.8, ("and assignments: %g"):format(error(both)))
  check.ok(report.changed > 0 and report.settled > 0, "assignments change")
  check.equal(#report.losses, 60)
  local layer = both.blocks[2].down
  check.ok(layer.logits == nil and layer.candidates == nil and layer.weight == nil, "no soft weights are left")
  check.equal(layer.codes.dtype, "u8")
  for _, p in ipairs(both:parameters()) do check.ok(p:isfinite():all():item()) end
end)

check.test("what is refused", function()
  check.fails(function() vector.kmeans(ty.ones(3)) end, "quant.vector.kmeans: vectors: expected %[n, d%]")
  check.fails(function() vector.quantize(network(), { codewords = 300 }) end, "codewords: expected an integer in")
  check.fails(function() vector.quantize(network(), { dimension = 5 }) end, "no layer's inputs are a multiple of 5")
  check.fails(function() vector.calibrate(network(), {}) end, "calls: expected at least one")
  check.fails(function() vector.calibrate(network(), calls, { start = "far" }) end, 'start: expected "even"')
  check.fails(function() vector.weight(nn.Linear(2, 2)) end, "expected a layer of codewords")
  check.fails(function() vector.ratios(nn.Linear(2, 2)) end, "expected a layer of begin")
end)

check.test("products of many rows with codes: near those in f64, and of numbers of any size", function()
  ty.manual_seed(9)
  local codes, book = ty.randint(0, 256, { 600, 90 }):to "u8", ty.randn(256, 4)
  local x = ty.randn(2, 360)
  local w = book:index_select(0, codes:flatten():to "i64"):reshape(600, 360):to "f64"
  local want = ty.linear(x:to "f64", w)
  local function off(factor)
    local y = ty.linear_codebook(x * factor, codes, book):to "f64" / factor
    return ((y - want):square():sum() / want:square():sum()):sqrt():item()
  end
  for _, factor in ipairs { 1, 2.0 ^ 105, 2.0 ^ -110 } do check.ok(off(factor) < 1e-6) end
  check.ok(ty.linear_codebook(x * 0, codes, book):eq(0):all():item())
  x:narrow(0, 1, 1):narrow(1, 5, 1):fill_(0 / 0)
  local y = ty.linear_codebook(x, codes, book)
  check.ok(y:narrow(0, 1, 1):isnan():all():item() and y:narrow(0, 0, 1):isfinite():all():item())
end)

check.finish()
