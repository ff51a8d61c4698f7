-- Adapters that guide: nothing at the start and when off, only they get gradients, targets at scale 1 are the plain
-- prediction, training brings one pass to the guided one.
local here = (arg and arg[0]:match ".*/" or "tests/modules/distill/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local diffusion, distill, models = require "tycho.diffusion", require "tycho.distill", require "tycho.models"

local function network()
  ty.manual_seed(1)
  local model = diffusion.DiT { width = 16, depth = 2, heads = 2, classes = 3 }
  for _, p in ipairs(model:parameters()) do p:detach():normal_(0, 0.15) end
  return model:eval()
end

local function same(a, b) return a:eq(b):all():item() end

ty.manual_seed(7)
local x, t, labels = ty.randn(4, 1, 8, 8), ty.tensor { 100.0, 500, 900, 30 }, ty.tensor { 0, 1, 2, 1 }
local told = { labels = labels, scale = ty.tensor { 1.0, 2, 3, 4 } }

local function shaken(student)
  for _, part in ipairs { student.told, student.adapters } do
    for _, p in ipairs(part:parameters()) do p:detach():add_(ty.randn(p.shape) * 0.2) end
  end
  return student
end

check.test("bit-equal to the conditional network at the start, when off, and without a scale", function()
  for _, kind in ipairs { "offset", "attention" } do
    local model = network()
    local want = model(x, t, { labels = labels })
    local student = distill.GuidanceAdapters(model, { kind = kind, hidden = 4 })
    check.ok(same(student(x, t, told), want), kind)
    shaken(student)
    check.ok(not same(student(x, t, told), want), kind .. ": adapters do something")
    check.ok(same(student(x, t, { labels = labels }), want), kind .. ": no scale")
    check.ok(same(student:off()(x, t, told), want), kind .. ": off")
    local guided = student:off(false)(x, t, told)
    check.ok(not same(guided, want), kind .. ": on again")
    -- A sample depends on its own scale alone.
    local alone = student(x:narrow(0, 2, 1), t:narrow(0, 2, 1), { labels = labels:narrow(0, 2, 1),
      scale = told.scale:narrow(0, 2, 1) })
    check.close(alone:flatten():tolist(), guided:narrow(0, 2, 1):flatten():tolist(), 1e-5)
    check.ok(not same(student(x, t, { labels = labels, scale = told.scale + 0.5 }), guided), kind .. ": scale matters")
    local copy = student:clone()
    check.ok(same(copy(x, t, told), guided), kind .. ": a clone")
    copy.adapters[1]:parameters()[1]:detach():add_(1)
    check.ok(same(student(x, t, told), guided), kind .. ": a clone has adapters of its own")
    check.ok(rawequal(student:unwrap(), model) and same(model(x, t, { labels = labels }), want))
    check.equal(getmetatable(model.blocks[1].attn).__name, "Attention")
  end
end)

-- What guidance adds is (scale - 1) (conditional - null), whatever the network: so it is with adapters of any weights.
check.test("scale 1 is the network; what is added on the way is multiplied by scale - 1", function()
  for _, kind in ipairs { "offset", "attention" } do
    local model = network()
    local want = model(x, t, { labels = labels })
    local student = shaken(distill.GuidanceAdapters(model, { kind = kind, hidden = 4 }))
    local ones = ty.ones { 4 }
    check.ok(same(student(x, t, { labels = labels, scale = ones }), want), kind .. ": scale 1")
    local guided = student(x, t, told)
    check.ok(same(guided:narrow(0, 0, 1), want:narrow(0, 0, 1)), kind .. ": the first of the batch has scale 1")
    check.ok(not same(guided:narrow(0, 1, 1), want:narrow(0, 1, 1)), kind)
  end
end)

-- A layer that gives nothing leaves only its input to tell the positions apart.
check.test("positions attend by what the layer is given, not by what it gives", function()
  local Silent = ty.nn.module "SilentAttention"
  function Silent:init() self.proj = ty.nn.Linear(6, 6) end
  function Silent:forward(y) return self.proj(y) * 0 end
  local model = ty.nn.module "Silently"
  function model:init() self.attn = Silent() end
  function model:forward(y) return self.attn(y) end
  for heads = 1, 2 do
    local student = shaken(distill.GuidanceAdapters(model(), { kind = "attention", hidden = 4, heads = heads,
      widths = { 3 }, embed = function(_, time) return { time:reshape(-1, 1):expand(4, 3) * 0.01 } end }))
    local y = student(ty.randn(4, 5, 6), t, { scale = ty.full({ 4 }, 2.0) })
    check.equal(y.shape, { 4, 5, 6 })
    check.ok((y:narrow(1, 0, 1) - y:narrow(1, 1, 1)):abs():max():item() > 1e-4, "two positions, two answers")
  end
end)

check.test("only adapters get gradients, all of them; the share of the parameters", function()
  for _, kind in ipairs { "offset", "attention" } do
    local student = shaken(distill.GuidanceAdapters(network(), { kind = kind, hidden = 4 }))
    student(x, t, told):square():sum():backward()
    for _, p in ipairs(student.model:parameters()) do check.ok(p.grad == nil and not p.requires_grad) end
    for _, part in ipairs { student.told, student.adapters } do
      for _, p in ipairs(part:parameters()) do check.ok(p.grad ~= nil) end
    end
    check.equal(#student.adapters, 2)
    check.close(student:share(), student:count_parameters(true) / student.model:count_parameters(), 1e-12)
  end
  local whole = distill.GuidanceAdapters(network(), { targets = { "t_embedder" }, train = true, hidden = 4 })
  shaken(whole)(x, t, told):square():sum():backward()
  check.equal(#whole.adapters, 1)
  check.ok(whole.model.blocks[1].attn.qkv.weight.grad ~= nil)
end)

check.test("scale 1: the target of trajectories is the conditional prediction", function()
  local model, flow = network(), diffusion.Flow()
  local made = distill.trajectories(model, flow:sampler { steps = 3, solver = diffusion.solver.euler() },
    { 4, 1, 8, 8 }, { condition = { labels = labels }, scales = { 1, 1 } })
  local want = model(made.x, made.time, distill.condition(made))
  check.close(made.target:flatten():tolist(), want:flatten():tolist(), 1e-5)
  check.ok(distill.guidance_loss({ student = distill.GuidanceAdapters(model:clone()) }, made):item() < 1e-10)
end)

check.test("the distance to the guided prediction, of its norm, in batches of any size", function()
  local model, flow = network(), diffusion.Flow()
  local items = distill.trajectories(model, flow:sampler { steps = 3, solver = diffusion.solver.euler() },
    { 4, 1, 8, 8 }, { condition = { labels = labels }, scales = { 1, 1 } })
  local student = distill.GuidanceAdapters(model:clone())
  check.close(distill.guidance_distance(student, items), 0, 1e-6)
  items.target = items.target * 2
  check.close(distill.guidance_distance(student, items), 0.5, 1e-6, "off by half of it")
  check.close(distill.guidance_distance(student, items, { batch = 5 }), 0.5, 1e-6, "12 states as 5, 5 and 2")
  -- Of states that are off by different amounts the squares count: those of all over those of all.
  local far = items.target:clone()
  far:narrow(0, 0, 3):mul_(10)
  items.target = far
  local off, norm = (far - model(items.x, items.time, distill.condition(items))):square():sum(), far:square():sum()
  check.close(distill.guidance_distance(student, items, { batch = 5 }), math.sqrt((off / norm):item()), 1e-6)
  check.fails(function() distill.guidance_distance(student, {}) end, "items.target: expected a tensor, got nil")
  check.fails(function() distill.guidance_distance(student, items, { batch = 0 }) end, "batch: expected an integer")
end)

check.test("at one scale, for samplers; told the scale by the embedding of time", function()
  for _, train in ipairs { false, true } do
    local model = network()
    local want = model(x, t, { labels = labels })
    local student = distill.GuidanceAdapters(model, { targets = "time", train = train, hidden = 4 })
    check.ok(same(student(x, t, told), want), "nothing at the start")
    check.equal(#student.adapters, 1)
    shaken(student)
    check.ok(not same(student(x, t, told), want))
    check.ok(same(student(x, t, { labels = labels }), want), "no scale")
    check.ok(same(student:at(2)(x, t, { labels = labels }), student(x, t, { labels = labels,
      scale = ty.full({ 4 }, 2.0) })))
    check.ok(not same(student:at(2)(x, t, { labels = labels }), student:at(3)(x, t, { labels = labels })))
    check.equal(student:count_parameters(true), student.told:count_parameters()
      + student.adapters:count_parameters() + (train and model:count_parameters() or 0))
    check.fails(function() student:at "x" end, 'GuidanceAdapters:at: scale: expected a finite number, got "x"')
  end
  check.fails(function()
    distill.GuidanceAdapters(ty.nn.Linear(2, 2), { targets = "time", embed = function() end, widths = { 2 } })
  end, 'targets: expected a network with t_embedder or time_text_embed for "time", got neither')
  check.fails(function() distill.GuidanceAdapters(network(), { targets = "x" }) end, 'targets: expected "time" or a')
end)

check.test("training: one pass comes nearer to guidance, on states it has not seen", function()
  local model, flow = network(), diffusion.Flow()
  local sampler = flow:sampler { steps = 5, solver = diffusion.solver.euler() }
  local function made(n, seed)
    ty.manual_seed(seed)
    return (distill.trajectories(model, sampler, { n, 1, 8, 8 }, { condition = { labels = ty.arange(n) % 3 },
      scales = { 1, 4 } }))
  end
  local unseen = made(40, 2)
  for _, kind in ipairs { "offset", "attention" } do
    ty.manual_seed(3)
    local student = distill.GuidanceAdapters(model:clone(), { kind = kind, hidden = 8 })
    local before = distill.guidance_loss({ student = student }, unseen):item()
    local loader = ty.data.DataLoader(ty.data.TensorDataset(made(100, 1)), { batch_size = 50, shuffle = true,
      seed = 0 })
    distill.fit(student, loader, { steps = 150, lr = 5e-3, weight_decay = 0, loss = distill.guidance_loss,
      quiet = true })
    local after = distill.guidance_loss({ student = student }, unseen):item()
    check.ok(after < 0.65 * before, ("%s: %g of %g"):format(kind, after, before))
    check.ok(same(student:off()(x, t, told), model(x, t, { labels = labels })))
  end
end)

check.test("a network with words", function()
  ty.manual_seed(4)
  local model = models.SD3Transformer2DModel { sample_size = 8, patch_size = 2, in_channels = 1, out_channels = 1,
    num_layers = 2, attention_head_dim = 8, num_attention_heads = 2, caption_projection_dim = 16,
    joint_attention_dim = 6, pooled_projection_dim = 5, pos_embed_max_size = 8, qk_norm = "rms_norm" }
  for _, p in ipairs(model:parameters()) do p:detach():add_(ty.randn(p.shape) * 0.1) end
  local condition = { text = { embeddings = ty.randn(4, 3, 6), pooled = ty.randn(4, 5) } }
  local want = model(x, t, condition)
  local student = distill.GuidanceAdapters(model, { kind = "attention", hidden = 4 })
  condition.scale = told.scale
  check.ok(same(student(x, t, condition), want))
  check.ok(not same(shaken(student)(x, t, condition), want))
end)

check.test("what is refused", function()
  check.fails(function() distill.GuidanceAdapters(3) end, "GuidanceAdapters: model: expected a module, got 3")
  check.fails(function() distill.GuidanceAdapters(models.TimeMLP()) end, "widths: expected those of what embed returns")
  local mlp = models.TimeMLP { classes = 2 }
  check.fails(function() distill.GuidanceAdapters(mlp) end, "expected a network with attention")
  check.fails(function() distill.GuidanceAdapters(network(), { kind = "other" }) end, 'kind: expected "offset" or')
  check.fails(function() distill.GuidanceAdapters(network(), { targets = { "nothing" } }) end, "targets: no module")
  check.fails(function() distill.GuidanceAdapters(network(), { hidden = 4, heads = 3 }) end,
    "heads: expected a divisor of hidden, 4, got 3")
  local student = distill.GuidanceAdapters(network())
  check.fails(function() student(x, t, { labels = labels, scale = 3 }) end, "condition.scale: expected a tensor, got 3")
  check.fails(function() student(x, t, { labels = labels, scale = ty.ones(3) }) end,
    "GuidanceAdapters: condition.scale: expected [4], got a tensor [3]")
  check.fails(function() student(x, t) end, "condition: expected a table, got nil")
  check.fails(function() distill.guidance_loss({ student = student }, { x = x }) end, "batch.time: expected a tensor")
end)

check.finish()
