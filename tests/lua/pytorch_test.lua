-- What those who come from PyTorch write: names and options that are taken, and errors that say what is called
-- otherwise.
local here = arg[0]:match(".*/") or "./"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local nn, optim = ty.nn, ty.optim
local pytorch = require "tycho.pytorch"

local function message(fn, ...)
  local ok, problem = pcall(fn, ...)
  check.ok(not ok, "an error")
  return tostring(problem)
end

check.test("every name that stands for one of PyTorch's is there", function()
  for module, names in pairs(pytorch.renamed) do
    for theirs, ours in pairs(names) do
      local at = ty
      for part in (ours or ""):gmatch "[^.]+" do
        local ok, value = pcall(function() return at[part] end)
        if not ok or value == nil then
          check.ok(false, ("%s.%s: ty.%s is not there"):format(module, theirs, ours))
          break
        end
        at = value
      end
    end
  end
end)

check.test("errors about unknown names say what to write", function()
  for _, case in ipairs {
    { function() return optim.StepLR end, "ty.optim.step" },
    { function() return optim.lr_scheduler end, "optim.cosine" },
    { function() return nn.functional end, "functions of ty" }, { function() return ty.autograd end, "ty.grad" },
    { function() return ty.ones(1):numpy() end, "tolist" }, { function() return ty.ones(1):prelu() end, "ty.nn.prelu" },
    { function() return ty.prelu end, "ty.nn.prelu" }, { function() return ty.data.Dataset end, "from_function" },
    { function() return ty.linalg end, "ty.svd" }, { function() return nn.Lineer end, "Linear" },
    { function() ty.ones(1).grad = nil end, "zero_grad" },
    { function() ty.ones(1).requires_grad = true end, "requires_grad_" },
    { function() return nn.utils.rnn.pack_padded_sequence end, "lengths" },
    { function() return nn.Sequential(nn.ReLU())[0] end, "count from 1" },
    { function() return ty.randint(10, { 2 }) end, "randint(low, high, size?" },
    { function() return ty.save({}, "x.pt") end, "read only" },
    { function() return ty.save({ a = { ty.ones(1) } }, scratch.file "x.safetensors") end, "train.save_checkpoint" },
  } do
    local text = message(case[1])
    check.ok(text:find(case[2], 1, true), text)
  end
end)

check.test("hints are about names that are not there", function()
  local places = { ty = ty, nn = nn, optim = optim, data = ty.data, tensor = ty.ones(1),
    ["nn.utils"] = nn.utils, ["nn.utils.rnn"] = nn.utils.rnn }
  for part, names in pairs(pytorch.hints) do
    for name in pairs(names) do
      local ok, value = pcall(function() return places[part][name] end)
      check.ok(not ok or value == nil, ("%s.%s is there"):format(part, name))
    end
  end
end)

check.test("numbers may come as tensors without dimensions", function()
  local x, two = ty.tensor { 0.5, 1.5, -2.5 }, ty.tensor(2.0)
  check.equal(ty.full({ 2 }, two):tolist(), { 2.0, 2.0 })
  check.equal(x:clone():fill_(two):tolist(), { 2.0, 2.0, 2.0 })
  check.equal(ty.arange(ty.tensor(3)):tolist(), { 0, 1, 2 })
  check.equal(ty.linspace(0, two, 3):tolist(), { 0.0, 1.0, 2.0 })
  check.equal(ty.logspace(ty.tensor(0.0), 1, 2):tolist(), { 1.0, 10.0 })
  check.equal(x:narrow(0, ty.tensor(1), 1):tolist(), { 1.5 })
  check.ok(message(ty.full, { 2 }, two:clone():requires_grad_()):find "requires a gradient, which would be lost")
  check.ok(message(x.narrow, x, 0, ty.tensor(1.5), 1):find "expected an integer")
  check.ok(message(ty.full, { 2 }, ty.ones(1)):find "expected a number")
  check.equal(ty.isin(x, 1.5):tolist(), { false, true, false })
  check.equal(ty.isin(1.5, x):item(), true)
  check.equal(ty.fmax(x, 1):tolist(), { 1.0, 1.5, 1.0 })
  check.equal(ty.gcd(ty.tensor { 4, 6 }, 10):tolist(), { 2, 2 })
  check.equal(ty.lcm(4, ty.tensor { 6, 10 }):tolist(), { 12, 20 })
  check.close(ty.xlog1py(2, x:abs()):tolist(), (x:abs():log1p() * 2):tolist(), 1e-6)
  check.equal(ty.bucketize(2, ty.tensor { 1.0, 2, 3 }):item(), 1)
  check.equal(x:clamp_min(two):tolist(), { 2.0, 2.0, 2.0 })
  check.equal(x:clamp_max(0):tolist(), { 0.0, 0.0, -2.5 })
  check.close(nn.gaussian_nll_loss(x, x + 1, 1.0):item(), 0.5, 1e-6)
end)

check.test("a value of masked_fill and index_fill has a gradient, alpha of add too", function()
  local x, v = ty.ones(2, 3):requires_grad_(), ty.tensor(5.0, { requires_grad = true })
  local mask = ty.tensor { true, false, true }
  x:masked_fill(mask, v):sum():backward()
  check.equal(v.grad:item(), 4.0)
  check.equal(x.grad:tolist(), { { 0.0, 1.0, 0.0 }, { 0.0, 1.0, 0.0 } })
  v:set_grad()
  x:index_fill(1, ty.tensor { 0 }, v):sum():backward()
  check.equal(v.grad:item(), 2.0)
  local a = ty.ones(3)
  a:add_(ty.ones(3), { alpha = 2 }):sub_(ty.ones(3), { alpha = 0.5 })
  check.equal(a:tolist(), { 2.5, 2.5, 2.5 })
end)

check.test("in place", function()
  ty.manual_seed(1)
  local x = ty.empty(20000)
  local function about(value, want, tol) check.ok(math.abs(value - want) < tol, value .. " for " .. want) end
  about(x:bernoulli_(0.3):mean():item(), 0.3, 0.02)
  about(x:exponential_(2):mean():item(), 0.5, 0.02)
  about(x:cauchy_(1, 2):median():item(), 1, 0.1)
  about(x:log_normal_(0, 0.5):log():std():item(), 0.5, 0.02)
  about(x:geometric_(0.25):mean():item(), 4, 0.15)
  check.ok(x:min():item() >= 1)
  check.ok(ty.empty(100, { dtype = "i64" }):random_(5, 7):ge(5):all():item())
  check.equal(ty.zeros(2, 3):fill_diagonal_(1):tolist(), { { 1.0, 0.0, 0.0 }, { 0.0, 1.0, 0.0 } })
  local y = ty.zeros(3):scatter_add_(0, ty.tensor { 0, 0, 2 }, ty.ones(3))
  check.equal(y:tolist(), { 2.0, 0.0, 1.0 })
  check.equal(ty.ones(2, 2):tril_():tolist(), { { 1.0, 0.0 }, { 1.0, 1.0 } })
  check.equal(ty.tensor { 1.0, 3.0 }:gt_(2):tolist(), { 0.0, 1.0 })
  check.ok(message(function() ty.ones(2):atan2_(ty.ones(3, 2)) end):find "atan2_: x: expected the shape")
  check.ok(message(function() ty.ones(2):bernoulli_(2) end):find "in %[0, 1%]")
  local w = ty.ones(3):requires_grad_()
  local z = w * 1
  z:cumsum_(0)
  z:sum():backward()
  check.equal(w.grad:tolist(), { 3.0, 2.0, 1.0 })
end)

check.test("options and properties by PyTorch's names", function()
  local x = ty.ones(2, 3)
  check.equal(x:sum({ dim = 1, keepdim = true }).shape, { 2, 1 })
  check.equal(x:cumsum({ dims = 1 }):tolist()[1], { 1.0, 2.0, 3.0 })
  check.equal(ty.zeros(1, { dtype = "float64" }).dtype, "f64")
  check.equal(x:to("bfloat16").dtype, "bf16")
  local opt = optim.Adam(nn.Linear(2, 2), { lr = 0.1, betas = { 0.8, 0.9 } })
  check.equal(opt.param_groups[1].beta1, 0.8)
  check.ok(message(optim.Adam, nn.Linear(2, 2), { betas = 0.9 }):find "betas: expected a list of two numbers")
  for _, backward in ipairs { false, true } do -- a closure may run its backward pass itself
    local t = ty.tensor({ 3.0 }, { requires_grad = true })
    local function closure()
      local loss = (t * t):sum()
      if backward then loss:backward() end
      return loss
    end
    optim.LBFGS({ t }, { line_search_fn = "strong_wolfe" }):step(closure)
    check.close(t:item(), 0, 1e-4)
    local u = ty.tensor({ 3.0 }, { requires_grad = true })
    optim.SAM(optim.SGD({ u }, { lr = 0.1 }), { rho = 1 }):step(function()
      local loss = (u * u):sum()
      if backward then loss:backward() end
      return loss
    end)
    check.close(u:item(), 3 - 0.1 * 8, 1e-5)
  end
  check.ok(tostring(opt):find "group 1: 2 parameters, .*beta1 = 0.8", tostring(opt))
  check.equal(select("#", x:chunk(3, { dim = 1 })), 3)
  check.ok(message(x.view, x, 4):find "view: size: %[4%] has 4 elements")
  check.equal(ty.one_hot(ty.tensor { 1 }, { num_classes = 3 }).shape, { 1, 3 })
  check.equal(nn.Upsample({ scale_factor = 2 })(ty.ones(1, 1, 2, 2)).shape, { 1, 1, 4, 4 })
  check.equal(optim.LBFGS(nn.Linear(2, 2), { max_iter = 3 }).options.iterations, 3)
  local first, later = nn.Linear(2, 2), nn.Linear(2, 2)
  local sgd = optim.SGD(first, { lr = 0.5 })
  local schedule = optim.Scheduler(sgd, optim.exponential(0.5))
  sgd:add_param_group { params = later:parameters(), lr = 2 }
  local before = later.weight:detach():clone()
  sgd:step(later(first(ty.ones(1, 2))):sum())
  check.ok(not ty.equal(before, later.weight))
  schedule:step()
  check.equal(schedule:get_last_lr(), { 0.25, 1.0 })
  check.ok(message(sgd.add_param_group, sgd, { params = first }):find "given twice")
  check.ok(message(sgd.add_param_group, sgd, first):find "a table with params")
  local p = ty.ones(2):requires_grad_()
  check.equal(p.data.requires_grad, false)
  p.data:mul_(2)
  check.equal(p:tolist(), { 2.0, 2.0 })
  check.equal(p.is_cuda, false)
  check.equal(ty.cuda.is_available(), ty.cuda.count() > 0)
  local path = scratch.file "w.safetensors"
  ty.save({ a = ty.ones(2) }, path)
  check.equal(ty.load(path).a:tolist(), { 1.0, 1.0 })
  check.close(ty.mvlgamma(ty.tensor(3.0), 2):item(), math.log(math.pi ^ 0.5 * 2 * 1.3293403881791), 1e-5)
  local a, b = ty.eye(6):reshape(2, 3, 6) * 2, ty.randn(2, 3)
  check.close(ty.tensorsolve(a, b):tolist(), (b:reshape(6) / 2):tolist(), 1e-6)
  check.equal(ty.tensorinv(a).shape, { 6, 2, 3 })
  check.ok(message(ty.tensorsolve, ty.ones(2, 3), ty.ones(2)):find "tensorsolve: a: expected")
end)

check.test("ty.grad of a function", function()
  local cube = function(x) return (x ^ 3):sum() end
  check.equal(ty.grad(cube)(ty.tensor { 1.0, 2.0 }):tolist(), { 3.0, 12.0 })
  check.equal(ty.grad(function(_, x) return (x * x):sum() end, 2)("first", ty.tensor { 3.0 }):tolist(), { 6.0 })
  local second = ty.grad(function(x) return ty.grad(cube)(x):sum() end)
  check.equal(second(ty.tensor { 1.0, 2.0 }):tolist(), { 6.0, 12.0 })
  check.ok(message(ty.grad(function(x) return x end), ty.ones(2)):find "one number")
  check.ok(message(ty.grad(cube), 1):find "grad: argument 1: expected a tensor")
end)

check.test("masks as PyTorch's modules take them", function()
  ty.manual_seed(2)
  local x, memory = ty.randn(2, 5, 16), ty.randn(2, 7, 16)
  local padding = ty.zeros(2, 7):bool()
  padding["1, 4:"] = true
  local mha = nn.MultiheadAttention(16, 4)
  local out, weights = mha(x, memory, memory, { key_padding_mask = padding, need_weights = true })
  check.close(out:tolist(), mha(x, memory, memory, { key_padding_mask = padding }):tolist(), 1e-5)
  local short = memory["1:2, :4"]
  check.close(out["1:2"]:tolist(), mha(x["1:2"], short, short):tolist(), 1e-5)
  check.close(weights:sum { 2 }:tolist(), ty.ones(2, 5):tolist(), 1e-5)
  check.equal(weights["1, :, 4:"]:abs():max():item(), 0.0)
  local numbers = ty.zeros(2, 7):masked_fill(padding, -math.huge)
  check.close(mha(x, memory, memory, { key_padding_mask = numbers, attn_mask = ty.zeros(5, 7):bool() }):tolist(),
    out:tolist(), 1e-5)
  local per_head = (ty.rand(8, 5, 7):gt(0.5)):logical_and(ty.arange(7):ne(0))
  local _, heads = mha(x, memory, memory, { attn_mask = per_head, need_weights = true, average_attn_weights = false })
  check.equal(heads.shape, { 2, 4, 5, 7 })
  check.equal(heads:reshape(8, 5, 7):masked_select(per_head):abs():max():item(), 0.0)
  check.ok(message(mha, x, memory, memory, { attn_msk = padding }):find "no option 'attn_msk'")
  check.ok(message(mha, x, memory, memory, { key_padding_mask = padding[0] }):find "_mask: expected %[2, 7%]")
  check.ok(message(mha, x, memory, memory, { attn_mask = ty.zeros(2, 7) }):find "attn_mask: expected %[..., 5, 7%]")
  check.ok(message(mha, x, 3):find "MultiheadAttention: k: expected a tensor of 3 dimensions, got 3")

  local causal = nn.Transformer.generate_square_subsequent_mask(5)
  check.equal(causal[0]:tolist(), { 0.0, -math.huge, -math.huge, -math.huge, -math.huge })
  local decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, { dim_feedforward = 32, batch_first = true }),
    2):eval()
  local want = decoder(x, memory, { causal = true, memory_mask = padding:logical_not():reshape(2, 1, 1, 7) })
  check.close(decoder(x, memory, { tgt_mask = causal, memory_key_padding_mask = padding }):tolist(), want:tolist(),
    1e-5)
  check.close(decoder(x, memory, { tgt_is_causal = true, memory_key_padding_mask = padding }):tolist(), want:tolist(),
    1e-5)
  local encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, { dim_feedforward = 32 }), 2):eval()
  check.close(encoder(memory, { src_key_padding_mask = padding })["1:2, :4"]:tolist(), encoder(short):tolist(), 1e-5)
  local whole = nn.Transformer(16, 4, { num_encoder_layers = 1, num_decoder_layers = 1, dim_feedforward = 32 }):eval()
  check.close(whole(memory, x, { src_key_padding_mask = padding, memory_key_padding_mask = padding, tgt_mask = causal })
    ["1:2"]:tolist(), whole(short, x["1:2"], { causal = true }):tolist(), 1e-5)
  check.ok(message(nn.TransformerDecoderLayer, 16, 4, { batch_first = false }):find "batch_first: expected true")
end)

check.test("nn.utils", function()
  local model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
  local function fill()
    for _, p in ipairs(model:parameters()) do p:set_grad(ty.full(p.shape, 2.0)) end
  end
  fill()
  check.close(nn.utils.clip_grad_norm_(model, 1):item(), 2 * 13 ^ 0.5, 1e-5)
  check.close(nn.utils.clip_grad_norm_(model:parameters(), 100):item(), 1, 1e-5)
  check.close(model[1].weight.grad:max():item(), 1 / 13 ^ 0.5, 1e-5)
  fill()
  check.equal(nn.utils.clip_grad_norm_(model, 1, math.huge):item(), 2.0)
  fill()
  nn.utils.clip_grad_value_(model, 0.5)
  check.equal(model[2].bias.grad:item(), 0.5)
  local flat = nn.utils.parameters_to_vector(model)
  check.equal(flat.shape, { 13 })
  nn.utils.vector_to_parameters(ty.zeros(13), model)
  check.equal(model[1].weight:abs():max():item(), 0.0)
  check.ok(message(nn.utils.vector_to_parameters, ty.zeros(12), model):find "expected %[13%]")
end)

check.test("hooks, dictionaries, initialisers", function()
  local layer, seen = nn.Linear(2, 2), 0
  local handle = layer:register_forward_hook(function() seen = seen + 1 end)
  layer(ty.ones(1, 2))
  handle:remove()
  layer(ty.ones(1, 2))
  layer:register_forward_hook(function() seen = seen + 1 end)()
  layer(ty.ones(1, 2))
  check.equal(seen, 1)
  local dict = nn.ParameterDict { b = ty.ones(2), a = ty.zeros(1) }
  check.equal(#dict:parameters(), 2)
  check.ok(dict.a.requires_grad)
  for _, size in ipairs { { 4, 6 }, { 6, 4 }, { 3, 2, 2 } } do
    local q = nn.init.orthogonal_(ty.empty(size), 2):reshape(size[1], -1)
    if q:size(0) > q:size(1) then q = q:transpose(0, 1) end
    check.close(q:matmul(q:transpose(0, 1)):tolist(), (ty.eye(q:size(0)) * 4):tolist(), 1e-5)
  end
  local w = nn.init.dirac_(ty.empty(4, 2, 3, 3), 2)
  local x = ty.randn(1, 4, 5, 5)
  check.close(ty.conv2d(x, w, nil, 1, 1, 1, 2):tolist(), x:tolist(), 1e-6)
  check.ok(message(nn.init.dirac_, ty.ones(2, 2)):find "init.dirac: t: expected")
end)

scratch.clean()
check.finish()
