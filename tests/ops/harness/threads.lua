-- The same results, byte for byte, with one thread and with two: calls big enough that the kernels split their work.

local layout = require "layout"
local report = require "report"

local threads = {}
local ty

function threads.use(library) ty = library end

local function r(...) return ty.randn { ... } end

-- One call per family with tensors of some hundred thousand elements; rows add `big = function(ty) return results...
-- end`.
local big = {
  exp = function() return ty.exp(r(300, 700)) end,
  add = function() return r(300, 700) + r(700) end,
  where = function() return ty.where(r(300, 700):gt(0), r(300, 700), 0) end,
  contiguous = function() return r(300, 700):transpose(0, 1):contiguous() end,
  cast = function() return r(300, 700):to "f16" end,
  sum = function() local x = r(300, 700); return x:sum(), x:sum { 0 }, x:sum { 1 } end,
  mean = function() local x = r(30, 70, 100); return x:mean(), x:mean { 0, 2 }, x:mean { 1 } end,
  var = function() local x = r(300, 700); return x:var(), x:var { 0 }, x:var { 1 } end,
  logsumexp = function() local x = r(300, 700); return x:logsumexp(), x:logsumexp { 0 } end,
  max = function() local x = r(300, 700); return x:max(), x:max { 0 }, x:argmax { 1 } end,
  softmax = function() local x = r(300, 700); return x:softmax(1), x:softmax(0) end,
  cumsum = function() local x = r(300, 700); return x:cumsum(0), x:cumsum(1) end,
  sort = function() return r(300, 700):sort(1) end,
  topk = function() return r(300, 700):topk(5, 1) end,
  matmul = function()
    return ty.matmul(r(200, 300), r(300, 250)), ty.matmul(r(8, 60, 70), r(8, 70, 50)), ty.matmul(r(500, 600), r(600))
  end,
  linear = function() return ty.linear(r(128, 300), r(200, 300), r(200)) end,
  conv2d = function() return ty.conv2d(r(4, 8, 32, 32), r(16, 8, 3, 3), r(16), { padding = 1 }) end,
  max_pool2d = function() return ty.max_pool2d(r(8, 16, 32, 32), 2) end,
  interpolate = function() return ty.interpolate(r(8, 16, 32, 32), { 48, 48 }, { mode = "bilinear" }) end,
  layer_norm = function() return ty.layer_norm(r(512, 300), 300, r(300), r(300)) end,
  rms_norm = function() return ty.rms_norm(r(512, 300), 300, r(300)) end,
  group_norm = function() return ty.group_norm(r(8, 16, 32, 32), 4, r(16), r(16)) end,
  embedding = function() return ty.embedding(r(500, 64), ty.randint(0, 500, { 4000 })) end,
  index_add = function() return ty.index_add(r(500, 64), 0, ty.randint(0, 500, { 4000 }), r(4000, 64)) end,
  scatter_add = function() return ty.scatter_add(r(500, 64), 0, ty.randint(0, 500, { 4000, 64 }), r(4000, 64)) end,
  cross_entropy = function() return ty.cross_entropy(r(512, 300), ty.randint(0, 300, { 512 })) end,
  scaled_dot_product_attention = function()
    return ty.scaled_dot_product_attention(r(2, 4, 100, 32), r(2, 2, 120, 32), r(2, 2, 120, 32), { causal = true })
  end,
  rand = function() return ty.rand(300, 700) end,
  randn = function() return ty.randn(300, 700) end,
  dropout = function() return ty.dropout(r(300, 700), 0.3) end,
}

-- Values of the results and of the gradients of the random tensors that the call made.
local function run(fn, count)
  ty.set_threads(count)
  ty.manual_seed(5)
  local leaves = {}
  local make = r
  r = function(...)
    local x = make(...):requires_grad_()
    leaves[#leaves + 1] = x
    return x
  end
  local results = table.pack(pcall(fn, ty))
  r = make
  if not results[1] then error(results[2], 0) end
  local values = {}
  local loss
  for i = 2, results.n do
    values[#values + 1] = layout.values(results[i])
    if results[i].requires_grad then
      local part = (results[i]:to "f32" * 0.5):square():sum()
      loss = loss and loss + part or part
    end
  end
  if loss then
    loss:backward()
    for _, x in ipairs(leaves) do
      if x.grad then values[#values + 1] = layout.values(x.grad) end
    end
  end
  return values
end

local function first_difference(a, b)
  for k = 1, #a do
    for i = 1, #a[k] do
      if a[k][i] ~= b[k][i] and not (a[k][i] ~= a[k][i] and b[k][i] ~= b[k][i]) then
        return string.format("result %d, value %d: %.9g with one thread, %.9g with two", k, i - 1, a[k][i], b[k][i])
      end
    end
  end
  return nil
end

--- The check of one op, if it has a big call.
function threads.run(row)
  local fn = row.big or big[row.name]
  if not fn then return end
  local before = ty.threads()
  local ok, text = pcall(function() return first_difference(run(fn, 1), run(fn, 2)) end)
  ty.set_threads(before)
  report.check(ok and text == nil, row.name, "threads", "%s", text)
end

return threads
