-- Parts that leave out calls of the network or blocks of it: easy, delta, stability.
local here = arg and arg[0]:match ".*/" or "tests/modules/diffusion/"
local check = dofile(here .. "../../lua/check.lua")
local known = dofile(here .. "closed_form.lua")
local ty = require "tycho"
local diffusion, hub = require "tycho.diffusion", require "tycho.hub"

local cache, flow = diffusion.cache, diffusion.schedule.flow()
local root = check.root .. "tests/fixtures/diffusers/"

local function shaken(model)
  ty.no_grad(function()
    for _, p in ipairs(model:parameters()) do p:add_(ty.randn_like(p) * 0.1) end
  end)
  return model:eval()
end

ty.manual_seed(5)
local sd3 = shaken(hub.load(root .. "sd3", { dtype = "f32" }))
local dit = shaken(diffusion.DiT { depth = 5, width = 32 })
local networks = {
  dit = { dit, { 1, 8, 8 }, function(n) return { labels = ty.arange(n) } end },
  sd3 = { sd3, { sd3.config.in_channels, 8, 8 }, function(n)
    ty.manual_seed(9)
    return { text = { embeddings = ty.randn(3, 5, sd3.config.joint_attention_dim):narrow(0, 0, n),
      pooled = ty.randn(3, sd3.config.pooled_projection_dim):narrow(0, 0, n) } }
  end, { text = { embeddings = ty.zeros(1, 5, sd3.config.joint_attention_dim),
    pooled = ty.zeros(1, sd3.config.pooled_projection_dim) } } },
}

-- n samples with these parts, and the run.
local function draw(network, parts, options)
  local o = options or {}
  local n, seeds = o.n or 3, {}
  for i = 1, n do seeds[i] = i end
  local sampler = diffusion.Sampler { schedule = flow, predict = "flow", guidance = o.guidance or 2,
    steps = o.steps or 10, solver = o.solver or diffusion.solver.euler(), parts = parts }
  return sampler:sample(network[1], { n, table.unpack(network[2]) }, { condition = network[3](n), null = network[4],
    seeds = seeds })
end

-- ---- easy ----

check.test("easy: threshold 0 is no cache, bit for bit", function()
  for name, network in pairs(networks) do
    local full, run = draw(network)
    local part = cache.easy { threshold = 0, warmup = 2 }
    local x, cached = draw(network, { part })
    check.equal(x:tolist(), full:tolist(), name)
    check.equal({ cached.calls, cached.evaluations }, { run.calls, run.evaluations }, name)
  end
end)

check.test("easy: what adds a constant is exact at any threshold; the calls are those that were noted", function()
  local constant = ty.arange(6):to("f32"):reshape(1, 6) / 3 - 1
  local calls = 0
  local model = known.model(function(x)
    calls = calls + x.shape[1]
    return x + constant
  end)
  local network = { model, { 6 }, function() return {} end }
  local full = draw(network)
  calls = 0
  local part = cache.easy { threshold = 1e9, warmup = 3 }
  local x, run = draw(network, { part })
  check.close(x:tolist(), full:tolist(), 1e-5)
  check.equal(calls, 3 * 4, "three of warming up and the last")
  local noted = 0
  for _, steps in ipairs(part:notes(run)) do
    for _, step in ipairs(steps) do noted = noted + (step.called and 1 or 0) end
  end
  check.equal(noted, calls)
end)

check.test("easy: the estimate of the error, by hand", function()
  -- v = 3 x - 2, so that k is 3 however far x moved.
  local network = known.model(function(x) return x * 3 - 2 end)
  local part = cache.easy { threshold = 0.8, warmup = 2 }
  local xs = {} -- at the end of each step
  local _, run = diffusion.Sampler { schedule = flow, predict = "flow", steps = 10, solver = diffusion.solver.euler(),
    parts = { part } }:sample(network, { 1, 1 }, { seeds = { 1 }, on_step = function(i, x) xs[i] = x:item() end })
  local notes, sum, reused = part:notes(run)[1], 0.0, 0
  local v = 3 * xs[1] - 2 -- of the last call
  local difference = v - xs[1]
  for step = 3, 9 do
    local x = xs[step - 1]
    sum = sum + 3 * math.abs(x - xs[step - 2]) / math.abs(v)
    check.close(notes[step].error, sum, 1e-4, "step " .. step)
    check.equal(notes[step].called, sum >= 0.8)
    local used = x + difference
    if sum >= 0.8 then
      v, sum, used = 3 * x - 2, 0.0, 3 * x - 2
      difference = v - x
    else
      reused = reused + 1
    end
    local from, to = run.points[step], run.points[step + 1]
    check.close(xs[step], x + used * (to.sigma - from.sigma), 1e-4)
  end
  check.equal(reused > 0 and reused < 7, true)
end)

check.test("a sample never depends on the others in its batch", function()
  local network = networks.sd3
  for name, make in pairs {
    easy = function() return cache.easy { threshold = 0.5, warmup = 2 } end,
    stability = function() return cache.stability { late = 0.7 } end,
  } do
    local part = make()
    local all, run = draw(network, { part })
    check.equal(run.calls > 0 and run.evaluations.condition < 30, true, name .. ": calls were left out")
    for n = 1, 2 do
      local fewer = draw(network, { make() }, { n = n })
      check.close(fewer:tolist(), all:narrow(0, 0, n):tolist(), 1e-5, name)
    end
  end
end)

check.test("easy goes with guidance that ends by itself", function()
  local x, run = draw(networks.sd3, { cache.easy { threshold = 0.3, warmup = 2 } },
    { guidance = diffusion.guidance.adaptive { scale = 2, threshold = 0.9 } })
  check.equal(x:isfinite():all():item(), true)
  check.equal(run.evaluations.null <= run.evaluations.condition, true)
end)

-- ---- delta ----

check.test("delta: every = 1 changes no bit; blocks that add a constant are exact however seldom they run", function()
  for name, network in pairs(networks) do
    local full = draw(network)
    local part, blocks = cache.delta(network[1], { every = 1 })
    check.equal((draw(network, { part })):tolist(), full:tolist(), name)
    part = cache.delta(blocks, { every = 3, cached = 2 })
    check.equal(ty.allclose((draw(network, { part })), full), false, name .. ": left out blocks change something")
    blocks:remove()
    check.equal((draw(network)):tolist(), full:tolist(), name .. ": taken out")
  end
  local nn = ty.nn
  local Constant, Net = nn.module "Constant", nn.module "Net"
  function Constant:init(value) self.value = value end
  function Constant:forward(x) return x + self.value end
  function Net:init() self.blocks = nn.ModuleList { Constant(0.3), Constant(-1), Constant(2), Constant(0.7) } end
  function Net:forward(x)
    for _, block in ipairs(self.blocks) do x = block(x) end
    return x * 0.5
  end
  local net = Net()
  local network = { net, { 6 }, function() return {} end }
  local full = draw(network)
  for _, reuse in ipairs { "difference", "features" } do
    local blocks = diffusion.blocks(net, { list = "blocks" })
    local x = draw(network, { (cache.delta(blocks, { every = 4, cached = 3, reuse = reuse })) })
    check.equal(ty.allclose(x, full, 1e-5, 1e-5), reuse == "difference", reuse)
    blocks:remove()
  end
end)

check.test("delta: what runs is what was asked for", function()
  local ran, removers = {}, {}
  local blocks = diffusion.blocks(dit)
  local part = cache.delta(blocks, { every = 2, cached = 3, switch = 0.6 })
  for i, block in ipairs(blocks.list) do
    -- What is inside of a block runs only where the block does.
    removers[i] = block.module:get "attn":register_forward_hook(function() ran[i] = (ran[i] or 0) + 1 end)
  end
  draw(networks.dit, { part }, { guidance = 1 })
  -- Ten steps: 1 full, 2 without 3 to 5, 3 full, 4, 5 full, 6; 7 full, 8 without 1 to 3, 9 full, 10.
  check.equal(ran, { 8, 8, 5, 7, 7 })
  for _, remove in ipairs(removers) do remove() end
  blocks:remove()
end)

-- ---- stability ----

check.test("stability: an empty range is no part, bit for bit", function()
  for name, network in pairs(networks) do
    local full = draw(network)
    check.equal((draw(network, { cache.stability { from = 1, to = 0 } })):tolist(), full:tolist(), name)
    check.equal((draw(network, { cache.stability { most = 0, late = 1 } })):tolist(), full:tolist(), name)
  end
end)

-- A network whose derivative is a polynomial of p, on a grid that is not even.
local function polynomial(coefficients)
  return { known.model(function(x, t)
    local y = ty.zeros_like(x)
    for power, c in ipairs(coefficients) do y = y + (t / 1000):reshape(-1, 1) ^ (power - 1) * c end
    return y
  end), { 2 }, function() return {} end }
end

check.test("stability: exact where the derivative is straight, and where clean samples are cubic", function()
  local straight = polynomial { 1.0, -0.7 }
  local full, run = draw(straight, nil, { steps = 16 })
  local part = cache.stability { from = 0.2, late = 1, most = 16 }
  -- On a straight line the second difference is 0 and nothing is below 0, so that all steps are calls ...
  check.close((draw(straight, { part }, { steps = 16 })):tolist(), full:tolist(), 1e-5)
  -- ... and those that are left out on purpose (late) are on the polynomial: x0 = x - p y, cubic in p at most.
  part = cache.stability { from = 0.2, late = 0.4, interval = 3, terms = 4 }
  local x, cached = draw(straight, { part }, { steps = 16 })
  check.close(x:tolist(), full:tolist(), 2e-3)
  check.equal(cached.calls < run.calls, true)
end)

check.test("stability: the criterion and the step ahead, by hand", function()
  -- y = cos(6 p): bends both ways.
  local network = { known.model(function(x, t) return (t * 6e-3):cos():reshape(-1, 1) + x * 0 end), { 1 },
    function() return {} end }
  local part = cache.stability { from = 0, to = 1, late = 1, most = 2 }
  local x, run = draw(network, { part }, { n = 1, steps = 14 })
  local notes, points = part:notes(run)[1], run.points
  local function place(i) return points[i].sigma / (points[i].sigma + points[i].alpha) end
  local ys, row, skip, sum = {}, 0, false, 0.0
  for i = 1, 14 do
    local y = math.cos(6 * place(i))
    if skip then y = ys[i - 1] + (ys[i - 1] - ys[i - 2]) * (place(i) - place(i - 1)) / (place(i - 1) - place(i - 2)) end
    check.equal(notes[i], skip and "ahead" or "call", "step " .. i)
    ys[i] = y
    local h = place(i + 1) - place(i)
    sum = sum + h * y
    skip = false
    if i >= 3 and i < 13 then
      local slope = (ys[i] - ys[i - 1]) / (place(i) - place(i - 1))
      local bend = ys[i] - (ys[i - 1] + (ys[i - 1] - ys[i - 2]) * (place(i) - place(i - 1))
        / (place(i - 1) - place(i - 2)))
      local gap = h * y - (h * (y + h / 2 * slope) - 2 / 3 * h * bend)
      skip = gap * bend < 0 and row < 2
      row = skip and row + 1 or 0
    end
  end
  local start = diffusion.Sampler { schedule = flow, predict = "flow", steps = 14, solver = diffusion.solver.euler() }
    :sample(known.model(function(z) return z * 0 end), { 1, 1 }, { seeds = { 1 } })
  check.close(x:item(), start:item() + sum, 1e-4)
  local counts = {}
  for _, note in ipairs(notes) do counts[note] = (counts[note] or 0) + 1 end
  check.equal(counts.ahead > 0 and counts.call > 0, true)
end)

check.test("stability: all tokens computed is dense; with a share of them only those change", function()
  for name, network in pairs(networks) do
    local plain = cache.stability { late = 1 }
    local dense = draw(network, { plain })
    local some = cache.stability { late = 1, tokens = 0.25, network = network[1] }
    local x, run = draw(network, { some })
    local counts = {}
    for _, note in ipairs(some:notes(run)) do
      for _, what in pairs(note) do counts[what] = (counts[what] or 0) + 1 end
    end
    check.equal((counts.tokens or 0) > 0, true, name .. ": some steps compute tokens alone")
    check.equal(x:isfinite():all():item(), true)
    some:remove()
    local all = cache.stability { late = 1, tokens = 0.999, network = network[1] }
    check.close((draw(network, { all })):tolist(), dense:tolist(), 1e-4, name)
    all:remove()
  end
end)

check.test("wrong arguments", function()
  check.fails(function() cache.easy { threshold = -1 } end, "cache.easy: threshold: expected a number >= 0, got -1")
  check.fails(function() cache.easy():notes {} end, "cache.easy: notes: run: expected a run")
  check.fails(function() cache.delta(dit, { cached = 9 }) end,
    "cache.delta: cached: expected an integer in [1, 5], got 9")
  check.fails(function() cache.stability { tokens = 0.5 } end, "cache.stability: network: expected a module, got nil")
  check.fails(function() cache.stability { to = 2 } end, "cache.stability: to: expected a number in [0, 1], got 2")
  local unet = hub.load(root .. "unet_sd1", { dtype = "f32" })
  check.fails(function() cache.delta(unet) end, "cache.delta: network: expected one whose blocks feed each other")
  local blocks = diffusion.blocks(unet)
  blocks:remove()
  local order = diffusion.blocks(dit)
  check.fails(function()
    draw(networks.dit, { cache.easy { threshold = 0.5, warmup = 1 }, order:part(function() end) })
  end, "expected calls of the network for all samples")
  order:remove()
end)

check.finish()
