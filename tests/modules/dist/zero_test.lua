-- ZeRO: whatever ranks divide, they train as one rank does; what each holds and sends is what the paper says.
local here = arg and arg[0]:match ".*/" or "tests/modules/dist/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local dist = require "tycho.dist"

-- A network with parameters of the outermost module, a layer whose weight is used twice, at both ends, a frozen one,
-- and one that is not used. Makes it on a rank.
local function network()
  local t = require "tycho"
  local nn = t.nn
  local Net = nn.module()
  function Net:init()
    self.scale = nn.Parameter(t.full({ 6 }, 0.7))
    self.embed = nn.Embedding(11, 6)
    self.blocks = nn.ModuleList { nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6)), nn.Linear(6, 6),
      nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6)) }
    self.norm = nn.LayerNorm(6)
    self.unused = nn.Linear(2, 2)
  end
  function Net:forward(tokens)
    local x = self.embed(tokens)
    for _, block in ipairs(self.blocks) do x = x + block(x) end
    return self.norm(x) * self.scale:cos():matmul(t.ones({ 6 }, { dtype = x.dtype })) * self.scale
  end
  function Net:loss(tokens, labels)
    return t.cross_entropy(self(tokens):flatten(0, 1):matmul(self.embed.weight:t()), labels:flatten())
  end
  t.manual_seed(3)
  local net = Net()
  net.blocks[2].weight:requires_grad_(false)
  return net
end

local function batch(step, first, count)
  local places = ty.arange(count * 4):reshape(count, 4) + (first * 4 + 7 * step)
  return (places * 5 % 11):to "i64", (places * places % 11):to "i64"
end

-- Losses of steps and parameters afterwards, by ranks together or, with stage nil, by one as usual.
local function train(group, stage, dtype, clip, steps)
  local t, d = require "tycho", require "tycho.dist"
  local net = network():to(dtype)
  local function make(list) return t.optim.AdamW(list, { lr = 0.02, weight_decay = 0.1 }) end
  local share, losses, out = 12 // group.size, {}, { norms = {} }
  local engine, optimizer
  if stage then
    engine = d.zero(group, net, { stage = stage, optimizer = make, bucket = 300, clip_norm = clip })
  else
    local list = {}
    for _, p in ipairs(net:parameters()) do
      if p.requires_grad then
        p:set_grad(t.zeros_like(p)) -- what is not used decays as well
        list[#list + 1] = p
      end
    end
    optimizer = make(list)
  end
  for step = 1, steps do
    local tokens, labels = batch(step, share * group.rank, share)
    if engine then
      losses[step], out.norms[step] = engine:step(function() return net:loss(tokens, labels) end)
      losses[step] = group:all_reduce(t.tensor(losses[step], { dtype = "f64" }), "mean"):item()
    else
      for _, p in ipairs(net:parameters()) do if p.grad then p.grad:zero_() end end
      local loss = net:loss(tokens, labels)
      loss:backward()
      if clip > 0 then out.norms[step] = t.optim.clip_grad_norm(net, clip) end
      optimizer:step()
      losses[step] = loss:item()
    end
  end
  local tokens, labels = batch(0, 0, 12)
  out.after = t.no_grad(function() return net:loss(tokens, labels):item() end)
  if engine then engine:close() end
  out.losses, out.state = losses, {}
  for name, p in net:named_parameters() do out.state[name] = p:detach():to("f64"):flatten():tolist() end
  out.still = t.no_grad(function() return net:loss(tokens, labels):item() end)
  return out
end

for _, dtype in ipairs { "f64", "f32" } do
  check.test("as one rank trains, " .. dtype, function()
    local tolerance = dtype == "f64" and 1e-12 or 2e-6
    for _, clip in ipairs { 0, 0.5 } do
      local want = dist.run(1, train, nil, nil, dtype, clip, 5)[1]
      check.equal(want.losses[5] < want.losses[1] - 0.05, true, "it learns")
      for _, ranks in ipairs(dtype == "f32" and { 3 } or clip == 0 and { 1, 2, 4 } or { 3 }) do
        for stage = 0, 3 do
          local got = dist.run(ranks, train, nil, stage, dtype, clip, 5)
          for rank, out in ipairs(got) do
            local where = ("stage %d, rank %d of %d"):format(stage, rank - 1, ranks)
            check.close(out.losses, want.losses, tolerance, where)
            if clip > 0 then check.close(out.norms, want.norms, tolerance, where) end
            for name, values in pairs(want.state) do check.close(out.state[name], values, tolerance, where .. name) end
            check.close(out.after, want.after, tolerance, where)
            check.close(out.still, want.after, tolerance, where)
          end
        end
      end
    end
  end)
end

-- What a rank has and sends: bytes of all that stays between the backward pass and the step, for each parameter.
local function shares(group, stage, half)
  local t, d = require "tycho", require "tycho.dist"
  t.manual_seed(1)
  local model = t.nn.Sequential(t.nn.Linear(64, 128), t.nn.ReLU(), t.nn.Linear(128, 128), t.nn.ReLU(),
    t.nn.Linear(128, 64))
  local psi, losses, sent = model:count_parameters(), {}, nil
  local engine = d.zero(group, model, { stage = stage, half = half, bucket = 1 << 15 })
  local live
  for step = 1, 3 do
    local x = (t.arange(256):reshape(4, 64) * (step + 4 * group.rank)):sin()
    local before = group:traffic().bytes
    losses[step] = engine:backward(function()
      return model(half and x:to(half) or x):to("f32"):square():mean()
    end)
    x:free()
    collectgarbage()
    collectgarbage()
    live = group:memory() / psi
    engine:update()
    sent = (group:traffic().bytes - before) / psi
  end
  group:reset_memory()
  local after = group:memory() / psi
  engine:close()
  local values = {}
  for i, p in ipairs(model:parameters()) do values[i] = p:detach():to("f32"):flatten():tolist() end
  return { live = live, after = after, sent = sent, losses = losses, values = values }
end

check.test("bytes that stay and bytes that are sent", function()
  for _, half in ipairs { "bf16", false } do
    local width = half and 2 or 4
    for _, n in ipairs(half and { 1, 2, 4 } or { 4 }) do
      local first
      for stage = 0, 3 do
        local got = dist.run(n, shares, nil, stage, half or nil)
        local whole = stage == 0 and 16 or stage == 1 and 2 * width or stage == 2 and width or 0
        local want, ring = whole + (16 - whole) / n, (n - 1) / n * width
        local where = ("stage %d of %d, %s"):format(stage, n, half or "f32")
        check.close(got[1].live, want, 0.05, where)
        check.close(got[1].after, want - (stage < 2 and 0 or width / n), 0.05, where)
        -- The last unit stays from its forward to its backward pass.
        if stage < 3 then check.close(got[1].sent, 2 * ring, 0.05, where)
        else check.equal(got[1].sent > 2.4 * ring - 1e-9 and got[1].sent <= 3.001 * ring, true, where) end
        first = first or got
        -- Sums are in the order of ranks whatever is divided: the same bits in all stages.
        for rank = 1, n do
          check.equal(got[rank].values, got[1].values, where)
          check.equal(got[rank].losses, first[rank].losses, where)
        end
        check.equal(got[1].values, first[1].values, where)
      end
    end
  end
end)

check.test("half precision has its steps from f32", function()
  local got = dist.run(1, function(group)
    local t, d = require "tycho", require "tycho.dist"
    local model = t.nn.Sequential(t.nn.Linear(3, 2))
    local weight = model[1].weight:detach():clone()
    local engine = d.zero(group, model, { stage = 2, half = "bf16",
      optimizer = function(list) return t.optim.AdamW(list, { lr = 1e-4 }) end })
    local x = t.ones({ 1, 3 }, { dtype = "bf16" })
    local want, m, v = weight:clone(), t.zeros(2, 3), t.zeros(2, 3)
    for step = 1, 30 do
      engine:step(function() return model(x):to("f32"):sum() end)
      m, v = 0.9 * m + 0.1, 0.999 * v + 0.001 -- gradients of ones
      want = want * (1 - 1e-6) - 1e-4 * (m / (1 - 0.9 ^ step)) / ((v / (1 - 0.999 ^ step)):sqrt() + 1e-8)
    end
    return { model[1].weight.dtype, model[1].weight:to("f32"):tolist(), want:to("bf16"):to("f32"):tolist(),
      weight:to("bf16"):to("f32"):tolist() }
  end)[1]
  check.equal(got[1], "bf16")
  check.equal(got[2], got[3])
  check.equal(table.concat(got[2][1], " ") ~= table.concat(got[4][1], " "), true, "steps too small for bf16 add up")
end)

-- A layer that takes a rank a while both ways.
local function slow_layers(group, t, n, seconds)
  local pause = t.custom_op { name = "pause", forward = function(_, x)
    group:advance(seconds)
    return x * 1
  end, backward = function(_, g)
    group:advance(seconds)
    return g
  end }
  local layers = {}
  for i = 1, n do
    local Slow = t.nn.module()
    function Slow:init() self.linear = t.nn.Linear(32, 32) end
    function Slow:forward(x) return pause(self.linear(x)) end
    layers[i] = Slow()
  end
  return t.nn.Sequential(table.unpack(layers))
end

check.test("units come while others compute, and gradients go", function()
  local function seconds(ahead)
    return dist.run(2, function(group)
      local t, d = require "tycho", require "tycho.dist"
      local model = slow_layers(group, t, 6, 1)
      local engine = d.zero(group, model, { ahead = ahead })
      local from
      for _ = 1, 2 do
        from = group:clock()
        engine:step(function() return model(t.ones(2, 32)):sum() end)
      end
      return group:clock() - from
    end, { latency = 0.5 })[1]
  end
  local waiting, ahead = seconds(0), seconds(1)
  -- 12 seconds of work; 6 and 5 gathers of half a second each; of the reductions all but the last in the shade.
  check.equal(ahead > 12.9 and ahead < 14.2, true, ahead)
  check.equal(waiting - ahead > 3.5, true, waiting - ahead)
end)

check.test("a model that no rank holds", function()
  local function fits(stage)
    return pcall(dist.run, 4, function(group)
      local t, d = require "tycho", require "tycho.dist"
      local layers = {}
      for i = 1, 12 do layers[i] = t.nn.Linear(128, 128) end -- under 6.5 bytes a parameter
      local model = t.nn.Sequential(table.unpack(layers))
      local engine = d.zero(group, model, { stage = stage, half = "bf16", bucket = 1 << 16 })
      local first, last
      for _ = 1, 4 do
        last = engine:step(function() return (model(t.ones({ 2, 128 }, { dtype = "bf16" })) - 1):square():mean() end)
        first = first or last
      end
      return first - last
    end, { memory = 13 * 6 * 128 * 129 })
  end
  for stage = 0, 1 do
    local ok, problem = fits(stage)
    check.equal({ ok, problem:find "memory" ~= nil }, { false, true }, problem)
  end
  local ok, result = fits(3)
  check.equal(ok and result[1] > 0, true, ok and result[1] or result)
end)

check.test("the model between steps: inference, and several times in a row", function()
  local got = dist.run(2, function(group)
    local t, d = require "tycho", require "tycho.dist"
    local net = network()
    local tokens = batch(1, 0, 2)
    local want = t.no_grad(function() return net(tokens):tolist() end)
    local engine = d.zero(group, net, { stage = 3 })
    local out = {}
    for i = 1, 3 do out[i] = t.no_grad(function() return net(tokens):tolist() end) end
    local away = net.blocks[1][1].weight.device
    local norm = net.norm.weight:sum():item() -- an op brings it back
    engine:close()
    engine:close()
    return { want, out, away, norm, net.blocks[1][1].weight.device }
  end)
  for rank = 1, 2 do
    check.equal(got[rank][2], { got[rank][1], got[rank][1], got[rank][1] })
    check.equal({ got[rank][3], got[rank][4], got[rank][5] }, { "meta", 6, "cpu" })
  end
end)

check.test("arguments", function()
  local function alone(text, fn) check.fails(function() dist.run(1, fn) end, text) end
  alone("dist.zero: group: expected a group, got 3", function() require("tycho.dist").zero(3) end)
  alone("dist.zero: model: expected a module, got nil", function(g) require("tycho.dist").zero(g) end)
  alone("stage: expected 0 or 1 or 2 or 3, got 4", function(g)
    require("tycho.dist").zero(g, require("tycho").nn.Linear(2, 2), { stage = 4 })
  end)
  alone("expected one without clip_norm", function(g)
    local t = require "tycho"
    require("tycho.dist").zero(g, t.nn.Linear(2, 2), { optimizer = function(list)
      return t.optim.AdamW(list, { clip_norm = 1 })
    end })
  end)
  alone("expected a function that makes one of ty.optim", function(g)
    require("tycho.dist").zero(g, require("tycho").nn.Linear(2, 2), { optimizer = function() end })
  end)
  alone("expected parameters that require gradients", function(g)
    local layer = require("tycho").nn.Linear(2, 2)
    for _, p in ipairs(layer:parameters()) do p:requires_grad_(false) end
    require("tycho.dist").zero(g, layer)
  end)
  alone("ZeroEngine:update: expected backward() before it", function(g)
    require("tycho.dist").zero(g, require("tycho").nn.Linear(2, 2)):update()
  end)
  alone("ZeroEngine:backward: fn: expected a tensor", function(g)
    require("tycho.dist").zero(g, require("tycho").nn.Linear(2, 2)):step(function() return 3 end)
  end)
end)

check.finish()
