-- Policies of chunks and their networks: fusion against its definition and at its beginning, one condition for many
-- samples, horizon 1 against single steps, what stays frozen, what is learnt, what is refused.
local here = arg and arg[0]:match ".*/" or "tests/modules/diffusion/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local datasets = require "tycho.datasets"
local diffusion = require "tycho.diffusion"
local fusion = require "tycho.models.fusion"

local nn, arm = ty.nn, datasets.arm

local function list(x) return x:detach():flatten():tolist() end

local function shaken(module, by)
  for _, p in ipairs(module:parameters()) do ty.no_grad(function() p:add_(ty.randn_like(p) * (by or 0.2)) end) end
  return module
end

check.test("cross-attention begins as the geometric features alone, and is what it says after that", function()
  ty.manual_seed(1)
  local cross = fusion.Fusion { semantic = 5, geometric = 3, width = 8, heads = 2 }:to "f64"
  local s, g = ty.randn({ 2, 4, 5 }, { dtype = "f64" }), ty.randn({ 2, 4, 3 }, { dtype = "f64" })
  local alone = fusion.Fusion { semantic = 5, geometric = 3, width = 8, way = "geometric" }:to "f64"
  ty.no_grad(function()
    alone.geometric.weight:copy_(cross.geometric.weight)
    alone.geometric.bias:copy_(cross.geometric.bias)
  end)
  check.equal(list(cross(s, g)), list(alone(s, g)))
  check.ok(ty.grad(cross(s, g):sum(), { cross.proj.weight })[1]:abs():max():item() > 0) -- it can leave that
  shaken(cross)
  local from, to = cross.geometric(g), cross.semantic(s)
  local q = cross.q(cross.norm(from))
  local k, v = cross.kv(cross.norm_semantic(to)):chunk(2, -1)
  local parts = {}
  for h = 0, 1 do
    local weights = (q:narrow(2, 4 * h, 4):matmul(k:narrow(2, 4 * h, 4):transpose(1, 2)) / 2):softmax(-1)
    parts[h + 1] = weights:matmul(v:narrow(2, 4 * h, 4))
  end
  check.close(list(cross(s, g)), list(from + cross.proj(ty.concat(parts, 2))), 1e-10)
  local joined = fusion.Fusion { semantic = 5, geometric = 3, width = 8, way = "concat" }:to "f64"
  check.close(list(joined(s, g)), list(joined.join(ty.concat({ joined.semantic(s), joined.geometric(g) }, 2))), 1e-12)
  local semantic = fusion.Fusion { semantic = 5, geometric = 3, width = 8, way = "semantic" }:to "f64"
  check.equal(list(semantic(s, g)), list(semantic.semantic(s)))
end)

local small = { words = 6, states = 4, actions = 2, horizon = 3, phrase = 3, condition = 16, head = 32, depth = 2 }
local function fused(more)
  local o = { semantic = 6, geometric = 5, width = 8, heads = 2, places = 4, compressed = 4 }
  for key, value in pairs(small) do o[key] = value end
  for key, value in pairs(more or {}) do o[key] = value end
  return fusion.FusedPolicy(o)
end

local function observation(n, dtype)
  return { semantic = ty.randn({ n, 16, 6 }, { dtype = dtype }), geometric = ty.randn({ n, 16, 5 }, { dtype = dtype }),
    words = ty.randint(0, 6, { n, 3 }), states = ty.randn({ n, 4 }, { dtype = dtype }) }
end

check.test("many samples for a condition are as many passes, and belong to it in order", function()
  ty.manual_seed(2)
  local net, seen = shaken(fused()):to "f64", observation(2, "f64")
  local x, t = ty.randn({ 6, 3, 2 }, { dtype = "f64" }), ty.randint(0, 1000, { 6 }):to "f64"
  local condition = net:encode(seen)
  local all = net:denoise(x, t, condition)
  check.equal(all.shape, { 6, 3, 2 })
  for i = 0, 5 do
    local one = net:denoise(x:narrow(0, i, 1), t:narrow(0, i, 1), condition:narrow(0, i // 3, 1))
    check.close(list(one), list(all:narrow(0, i, 1)), 1e-12)
  end
end)

check.test("a policy learns chunks from what it sees; what it sees them with stays as it is", function()
  ty.manual_seed(3)
  local eye = fusion.GeometryNet { width = 8 }
  local before = {}
  for name, p in eye:named_parameters() do before[name] = list(p) end
  local n = 48
  local images = ty.rand(n, 3, 64, 64) * 2 - 1
  local features = ty.no_grad(function() return eye:features(images) end)
  check.equal(features.shape, { n, 64, 8 })
  local way = ty.arange(n) % 2
  local actions = ty.stack({ way:to "f32" * 2 - 1, 1 - way:to "f32" * 2 }, 1):unsqueeze(1):expand(n, 3, 2) * 0.7
  local examples = { observation = { semantic = ty.zeros(n, 64, 6), geometric = features, states = ty.zeros(n, 4),
    words = ty.stack({ way, way, way }, 1) + 1 }, actions = actions }
  local agent = diffusion.ChunkPolicy(fused { geometric = 8, places = 8 }, { horizon = 3, execute = 2, actions = 2 })
  local fitted = agent:fit(examples, { steps = 160, batch = 16, samples = 4, lr = 5e-3 })
  check.ok(fitted.loss < 0.3 and fitted.seconds > 0)
  local done = agent:act(examples.observation)
  check.equal(done.shape, { n, 2, 2 })
  check.ok((done - actions:narrow(1, 0, 2)):abs():mean():item() < 0.2)
  for name, p in eye:named_parameters() do check.equal(list(p), before[name], name) end
  local front, points = eye(images:narrow(0, 0, 2))
  check.equal({ front.shape, points.shape }, { { 2, 5, 8, 8 }, { 2, 6 } })
end)

check.test("what is kept of the picture is what the words are about; the optimizer is the one that is given", function()
  ty.manual_seed(5)
  local function made(n) -- words name one of four places, and what is seen there is to be done
    local seen, named = (ty.rand(n, 16, 5):gt(0.5):to "f32") * 2 - 1, ty.randint(0, 4, { n })
    return { observation = { semantic = ty.zeros(n, 16, 6), geometric = seen, states = ty.zeros(n, 4),
      words = named:unsqueeze(1):expand(n, 3) + 1 },
      actions = seen:select(2, 0):gather(1, named:unsqueeze(1) * 5):unsqueeze(2):expand(n, 3, 2) * 0.7 }
  end
  local agent = diffusion.ChunkPolicy(fused { geometric = 5, width = 16, condition = 32 },
    { horizon = 3, execute = 2, actions = 2 })
  local learning, unseen, asked = made(1024), made(200), {}
  agent:fit(learning, { steps = 600, batch = 64, samples = 4, lr = 5e-3, optimizer = function(network, o)
    asked = o
    return ty.optim.AdamW(network:parameters(), o)
  end })
  local off = (agent:act(unseen.observation) - unseen.actions:narrow(1, 0, 2)):abs():mean():item()
  check.ok(off < 0.2, tostring(off))
  check.equal({ asked.lr, asked.clip_norm, asked.weight_decay }, { 5e-3, 1, nil })
  check.fails(function() agent:fit(learning, { optimizer = 3 }) end, "optimizer: expected a function, got 3")
end)

check.test("a chunk of horizon 1 is the policy step by step; longer ones look less often", function()
  ty.manual_seed(4)
  local net = shaken(fusion.PixelPolicy { words = 4, states = 4, horizon = 1, phrase = 2, condition = 16, head = 16,
    depth = 1, size = 32, channels = { 8, 8 }, compressed = 2 })
  local agent = diffusion.ChunkPolicy(net, { horizon = 1, execute = 1, prepare = function(o)
    return { images = o.images:to "f32" / 127.5 - 1, words = o.words, states = o.states }
  end })
  local function act(images, states)
    return arm.actions(agent:act({ images = images, states = states,
      words = ty.zeros({ images.shape[1], 2 }, { dtype = "i64" }) }, { seeds = { 7 }, steps = 3 }))
  end
  local env = arm.env { split = "validation", size = 32 }
  local seen, states = env:reset(0), {}
  for step = 1, 6 do
    seen = env:step(act(seen.image:unsqueeze(0), seen.state:unsqueeze(0)):flatten():tolist())
    states[step] = seen.state:tolist()
  end
  local found = {}
  local result = arm.trial(function(now)
    found[#found + 1] = now.states:tolist()[1]
    return act(now.images, now.states)
  end, { episodes = 1, size = 32, looks = 7 })
  for step = 1, 6 do check.equal(found[step + 1], states[step]) end
  check.close({ result.steps, result.looks }, { 7, 7 }, 1e-9)
  result = arm.trial(function() return ty.zeros(1, 3, 4) end, { episodes = 1, size = 32, looks = 2 })
  check.close({ result.steps, result.looks }, { 6, 2 }, 1e-9)
end)

check.test("demonstrations as chunks: the expert's actions from what is seen on, and back", function()
  local found = arm.chunks { episodes = 3, looks = 100, horizon = 4, size = 32, geometry = true, back = 2 }
  local set, at = datasets.load("arm", { size = 32 }), 0
  for i = 0, 2 do
    local item, env = set:get(i), arm.env { size = 32 }
    local actions, states = item.actions:tolist(), item.states:tolist()
    env:begin(i)
    local length = 0
    while not env:success() do
      length = length + 1
      env:advance(actions[length])
    end
    local chunks = arm.actions(found.actions:narrow(0, at, length)):tolist()
    for step = 1, length do
      check.equal(found.tasks[at + step], item.task)
      local seen = found.states:select(0, at + step - 1):tolist()
      check.equal({ table.unpack(seen, 5, 8) }, states[step])
      check.equal({ table.unpack(seen, 1, 4) }, states[math.max(1, step - 2)])
      for k = 1, 4 do
        check.close(chunks[step][k], actions[step + k - 1] and step + k - 1 <= length and actions[step + k - 1]
          or { 0, 0, 0, actions[length][4] }, 1e-6)
      end
    end
    at = at + length
  end
  check.equal(found.images.shape[1], at)
  check.equal(found.front:select(1, 7):select(1, 7):max():item() >= 1, true) -- the table below
  local tip = found.points:select(0, 0):tolist()
  local env = arm.env {}
  env:begin(0)
  check.close({ tip[5], tip[6] }, { env.world.tip.x / 512 - 1, 1 - env.world.tip.y / 512 }, 1e-5)
end)

check.test("what is refused", function()
  check.fails(function() fusion.Fusion { semantic = 3 } end, "Fusion: geometric: expected an integer >= 1, got nil")
  check.fails(function() fusion.Fusion { semantic = 3, geometric = 3, way = "sum" } end, 'way: expected "cross"')
  check.fails(function() fused()(3) end)
  check.fails(function() fused():encode { semantic = ty.ones(3), geometric = ty.ones(3) } end,
    "expected [n, places, width]")
  local seen = observation(2, "f32")
  seen.words = ty.zeros({ 2, 5 }, { dtype = "i64" })
  check.fails(function() fused():encode(seen) end, "FusedPolicy:encode: observation.words: expected [n, 3]")
  check.fails(function() fused():denoise(ty.ones(3, 3, 2), ty.ones(3), ty.ones(2, 16)) end,
    "x: expected [a multiple of 2, 3, 2]")
  check.fails(function()
    fused():encode { semantic = ty.ones(2, 9, 6), geometric = ty.ones(2, 9, 5) }
  end, "FusedPolicy:encode: observation: expected features of 16 places, got 9")
  check.fails(function() fusion.PixelPolicy {} end, "PixelPolicy: words: expected")
  check.fails(function() fusion.PixelPolicy { words = 3 }:encode { images = ty.ones(1, 3, 32, 32) } end,
    "PixelPolicy:encode: observation.images: expected [n, 3, 64, 64], got a tensor [1, 3, 32, 32]")
  check.fails(function() fusion.GeometryNet():features(ty.ones(1, 3, 32, 32)) end, "expected [n, 3, 64, 64]")
  check.fails(function() diffusion.ChunkPolicy(nn.Linear(1, 1), { execute = 9 }) end, "execute: expected at most")
  check.fails(function() diffusion.ChunkPolicy(3) end, "ChunkPolicy: network: expected a module")
  check.fails(function() diffusion.ChunkPolicy(nn.Linear(1, 1)):fit({}, {}) end, "examples.observation: expected")
  check.fails(function() arm.chunks { horizon = 0 } end, "arm.chunks: horizon: expected an integer in %[1, 1000%]")
  check.fails(function() arm.actions(ty.ones(3)) end, "datasets.arm.actions: chunk: expected [n, horizon, 4]")
end)

check.finish()
