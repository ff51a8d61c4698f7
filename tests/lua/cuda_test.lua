-- What concerns a GPU as a whole; each op has its tests in run_ops.lua --device cuda. Without a GPU, and without the
-- emulated device (TYCHO_CUDA_LIBRARY), only the errors are tested.
local here = arg and arg[0]:match ".*/" or "tests/lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local nn, optim = ty.nn, ty.optim
local count, why = ty.cuda.count()

local function live()
  collectgarbage()
  collectgarbage()
  return ty.memory.stats("cuda").live
end

check.test("names of devices", function()
  check.fails(function() ty.zeros(2, { device = "cuda:x" }) end, "unknown device")
  check.fails(function() ty.zeros(2, { device = "gpu" }) end, "unknown device")
  check.fails(function() ty.zeros(2):to "cuda:99" end, count == 0 and why or "no such GPU; the last one here is cuda:")
  check.fails(function() ty.memory.stats "cuda:99" end, "memory: ")
  if count == 0 then
    check.equal(#why > 10, true, "a reason")
    check.fails(function() ty.zeros(2, { device = "cuda" }) end, why)
    check.fails(function() ty.cuda.synchronize() end, why)
  end
end)

if count == 0 then
  check.finish()
  return
end

check.test("moving, reading, printing", function()
  local x = ty.randn(3, 4)
  local g = x:to "cuda"
  check.equal(tostring(g.device), "cuda:0")
  check.equal(g:tolist(), x:tolist())
  check.equal(g["1, 2"]:item(), x["1, 2"]:item())
  check.equal(g:transpose(0, 1):to("cpu"):tolist(), x:transpose(0, 1):tolist())
  check.equal(tostring(g):gsub("cuda:0", "cpu"), tostring(x))
  check.equal(x:to({ device = "cuda", dtype = "f16" }):to("f32"):to("cpu"):tolist(), x:to("f16"):to("f32"):tolist())
  check.equal(ty.tensor({ { 1, 2 }, { 3, 4 } }, { device = "cuda" }):tolist(), { { 1, 2 }, { 3, 4 } })
  local y = ty.zeros(3, 4):copy_(g)
  check.equal(y:tolist(), x:tolist())
  y = ty.zeros(4, 3, { device = "cuda" }):transpose(0, 1):copy_(x)
  check.equal(y:tolist(), x:tolist())
  local leaf = ty.ones(3, 4):requires_grad_()
  ty.zeros(3, 4, { device = "cuda" }):copy_(leaf * 2):to("cpu"):sum():backward()
  check.equal(leaf.grad:sum():item(), 24)
  check.equal(ty.zeros(0, 3):to("cuda"):tolist(), {})
end)

check.test("gradients go where the tensors came from", function()
  local x = ty.randn(5):requires_grad_()
  local y = x:to "cuda" * 3
  y:sum():backward()
  check.equal(x.grad:tolist(), { 3, 3, 3, 3, 3 })
  check.equal(tostring(x.grad.device), "cpu")
end)

check.test("tensors on two devices", function()
  local x, g = ty.ones(3), ty.ones(3, { device = "cuda" })
  check.fails(function() return x + g end, "expected a tensor on cpu like the first argument")
  check.fails(function() return g + x end, "expected a tensor on cuda:0 like the first argument")
  -- a tensor without dimensions on the CPU is a number
  local two = ty.tensor(2.0)
  check.equal({ (g + two):tolist(), (two - g):tolist(), ty.where(g:gt(0), two, g):tolist() },
    { { 3, 3, 3 }, { 1, 1, 1 }, { 2, 2, 2 } })
  check.equal(ty.ones(3, { device = "cuda" }):mul_(two):tolist(), { 2, 2, 2 })
  check.equal((ty.arange(3, { device = "cuda" }) + ty.tensor((1 << 53) + 1)):tolist()[1], (1 << 53) + 1)
  check.fails(function() return two:add_(g) end, "expected a tensor on cpu like the first argument")
  check.fails(function() return g + ty.tensor { 2.0 } end, "expected a tensor on cuda:0 like the first argument")
  local w = ty.tensor(2.0):requires_grad_()
  ty.sum(g * w):backward()
  check.equal({ w.grad:item(), tostring(w.grad.device) }, { 3, "cpu" })
  if count > 1 then
    local h = g:to "cuda:1"
    check.equal(h:tolist(), { 1, 1, 1 })
    check.fails(function() return g + h end, "cuda:0")
    check.equal((h + 1):tolist(), { 2, 2, 2 })
    check.equal((g + 1):tolist(), { 2, 2, 2 })
  end
end)

check.test("an index out of range is raised when the GPU is waited for, and work goes on", function()
  local x = ty.ones(4, 2, { device = "cuda" })
  local bad = ty.tensor({ 1, 7 }, { device = "cuda", dtype = "i64" })
  check.fails(function() return x:index_select(0, bad):tolist() end, "index 7 is out of range for size 4")
  check.equal(x:sum():item(), 8)
  check.fails(function()
    ty.index_select(x, 0, bad)
    ty.cuda.synchronize()
  end, "index_select: index 7")
  ty.cuda.synchronize()
end)

check.test("long lines are sorted as on the CPU, digit by digit", function()
  local n = 131075
  local function alike(a, b, what) check.equal(ty.eq(a, b):all():item(), true, what) end
  local function try(x, dim, descending)
    local what = ("%s, dim %d, %s"):format(x.dtype, dim, descending and "falling" or "rising")
    local values, at = x:sort(dim, descending)
    local values_there, at_there = x:to("cuda"):sort(dim, descending)
    alike(at, at_there:to "cpu", what)
    values, values_there = values:to "f64", values_there:to("cpu"):to "f64"
    alike(ty.isnan(values), ty.isnan(values_there), what)
    alike(ty.where(ty.isnan(values), 0, values), ty.where(ty.isnan(values), 0, values_there), what)
    alike(ty.eq(1 / values, -math.huge), ty.eq(1 / values_there, -math.huge), what) -- -0 stays what it is
  end
  local x = ty.randn(n) * 50
  x["1::997"] = 0 / 0
  x["2::991"] = 0.0
  x["3::983"] = -0.0
  -- Late streams ask in what order things are done, which is the same for all dtypes.
  local lazy = os.getenv "TYCHO_EMULATED_STREAMS" == "lazy"
  for _, dtype in ipairs(lazy and { "f32" } or { "f32", "f64", "f16", "bf16" }) do
    try(x:to(dtype), 0, dtype == "f64")
  end
  local whole = ty.randint(-(1 << 40), 1 << 40, { n })
  for _, dtype in ipairs(lazy and { "i16" } or { "i64", "i32", "i16", "i8", "u8" }) do
    try(whole:to(dtype), 0, dtype == "i16")
  end
  try(ty.randn(n, 2), 0, true)
  local values, at = ty.topk(x:to("cuda"), 3000)
  local values_here, at_here = ty.topk(x, 3000)
  alike(at:to "cpu", at_here, "topk")
  alike(values:to("cpu")["200:"], values_here["200:"], "topk") -- behind the NaN
end)

check.test("a data set whose tensors lie on the GPU gives batches there", function()
  local x, y = ty.arange(0, 12):to "f32":reshape(6, 2), ty.arange(6)
  local options = { batch_size = 3, shuffle = true, seed = 1 }
  local loader = ty.data.DataLoader(ty.data.TensorDataset { x = x:to "cuda", y = y }, options)
  local on_cpu = ty.data.DataLoader(ty.data.TensorDataset { x = x, y = y }, options)
  for _ = 1, 2 do
    local batch, same = loader:next(), on_cpu:next()
    check.ok(batch.x.device == "cuda:0" and batch.y.device == "cpu")
    check.ok(batch.x:to("cpu"):equal(same.x) and batch.y:equal(same.y))
  end
end)

check.test("what nobody refers to any more does not pile up", function()
  live()
  local before = ty.memory.stats("cuda").live
  ty.memory.reset_peak "cuda"
  for _ = 1, 300 do ty.zeros(2 ^ 18, { device = "cuda" }) end -- 300 MiB
  check.equal(ty.memory.stats("cuda").peak - before < 150 * 2 ^ 20, true, "the peak")
end)

check.test("memory", function()
  local before = live()
  local x = ty.zeros(1000, { device = "cuda" })
  check.equal(live() - before >= 4000, true, "counted")
  x:free()
  check.equal(live(), before, "released")
  ty.memory.set_budget("cuda", before + 2 ^ 20)
  check.fails(function() return ty.zeros(2 ^ 20, { device = "cuda" }) end, "out of memory on cuda:0: wanted 4.0 MiB")
  ty.memory.set_budget("cuda")
  check.fails(function() return ty.zeros(2 ^ 42, { device = "cuda" }) end, "out of memory on cuda:0")
  check.equal(ty.zeros(2 ^ 18, { device = "cuda" }):sum():item(), 0)
  check.equal(live(), before)
end)

-- Some steps of a model on a device: losses and the parameters afterwards.
local function train(device, make, batch, compile)
  ty.manual_seed(3)
  local model = make():to(device)
  local opt = optim.AdamW(model:parameters(), { lr = 1e-2, clip_norm = 1 })
  local function step(x, y)
    local loss = nn.cross_entropy(model(x), y)
    opt:step(loss)
    return loss
  end
  if compile then step = ty.compile(step) end
  local losses = {}
  for i = 1, 6 do
    ty.manual_seed(100 + i)
    local x, y = batch()
    losses[i] = step(x:to { device = device }, y:to { device = device }):item()
  end
  local all = {}
  for i, p in ipairs(model:parameters()) do all[i] = p:detach():reshape(-1):tolist() end
  return losses, all
end

local models = {
  mlp = {
    function() return nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 5)) end,
    function() return ty.randn(8, 12), ty.randint(0, 5, { 8 }) end,
  },
  ["convolutions"] = {
    function()
      return nn.Sequential(nn.Conv2d(2, 6, 3, { padding = 1, bias = false }), nn.BatchNorm2d(6), nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3, { stride = 2 }), nn.GroupNorm(2, 8), nn.SiLU(), nn.Flatten(), nn.Linear(8, 5))
    end,
    function() return ty.randn(4, 2, 8, 8), ty.randint(0, 5, { 4 }) end,
  },
}
for name, m in pairs(models) do
  check.test("training on the GPU as on the CPU: " .. name, function()
    local losses, parameters = train("cpu", m[1], m[2])
    for _, compile in ipairs { false, true } do
      local what = compile and "compiled" or "plain"
      local l, p = train("cuda", m[1], m[2], compile)
      check.close(l, losses, 1e-4, "losses, " .. what)
      check.close(p, parameters, 1e-3, "parameters, " .. what)
    end
  end)
end

check.test("compiled functions: inputs that move, results that stay, one device", function()
  local w = ty.randn(4, 6):to "cuda"
  local function f(x, s) return (x * w):sum { 1 } * s, x + w end
  local g = ty.compile(f)
  local kept = {}
  for i = 1, 6 do
    local x = ty.randn(4, 6):to "cuda"
    local a, b = g(x, 2)
    local p, q = f(x, 2)
    kept[i] = { a, b, p:tolist(), q:tolist() }
  end
  for i = 1, 6 do
    check.close(kept[i][1]:tolist(), kept[i][3], 1e-6, "call " .. i)
    check.equal(kept[i][2]:tolist(), kept[i][4], "call " .. i)
  end
  check.fails(function()
    local two = ty.compile(function(x) return x + 1, ty.ones(2) * 2 end)
    for _ = 1, 3 do two(w) end
  end, "one device")
  check.fails(function()
    local into = ty.compile(function(x)
      w:copy_(ty.zeros(4, 6))
      return x + w
    end)
    for _ = 1, 3 do into(w) end
  end, "copy_: source: inside ty.compile nothing is copied from cpu into a tensor on cuda:0")
end)

check.test("optimizers with a state in a subspace step as on the CPU", function()
  local function wave(shape, offset)
    return ((ty.arange(shape[1] * shape[2], { dtype = "f64" }) + offset) * 0.37):sin():to("f32"):reshape(shape)
  end
  local cases = { { "APOLLO", { rank = 3 } }, { "APOLLO", { mini = true } }, { "FRUGAL", { density = 0.6 } },
    { "FRUGAL", { projection = "columns" } } }
  if pcall(ty.svd, ty.ones({ 2, 2 }, { device = "cuda" })) then -- cuSOLVER is there
    table.move({ { "GaLore", { rank = 3 } }, { "GaLore", { rank = 60, bits = 8 } },
      { "FRUGAL", { projection = "random" } }, { "FRUGAL", { projection = "svd" } } }, 1, 4, #cases + 1, cases)
  end
  for _, case in ipairs(cases) do
    case[2].refresh = 2
    local function run(device)
      ty.manual_seed(1)
      local list = {}
      for i, shape in ipairs { { 80, 70 }, { 65, 90 } } do
        list[i] = wave(shape, i):to(device):requires_grad_()
      end
      local opt = optim[case[1]](list, case[2])
      for _ = 1, 3 do
        for _, p in ipairs(list) do p:set_grad(ty.randn(p.shape):to(device)) end
        opt:step()
      end
      return list, opt:state_bytes()
    end
    local want, bytes = run "cpu"
    local got, same = run "cuda"
    check.equal(same, bytes)
    for i in ipairs(want) do
      local distance = (got[i]:to "cpu" - want[i]):abs():max():item()
      check.ok(distance < 1e-3, ("%s: %g"):format(case[1], distance))
    end
  end
end)

check.test("an optimizer of 8 bits inside a compiled step", function()
  local function run(compiled)
    ty.manual_seed(5)
    local layer = nn.Linear(64, 64):to "cuda"
    local opt = optim.AdamW(layer:parameters(), { lr = 1e-2, bits = 8 })
    local step = function(x)
      local loss = layer(x):pow(2):mean()
      opt:step(loss)
      return loss
    end
    if compiled then step = ty.compile(step) end
    local x, losses = ty.randn(8, 64):to "cuda", {}
    for i = 1, 6 do losses[i] = step(x):item() end
    return losses
  end
  check.close(run(true), run(false), 1e-5)
end)

-- What a model's init() makes by itself goes where its layers go.
check.test("parameters and buffers of new modules are on the default device", function()
  local Own = nn.module "Own"
  function Own:init()
    self.layer, self.free = nn.Linear(2, 2), nn.Parameter(ty.ones(2))
    self:buffer("seen", ty.zeros(2))
    self:parameter("frozen", ty.zeros(2))
  end
  local made = nn.with_defaults({ device = "cuda" }, Own)
  for _, key in ipairs { "free", "seen", "frozen" } do check.equal(tostring(made[key].device), "cuda:0", key) end
  check.equal({ made.free.requires_grad, made.seen.requires_grad, made.frozen.requires_grad }, { true, false, false })
  check.equal(made.free:tolist(), { 1, 1 })
  check.equal(#made:parameters(), 4)
end)

-- The device of a run is where something was made, not what was asked for.
check.test("a recipe that makes nothing on its device says so", function()
  local root, first = os.tmpname(), 0
  os.remove(root)
  ty.io.mkdir(root)
  while arg[first - 1] do first = first - 1 end
  for _, case in ipairs { { "", "cpu" }, { "ty.zeros(2, { device = r.device })", "cuda" } } do
    ty.io.write_atomic(root .. "/r.lua", ([[
-- A test
-- claim: it works
-- system: none
-- paper: nobody 2024
-- time: no time
local ty = require "tycho"
local r = ty.recipe.declare { args = {} }
%s
os.exit(r:finish { { claim = "one", measured = 1, bar = 1 } }, true)
]]):format(case[1]))
    local done = os.execute(("'%s' '%s/r.lua' --device cuda --out '%s' >'%s/log' 2>&1"):format(arg[first], root, root,
      root))
    local log = ty.io.read(root .. "/log")
    check.equal(done, true, log)
    check.equal(ty.io.load_json(root .. "/metrics.json").device, case[2])
    check.equal(log:find("made nothing there", 1, true) ~= nil, case[2] == "cpu")
  end
  for _, name in ipairs(ty.io.listdir(root)) do os.remove(root .. "/" .. name) end
  os.remove(root)
end)

check.finish()
