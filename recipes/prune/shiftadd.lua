-- A vision transformer of shifts and additions, with multiplications only where a router asks for them
-- claim: ShiftAddViT reads within 1 % of the vision transformer that it is made of, with exact kernels
-- system: a ViT on pages of handwritten digits; attention with codes, weights of powers of two, a mixture of experts
-- paper: You et al. 2023, "ShiftAddViT: Mixture of Multiplication Primitives Towards Efficient Vision Transformer"
-- time: 4 minutes on one CPU core
--
-- Digits lie anywhere on their pages; pages measured on are of digits neither trained on nor chosen by. Three stages:
-- attention with codes, then powers of two in its linear layers, then a second expert of shifts in each feed-forward
-- network. Each is trained for as many steps with the vision transformer as teacher, the last at half of the rate; the
-- compared models take as many steps in all. The rate was chosen by the validation part for ShiftAddViT and serves all;
-- with --rates A,B each model takes its better one. Latencies are measured here, of integer shifts against products of
-- floats, and decide what the router is asked for. Accuracy is that of the deployed model, whose shifts are of
-- integers. Multiplications, shifts and additions are counted from the shapes and from where tokens went; norms,
-- activations and softmax are left out for all.
local ty = require "tycho"
local prune, vision = require "tycho.prune", require "tycho.vision"
local shiftadd = prune.shiftadd

local r = ty.recipe.declare {
  seeds = 3,
  base = true,
  args = {
    { "base_steps", 1500, "training steps of the vision transformer", quick = 10 },
    { "steps", 300, "of each of the three stages", quick = 2 },
    { "rates", { 1.5e-3 }, "learning rates, for each model the better one" },
    { "width", 64, "hidden size", quick = 32 },
    { "rounds", 9, "of the timing", quick = 1 },
  },
}
local args = r.args
local training = vision.pages.training()
local validation, held_out = vision.pages.set "validation", vision.pages.set "held_out"

-- What is done to a model at each stage, by its name; a stage without a change is training alone.
local mlp = { targets = "%.%d+%.intermediate" }
local function mlp_too(model)
  shiftadd.shift(model, mlp)
  shiftadd.shift(model, { targets = "%.%d+%.output" })
end
local function in_attention(model) shiftadd.shift(model, { targets = "attention" }) end
local latencies
local plans = {
  { name = "shiftadd", shiftadd.attention, in_attention,
    function(model) shiftadd.mixture(model, { latencies = latencies }) end },
  { name = "split", shiftadd.attention, in_attention, function(model) shiftadd.mixture(model, { split = true }) end },
  { name = "all shifts", shiftadd.attention, in_attention, mlp_too },
  { name = "linear", shiftadd.attention, false, false },
  { name = "vit", false, false, false },
}

local function made(base, plan, seed, rate)
  local model = base:clone():requires_grad_()
  ty.manual_seed(seed)
  for stage = 1, 3 do
    if plan[stage] then plan[stage](model) end
    vision.distil(model, training, { teacher = base, steps = args.steps, lr = stage == 3 and rate / 2 or rate,
      seed = seed + stage, batch_size = 32, quiet = true, transform = vision.pages.transform,
      more = plan.name == "shiftadd" and stage == 3 and function(m) return shiftadd.balance(m) * 0.01 end or nil })
  end
  if plan[2] then shiftadd.deploy(model) end
  return model
end

local found, counts, rates, shown, sent = { base = {} }, {}, {}, {}, {}
for i, seed in ipairs(r.seeds) do
  local base = vision.pages.base(r:base "pages", { seed = seed, steps = args.base_steps, width = args.width })
  base:requires_grad_(false)
  if not latencies then
    latencies = shiftadd.latencies(base)
    r:say("1024 tokens through a feed-forward network: %.2f ms by products, %.2f by shifts", 1000 * latencies[1],
      1000 * latencies[2])
    r.metrics.milliseconds_products, r.metrics.milliseconds_shifts = 1000 * latencies[1], 1000 * latencies[2]
    counts.base = shiftadd.count(base)
  end
  found.base[i] = 100 * vision.pages.measure(base, held_out).accuracy
  for _, plan in ipairs(plans) do
    local name, model = plan.name, nil
    if i == 1 then
      local best
      for _, rate in ipairs(args.rates) do
        local candidate = made(base, plan, seed, rate)
        local loss = vision.pages.measure(candidate, validation).loss
        if not best or loss < best then best, rates[name], model = loss, rate, candidate end
      end
      shown[name], found[name] = model, {}
    else
      model = made(base, plan, seed, rates[name])
    end
    found[name][i] = 100 * vision.pages.measure(model, held_out).accuracy
    local count = shiftadd.count(model)
    counts[name] = counts[name] or count
    local share = 0
    if name == "shiftadd" then
      for _, choice in ipairs(shiftadd.choices(model)) do share = share + choice:to("f64"):mean():item() / 4 end
      sent[i] = 100 * share
    end
    r:say("seed %d: %-10s %.2f %% right, rate %g; %d multiplications, %d shifts, %d additions a page%s", seed, name,
      found[name][i], rates[name], math.floor(count.multiplications), math.floor(count.shifts),
      math.floor(count.additions), name == "shiftadd" and (", %.1f %% of the tokens by shifts"):format(sent[i]) or "")
    r.metrics[("accuracy/%s/%d"):format(name, seed)] = found[name][i]
    for kind, value in pairs(count) do r.metrics[("%s/%s/%d"):format(kind, name, seed)] = value end
  end
end

-- ---- kernels, time, where patches go ----

local differs = 0
local _, modules = ty.nn.surgery.modules(shown["all shifts"])
for _, layer in pairs(modules) do
  local state = rawget(layer, "_shift")
  if state then
    local x = ty.randint(-127, 128, { 64, state.codes.shape[2] }):to "i8"
    local want = ty.matmul(x:to "f64", shiftadd.decode(state.codes):to("f64"):transpose(0, 1)) * 2 ^ 14
    differs = math.max(differs, (ty.matmul_shift(x, state.codes):to "f64" - want):abs():max():item())
  end
end

local images = held_out.image:narrow(0, 0, 128)
local function reads(model) return function() ty.no_grad(function() return model(images):sum():item() end) end end
local times = r:time({ vit = reads(shown.vit), shiftadd = reads(shown.shiftadd), shifts = reads(shown["all shifts"]) },
  { rounds = args.rounds, warmup = 1 })
r:say("reading %d pages: %.1f ms, ShiftAddViT %.1f, all shifts %.1f", images.shape[1], 1000 * times.vit,
  1000 * times.shiftadd, 1000 * times.shifts)
for name, seconds in pairs(times) do r.metrics["milliseconds/" .. name] = 1000 * seconds end

-- Pages, and under each the patches of the first layers that go to shifts, bright.
ty.no_grad(shown.shiftadd, images)
local choices, sheets = shiftadd.choices(shown.shiftadd), { images:narrow(0, 0, 16) }
for layer = 1, 4 do
  local patches = choices[layer]:narrow(0, 0, 16):narrow(1, 1, 9):reshape(16, 1, 3, 3):to "f32"
  sheets[layer + 1] = patches:repeat_interleave(3, 2):repeat_interleave(3, 3) * 2 - 1
end
ty.plot.grid(ty.concat(sheets, 0), { columns = 16, scale = 4 }):save(r:picture "shiftadd.png")

local function lost(name, from)
  local list = {}
  for i, value in ipairs(found[name]) do list[i] = found[from][i] - value end
  return list
end
local function share(name) return counts[name].multiplications / counts.base.multiplications end
os.exit(r:finish {
  { claim = "accuracy lost to the vision transformer, in per cent of the pages", values = lost("shiftadd", "base"),
    baseline = found.base, bar = 1, below = true },
  { claim = "lost to the vision transformer trained on as long", values = lost("shiftadd", "vit"), baseline = found.vit,
    judged = false },
  { claim = "lost by all shifts", values = lost("all shifts", "base"), baseline = found.base, judged = false },
  { claim = "lost by every other token to shifts", values = lost("split", "base"), baseline = found.base,
    judged = false },
  { claim = "lost by attention with codes alone", values = lost("linear", "base"), baseline = found.base,
    judged = false },
  { claim = "multiplications, of those of the vision transformer", measured = share "shiftadd", bar = 1, below = true },
  { claim = "multiplications of all shifts, of those of the vision transformer", measured = share "all shifts",
    bar = 1, below = true },
  { claim = "tokens that the router sends to shifts, in per cent", values = sent, judged = false },
  { claim = "shifts of integers against exact products: largest difference", measured = differs, bar = 0,
    below = true },
}, true)
