-- Modules: structure, state, initialisation, and outputs against PyTorch (tests/fixtures/make_modules.py).
local here = arg and arg[0]:match ".*/" or "tests/lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local nn = ty.nn

local fixture = ty.io.load_npz(check.root .. "tests/fixtures/modules_torch.npz")

-- scale sin(0.37 i + offset), as wave() in the script.
local function wave(shape, offset, scale)
  local n = 1
  for _, size in ipairs(shape) do n = n * size end
  return ((ty.arange(n):to "f64" * 0.37 + offset):sin() * (scale or 0.3)):reshape(shape)
end

local function fill(module)
  for name, t in pairs(module:state_dict()) do
    if t:is_floating_point() then
      local sum = 0
      for i = 1, #name do sum = sum + name:byte(i) end
      local value = wave(t.shape, sum % 97)
      if name:match "running_var$" then value = value:abs() + 0.5 end
      t:copy_(value)
    end
  end
  return module
end

local function near(tensor, name, tolerance)
  local expected = fixture[name]
  check.equal(table.concat(tensor.shape, ","), table.concat(expected.shape, ","), name .. " shape")
  local distance = (tensor:to "f64" - expected:to "f64"):abs():max():item()
  check.equal(distance < (tolerance or 2e-5), true, name .. ": differs by " .. distance)
end

check.test("a class keeps the order of its fields", function()
  local Net = nn.module "Net"
  function Net:init()
    self.zeta = nn.Linear(3, 4)
    self.alpha = nn.Parameter(ty.zeros(2))
    self.mid = nn.ModuleList { nn.Linear(4, 4), nn.Linear(4, 1, { bias = false }) }
    self:buffer("count", ty.zeros(1))
    self:buffer("scratch", ty.zeros(1), { persistent = false })
    self.plain = 3
  end
  function Net:forward(x) return self.mid[2](self.mid[1](self.zeta(x))) + self.plain end
  local net = Net()
  local names = {}
  for name in net:named_parameters() do names[#names + 1] = name end
  check.equal(names, { "alpha", "zeta.weight", "zeta.bias", "mid.0.weight", "mid.0.bias", "mid.1.weight" }, "names")
  check.equal(#net:parameters(), 6)
  check.equal(net:count_parameters(), 2 + 16 + 20 + 4)
  net.zeta:requires_grad_(false)
  check.equal({ net:count_parameters(true), net:count_parameters(false) }, { 2 + 20 + 4, 42 })
  net.zeta:requires_grad_()
  local state = net:state_dict()
  check.equal(state.count ~= nil, true)
  check.equal(state.scratch, nil)
  check.equal(net(ty.ones(2, 3)).shape, { 2, 1 })
  check.equal(tostring(net):match "^Net%s" ~= nil, true)
  check.equal(tostring(net):match "zeta: Linear%(3, 4%)%s+16\n" ~= nil, true, tostring(net))
end)

check.test("inheritance, shared parameters, replacing and cloning", function()
  local Base = nn.module "Base"
  function Base:init(width) self.fc = nn.Linear(width, width) end
  function Base:forward(x) return self.fc(x) end
  local Derived = nn.module(Base)
  function Derived:init(width)
    Base.init(self, width)
    self.tied = nn.Linear(width, width)
    self.tied.weight = self.fc.weight
  end
  local d = Derived(3)
  check.equal(d(ty.ones(1, 3)).shape, { 1, 3 })
  check.equal(#d:parameters(), 3, "the shared weight once")
  check.equal(d:state_dict()["tied.weight"] ~= nil, true)
  local copy = d:clone()
  check.equal(rawequal(copy.fc.weight, copy.tied.weight), true, "still shared")
  check.equal(rawequal(copy.fc.weight, d.fc.weight), false)
  ty.no_grad(function() copy.fc.weight:fill_(7) end)
  check.equal(d.fc.weight:max():item() < 7, true)
  d:set("tied", nn.Linear(3, 2))
  check.equal(d:get "tied.weight".shape, { 2, 3 })
  check.fails(function() d:set("nothing.here", nn.Linear(1, 1)) end, "no 'nothing.here'")
end)

check.test("names that are not there say the nearest, at the line that asked", function()
  local peft, quant = require "tycho.peft", require "tycho.quant"
  for text, ask in pairs { ["ty.nn has no 'Linnear'; did you mean Linear%?"] = function() return ty.nn.Linnear end,
    ["ty.optim has no 'AdanW'; did you mean .*AdamW"] = function() return ty.optim.AdanW end,
    ["ty.data has no 'DataLoder'; did you mean DataLoader%?"] = function() return ty.data.DataLoder end,
    ["tycho.peft has no 'laura'"] = function() return peft.laura end,
    ["tycho.quant has no 'quantise'; did you mean quantize%?"] = function() return quant.quantise end } do
    check.fails(ask, "nn_test.lua:%d+: " .. text)
  end
  check.equal({ ty.nn._none, ty.nn[1], ty.optim[true], rawget(ty.nn, "Linnear") }, {})
end)

check.test("mistakes have readable errors", function()
  local Bad = nn.module "Bad"
  function Bad:init() self.list = { nn.Linear(1, 1) } end
  check.fails(function() Bad() end, "nn.ModuleList")
  check.fails(function() nn.Linear(3, 4, { bais = true }) end, "Linear: no option 'bais'")
  check.fails(function() nn.Linear(0, 4) end, "Linear: inputs: expected an integer >= 1, got 0")
  check.fails(function() nn.GroupNorm(3, 4) end, "GroupNorm: groups: expected a divisor of the 4 channels, got 3")
  check.fails(function() nn.Conv2d(4, 6, 3, { algorithm = "fft" }) end, 'algorithm: expected "library" or "im2win"')
  check.fails(function() nn.Conv2d(4, 6, 3, { groups = 4 }) end,
    "groups: expected a divisor of inputs 4 and outputs 6, got 4")
  check.fails(function() nn.MultiheadAttention(6, 4) end, "heads: expected a divisor of the width 6, got 4")
  check.fails(function() nn.Sequential(3) end, "expected a module")
  check.fails(function() nn.module "Empty"()(1) end, "Empty has no forward")
end)

check.test("train, eval, freezing, dtypes", function()
  local net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
  net:eval()
  check.equal(net[2].training, false)
  local x = ty.randn(3, 4)
  check.equal(net(x):tolist(), net(x):tolist(), "no dropout in evaluation")
  net:train()
  check.equal(net[2].training, true)
  net:requires_grad_(false)
  check.equal(#net:parameters(), 4, "frozen parameters stay parameters")
  check.equal(net:parameters()[1].requires_grad, false)
  net:requires_grad_(true)
  net:to "f64"
  check.equal(net[1].weight.dtype, "f64")
  check.equal(net[3].running_mean.dtype, "f64")
  check.equal(net[3].num_batches_tracked.dtype, "i64")
  check.equal(net[1].weight.requires_grad, true)
  net(x:to "f64"):sum():backward()
  check.equal(net[1].weight.grad ~= nil, true)
  net:zero_grad()
  check.equal(net[1].weight.grad, nil)
end)

check.test("state: strict loading reports what does not fit", function()
  local a = nn.ModuleList { nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 2) }
  local state = a:state_dict()
  state["1.weight"], state["2.weight"], state["9.weight"] = nil, nil, ty.zeros(1)
  state["0.weight"] = ty.zeros(5, 5)
  local b = nn.ModuleList { nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 2) }
  local before = b[1].bias:tolist()
  local ok, text = pcall(b.load_state_dict, b, state)
  check.equal(ok, false)
  check.equal(text:find("missing (2)", 1, true) ~= nil, true, text)
  check.equal(text:find("N.weight (2 of them)", 1, true) ~= nil, true, text)
  check.equal(text:find("unexpected (1)", 1, true) ~= nil, true, text)
  check.equal(text:find("0.weight: the module has [3, 2], the state [5, 5]", 1, true) ~= nil, true, text)
  check.equal(b[1].bias:tolist(), before, "nothing changed")
  local report = b:load_state_dict(state, { strict = false })
  check.equal(#report.missing, 2)
  check.equal(b[1].bias:tolist(), a[1].bias:tolist(), "what fits is taken")
end)

check.test("state: files", function()
  local path = os.tmpname() .. ".safetensors"
  local function make() return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)) end
  local a, b = make(), make()
  a:train()(ty.randn(2, 1, 5, 5))
  a:save(path)
  b:load(path)
  check.equal(b[2].running_mean:tolist(), a[2].running_mean:tolist())
  check.equal(b[2].num_batches_tracked:item(), 1)
  check.fails(function() nn.Linear(1, 1):load(path) end, "does not fit the module")
  os.remove(path)
end)

check.test("hooks around forward", function()
  local layer = nn.Linear(2, 2)
  local seen = {}
  local remove_before = layer:register_forward_pre_hook(function(_, x) seen[1] = x return x * 0 end)
  local remove_after = layer:register_forward_hook(function(_, outputs) seen[2] = outputs[1] end)
  check.close(layer(ty.ones(1, 2)):tolist(), { layer.bias:tolist() }, 1e-6)
  check.equal(seen[1] ~= nil and seen[2] ~= nil, true)
  remove_before()
  remove_after()
  seen = {}
  layer(ty.ones(1, 2))
  check.equal(seen[1], nil)
end)

check.test("the dropout of MultiheadAttention is of the weights", function()
  -- Values that are all 1: what comes out of a head is the sum of its weights that are left, the same in all its width.
  local mha = nn.MultiheadAttention(8, 2, { dropout = 0.5 })
  nn.init.zeros(mha.in_proj_weight)
  nn.init.zeros(mha.in_proj_bias)
  nn.init.ones(mha.in_proj_bias:narrow(0, 16, 8):detach())
  mha.out_proj.weight:detach():copy_(ty.eye(8))
  local x = ty.randn(3, 4, 8)
  ty.manual_seed(5)
  local y = mha(x):detach():reshape(3, 4, 2, 4)
  check.equal((y - y["..., 0:1"]):abs():max():item() < 1e-6, true)
  local kept = {}
  for _, sum in ipairs(y["..., 0"]:reshape(-1):tolist()) do kept[("%.3f"):format(sum)] = true end
  local count = 0 -- of the sums of four weights of 1 / 4, each kept with 1 / 2 and doubled then: 0, 0.5 ... 2
  for sum in pairs(kept) do
    check.equal(tonumber(sum) * 2 % 1, 0.0)
    count = count + 1
  end
  check.ok(count > 2, count)
  mha:eval()
  check.equal((mha(x) - 1):abs():max():item() < 1e-6, true)
end)

check.test("PyTorch: attention and the encoder layer", function()
  local x, memory = wave({ 2, 5, 8 }, 1, 1):to "f32", wave({ 2, 3, 8 }, 2, 1):to "f32"
  local wide = wave({ 2, 3, 6 }, 3, 1):to "f32"
  local mha = fill(nn.MultiheadAttention(8, 2))
  near(mha(x), "mha_self/out")
  near(mha(x, x, x), "mha_self/out")
  near(mha(x, memory, memory), "mha_cross/out")
  near(mha(x, memory), "mha_cross/out")
  local swapped = fill(nn.MultiheadAttention(8, 2, { batch_first = false }))
  near(swapped(x:transpose(0, 1)):transpose(0, 1), "mha_self/out")
  near(fill(nn.MultiheadAttention(8, 2, { kdim = 6, vdim = 6 }))(x, wide, wide), "mha_kdim/out")
  near(fill(nn.TransformerEncoderLayer(8, 2, { feedforward = 16, dropout = 0 }))(x), "encoder_post/out")
  near(fill(nn.TransformerEncoderLayer(8, 2,
    { feedforward = 16, dropout = 0, activation = "gelu", norm_first = true }))(x), "encoder_pre/out")
end)

check.test("PyTorch: convolutions and batch norm", function()
  local image = wave({ 2, 4, 5, 6 }, 4, 1):to "f32"
  local up = nn.ConvTranspose2d(4, 6, 3, { stride = 2, padding = 1, output_padding = 1, groups = 2 })
  near(fill(up)(image), "conv_transpose/out")
  near(fill(nn.Conv2d(4, 6, 3, { padding = 2, dilation = 2, groups = 2 }))(image), "conv_dilated/out")
  near(fill(nn.Conv2d(4, 6, 3, { padding = 2, dilation = 2, groups = 2, algorithm = "im2win" }))(image),
    "conv_dilated/out")
  local norm = fill(nn.BatchNorm2d(4))
  for i = 0, 2 do near(norm(image * (i + 1) + i), "batch_norm/train" .. i) end
  near(norm:eval()(image), "batch_norm/eval")
  near(norm.running_mean, "batch_norm/running_mean")
  near(norm.running_var, "batch_norm/running_var")
end)

check.test("PyTorch: the U-Net has diffusers' names and results", function()
  local diffusion = require "tycho.diffusion"
  for _, shift in ipairs { "default", "scale_shift" } do
    local model = fill(diffusion.UNet { levels = { 8, { channels = 16, attention = true } }, classes = 10, groups = 4,
      heads = 2, scale_shift = shift == "scale_shift" })
    check.equal(model:count_parameters(), fixture["unet_" .. shift .. "/parameters"]:item(), "parameters")
    local x = wave({ 2, 1, 8, 8 }, 7, 1):to "f32"
    near(model:eval()(x, ty.tensor { 10.0, 700.0 }, { labels = ty.tensor { 3, 10 } }), "unet_" .. shift .. "/out", 1e-4)
  end
end)

check.test("the diffusion transformer has the public names", function()
  local diffusion = require "tycho.diffusion"
  local model = diffusion.DiT { width = 32, depth = 2, heads = 4, classes = 10 }
  local state = model:state_dict()
  for _, name in ipairs {
    "x_embedder.proj.weight", "t_embedder.mlp.0.weight", "t_embedder.mlp.2.bias", "pos_embed",
    "y_embedder.embedding_table.weight", "blocks.1.attn.qkv.weight", "blocks.0.attn.proj.bias",
    "blocks.1.mlp.fc1.weight", "blocks.0.mlp.fc2.weight", "blocks.1.adaLN_modulation.1.weight",
    "final_layer.linear.weight", "final_layer.adaLN_modulation.1.bias" } do
    check.equal(state[name] ~= nil, true, name)
  end
  local count = 0
  for _ in pairs(state) do count = count + 1 end
  check.equal(count, 2 + 4 + 1 + 1 + 2 * 10 + 4, "nothing else")
  local y = model(ty.randn(2, 1, 8, 8), ty.tensor { 1.0, 500.0 }, { labels = ty.tensor { 0, 10 } })
  check.equal(y.shape, { 2, 1, 8, 8 })
  check.equal(y:abs():max():item(), 0.0, "starts at zero")
  -- Column positions come first; position 0 is sin 0 = 0, cos 0 = 1.
  local row = model.pos_embed:select(0, 0):select(0, 1):tolist()
  check.close(row[1], math.sin(1), 1e-6)
  check.close(row[17], 0.0, 1e-6)
end)

local function moments(t)
  local x = t:to "f64"
  return x:mean():item(), x:std():item()
end

check.test("initialisers have their moments", function()
  ty.manual_seed(1)
  local t = ty.empty(400, 300)
  local function uniform(bound, what)
    local mean, std = moments(t)
    check.close(mean, 0, 4 * bound / math.sqrt(3 * 120000), what)
    check.close(std, bound / math.sqrt(3), bound * 0.01, what)
    check.equal(t:abs():max():item() <= bound * (1 + 1e-6), true, what)
  end
  uniform(1 / math.sqrt(300), "nothing", nn.init.kaiming_uniform(t, { a = math.sqrt(5) }))
  nn.init.kaiming_uniform(t)
  uniform(math.sqrt(6 / 300), "kaiming_uniform")
  nn.init.kaiming_uniform(t, { mode = "fan_out", nonlinearity = "linear" })
  uniform(math.sqrt(3 / 400), "kaiming_uniform fan_out")
  nn.init.xavier_uniform(t, 2)
  uniform(2 * math.sqrt(6 / 700), "xavier_uniform")
  local function normal(mean, std, what)
    local m, s = moments(t)
    check.close(m, mean, 5 * std / math.sqrt(120000), what)
    check.close(s, std, 0.01 * std, what)
  end
  nn.init.kaiming_normal(t, { nonlinearity = "relu" })
  normal(0, math.sqrt(2 / 300), "kaiming_normal")
  nn.init.xavier_normal(t)
  normal(0, math.sqrt(2 / 700), "xavier_normal")
  nn.init.normal(t, 3, 0.5)
  normal(3, 0.5, "normal")
  nn.init.trunc_normal(t, 1, 0.5)
  normal(1, 0.5 * 0.8796, "trunc_normal") -- the deviation of a normal cut at two deviations is 0.8796
  check.equal(t:max():item() <= 2 and t:min():item() >= 0, true)
  local linear = nn.Linear(300, 400)
  t = linear.weight:detach()
  uniform(1 / math.sqrt(300), "Linear")
  t = nn.Conv2d(12, 400, 5):get "weight":detach():reshape(400, 300)
  uniform(1 / math.sqrt(300), "Conv2d")
  t = nn.Embedding(400, 300):get "weight":detach()
  normal(0, 1, "Embedding")
  check.equal(nn.LayerNorm(4).weight:tolist(), { 1, 1, 1, 1 })
end)

check.test("with_defaults: dtype, device, no initialisation", function()
  local big = nn.with_defaults({ device = "meta", init = false }, nn.Linear, 100000, 100000)
  check.equal(big.weight.device, "meta")
  local half = nn.with_defaults({ dtype = "bf16" }, nn.Linear, 4, 4)
  check.equal(half.weight.dtype, "bf16")
  check.equal(nn.Linear(4, 4).weight.dtype, "f32")
  check.fails(function() nn.with_defaults({ dtype = "f32" }, function() error "inside" end) end, "inside")
  check.fails(function() nn.with_defaults({ device = "gpu" }, nn.Linear, 2, 2) end,
    'nn_test.lua:%d+: with_defaults: unknown device "gpu"')
  check.equal(nn.Linear(4, 4).weight.dtype, "f32")
end)

check.test("functions", function()
  check.close(nn.normalize(ty.tensor { { 3.0, 4.0 } }):tolist(), { { 0.6, 0.8 } }, 1e-6)
  local cosine = nn.cosine_similarity(ty.tensor { { 1.0, 0.0 } }, ty.tensor { { 1.0, 1.0 } })
  check.close(cosine:tolist(), { math.sqrt(0.5) }, 1e-6)
  check.close(nn.accuracy(ty.tensor { { 0.1, 0.9 }, { 0.8, 0.2 } }, ty.tensor { 1, 1 }), 0.5, 1e-9)
  check.close(nn.smooth_l1_loss(ty.tensor { 0.0, 3.0 }, ty.tensor { 0.5, 0.0 }, { beta = 2 }):item(),
    (0.5 ^ 2 / 4 + (3 - 1)) / 2, 1e-6)
end)

check.test("split, chunk, unbind share memory", function()
  local x = ty.arange(10)
  local a, b, c = x:split(4)
  check.equal({ a:tolist(), b:tolist(), c:tolist() }, { { 0, 1, 2, 3 }, { 4, 5, 6, 7 }, { 8, 9 } })
  a:fill_(5)
  check.equal(x[0]:item(), 5)
  local p, q = x:reshape(2, 5):split({ 2, 3 }, 1)
  check.equal({ p.shape, q.shape }, { { 2, 2 }, { 2, 3 } })
  check.fails(function() x:split { 3, 3 } end, "expected a sum of 10")
  check.equal(select("#", ty.chunk(ty.zeros(7, 2), 3)), 3)
  check.equal(select("#", ty.zeros(3, 2):unbind(1)), 2)
  check.fails(function() x:chunk(0) end, "chunk: count: expected an integer >= 1, got 0")
  check.fails(function() x:split(2, 3) end, "dim")
end)

check.test("meshgrid", function()
  local x, y = ty.meshgrid { ty.tensor { 1, 2 }, ty.tensor { 3, 4, 5 } }
  check.equal({ x:tolist(), y:tolist() }, { { { 1, 1, 1 }, { 2, 2, 2 } }, { { 3, 4, 5 }, { 3, 4, 5 } } })
  x, y = ty.meshgrid({ ty.tensor { 1, 2 }, ty.tensor { 3, 4, 5 } }, { indexing = "xy" })
  check.equal({ x:tolist(), y:tolist() }, { { { 1, 2 }, { 1, 2 }, { 1, 2 } }, { { 3, 3 }, { 4, 4 }, { 5, 5 } } })
  check.equal(select("#", ty.meshgrid { ty.arange(2), ty.tensor(1), ty.arange(3) }), 3)
  check.fails(function() ty.meshgrid({ x }, { indexing = "yx" }) end, "meshgrid: indexing")
  check.fails(function() ty.meshgrid { ty.zeros(2, 2) } end, "meshgrid: xs: expected lists [n]")
end)

check.test("rows in parts are the rows", function()
  local x, calls = ty.randn(7, 3):to("f64"):requires_grad_(), {}
  local function fn(rows)
    calls[#calls + 1] = rows.shape[1]
    return rows:exp() * 2
  end
  local y = nn.in_parts(x, 3, fn)
  check.equal(calls, { 3, 3, 1 })
  check.equal((y - fn(x)):abs():max():item(), 0)
  check.equal((ty.grad(y:sum(), { x })[1] - x:exp() * 2):abs():max():item(), 0)
  check.equal(nn.in_parts(x:narrow(0, 0, 0), 3, fn).shape, { 0, 3 })
  check.fails(function() nn.in_parts(x, 0, fn) end, "in_parts: most: expected an integer >= 1, got 0")
  check.fails(function() nn.in_parts(ty.tensor(1.0), 2, fn) end, "in_parts: x: expected [n, ...]")
end)

check.finish()
