-- Pipelines: schedules as figures have them, gradients as those of one rank, memory, bubbles, grids and timelines.
local here = arg and arg[0]:match ".*/" or "tests/modules/dist/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local dist = require "tycho.dist"

local test, equal, near, fails = check.test, check.equal, check.close, check.fails
local schedule, pipeline = dist.schedule, dist.pipeline

-- "F0 F1 B0": the actions of a rank.
local function order(list)
  local words = {}
  for i, a in ipairs(list) do
    words[i] = (a.kind == "forward" and "F" or "B") .. a.micro .. (a.chunk > 0 and "'" or "")
  end
  return table.concat(words, " ")
end

test("schedules have the published order", function()
  local s = schedule.gpipe(2, 3)
  for rank = 1, 2 do equal(order(s[rank]), "F0 F1 F2 B2 B1 B0") end
  s = schedule.one_f_one_b(4, 8)
  equal(order(s[1]), "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7")
  equal(order(s[3]), "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7")
  equal(order(s[4]), "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7")
  s = schedule.interleaved(4, 8, 2)
  equal(order(s[1]), "F0 F1 F2 F3 F0' F1' F2' F3' F4 F5 F6 B0' F7 B1' F4' B2' F5' B3' F6' B0 F7' B1 B2 B3 B4' B5' B6' "
    .. "B7' B4 B5 B6 B7")
  equal(order(s[4]):sub(1, 38), "F0 F1 F2 F3 F0' B0' F1' B1' F2' B2' F3")
end)

test("a schedule does everything once, and takes what the formulas say", function()
  for _, p in ipairs { 1, 2, 3, 4, 7 } do
    for _, m in ipairs { 1, 2, 5, 8, 28 } do
      local all = { schedule.gpipe(p, m), schedule.one_f_one_b(p, m) }
      for chunks = 1, m % p == 0 and 3 or 0 do all[#all + 1] = schedule.interleaved(p, m, chunks) end
      for i, s in ipairs(all) do
        for rank = 1, p do
          local seen = {}
          for _, a in ipairs(s[rank]) do
            local key = a.kind .. " " .. a.micro .. " " .. a.chunk
            equal(seen[key], nil, key)
            seen[key] = true
          end
          equal(#s[rank], 2 * m * s.chunks)
        end
        local ideal = schedule.simulate(s, { forward = 1, backward = 3 })
        local share, of_ideal, seconds = schedule.bubble(ideal.rows)
        near(of_ideal, (p - 1) / m / s.chunks, 1e-9, s.name)
        near(seconds, ideal.seconds, 1e-9)
        if i == 1 then near(share, (p - 1) / (m + p - 1), 1e-9) end
        for rank = 1, p do
          local most = ideal.in_flight[rank]
          if s.name == "gpipe" then equal(most, m) end
          if s.name == "one_f_one_b" then equal(most, math.min(m, p - rank + 1)) end
        end
      end
    end
  end
  local stuck = schedule.gpipe(2, 2)
  stuck[1][1], stuck[1][3] = stuck[1][3], stuck[1][1]
  fails(function() schedule.simulate(stuck) end, "rank 0 waits forever for backward of micro-batch 1")
end)

test("layers are divided so that the dearest stage is as cheap as can be", function()
  equal(pipeline.divide({ 1, 1, 1, 1 }, 2), { { 1, 2 }, { 3, 4 } })
  equal(pipeline.divide({ 0, 4, 4, 4, 4, 1 }, 4), { { 1, 2 }, { 3, 3 }, { 4, 4 }, { 5, 6 } })
  equal(pipeline.divide({ 9, 1, 1, 1 }, 2), { { 1, 1 }, { 2, 4 } })
  equal(pipeline.divide({ 0, 0, 0 }, 3), { { 1, 1 }, { 2, 2 }, { 3, 3 } })
  -- Against all ways.
  ty.manual_seed(2)
  for _ = 1, 20 do
    local costs = ty.randint(0, 20, { 7 }):tolist()
    local function sum(a, b)
      local s = 0
      for i = a, b do s = s + costs[i] end
      return s
    end
    local best = math.huge
    for a = 1, 5 do
      for b = a + 1, 6 do best = math.min(best, math.max(sum(1, a), sum(a + 1, b), sum(b + 1, 7))) end
    end
    local most = 0
    for _, part in ipairs(pipeline.divide(costs, 3)) do most = math.max(most, sum(part[1], part[2])) end
    equal(most, best)
  end
  local L = ty.nn.Linear
  equal(pipeline.costs({ L(4, 8, { bias = false }), L(8, 2, { bias = false }) }, ty.ones(3, 4)), { 192.0, 96.0 })
end)

-- The largest difference of the rank's gradients by a pipeline and without one, of the largest of each.
local function compare(group, layers, inputs, targets, loss, options, reference)
  local ty_, d = require "tycho", require "tycho.dist"
  local o = { loss = loss }
  for key, value in pairs(options) do o[key] = value end
  local p = d.pipeline.new(group, layers, o)
  local own, piped = p:parameters(), {}
  local got = { loss = p:step(inputs, targets), count = #own, in_flight = p.in_flight, ties = #p.ties }
  for i, q in ipairs(own) do
    piped[i] = q.grad:clone()
    q:set_grad(nil)
  end
  local want = reference and reference() or (function()
    local x = inputs
    for _, layer in ipairs(layers) do x = layer(x) end
    return loss(x, targets)
  end)()
  want:backward()
  got.want, got.worst = want:item(), 0
  for i, q in ipairs(own) do
    got.worst = math.max(got.worst, (q.grad - piped[i]):abs():max():item() / q.grad:abs():max():item())
  end
  for _, q in ipairs(own) do q:set_grad(nil) end
  ty_.no_grad(function() got.evaluated = p:evaluate(inputs, targets) end)
  return got
end

local work = dist.workload.open { length = 6, width = 32, layers = 6, rows = 4, chapters = 12, vocabulary = 260 }

test("gradients of a Llama are those of one rank, with a head that is the embedding and without", function()
  local function run(group, kind, dtype, tied, again)
    local ty_, d = require "tycho", require "tycho.dist"
    local config = { tie_word_embeddings = tied }
    for key, value in pairs(work.config) do if config[key] == nil then config[key] = value end end
    ty_.manual_seed(3)
    local model = require "tycho.models.llama" (config):to(dtype)
    local rows = d.workload.rows(work, 0, 0, 0, 8)
    local s = d.schedule[kind](group.size, 4, kind == "interleaved" and 2 or nil)
    return compare(group, d.pipeline.layers(model), rows:narrow(1, 0, 6):contiguous(),
      rows:narrow(1, 1, 6):contiguous(),
      function(logits, y) return ty_.nn.cross_entropy(logits:flatten(0, 1), y:flatten()) end,
      { schedule = s, recompute = again }, function() return d.workload.loss(model, rows) end)
  end
  for _, case in ipairs { { "gpipe", "f64", true, true }, { "gpipe", "f32", false, false },
    { "one_f_one_b", "f64", true, false }, { "one_f_one_b", "f64", false, true }, { "interleaved", "f64", true, true },
    { "interleaved", "f32", true, false } } do
    local name, exact = table.concat({ case[1], case[2], tostring(case[3]) }, " "), case[2] == "f64"
    local got = dist.run(4, function(...) return run(...) end, nil, table.unpack(case))
    for rank, r in ipairs(got) do
      equal(r.worst < (exact and 1e-12 or 1e-5), true, ("%s: rank %d is %g apart"):format(name, rank - 1, r.worst))
      near(r.loss, r.want, exact and 1e-12 or 1e-5, name)
      near(r.evaluated, r.want, exact and 1e-12 or 1e-5, name)
      equal(r.count > 5, true)
      equal(r.ties, case[3] and (rank == 1 or rank == 4) and 1 or 0)
    end
    equal(got[1].in_flight, case[1] == "interleaved" and 8 or 4)
    equal(got[4].in_flight, ({ gpipe = 4, one_f_one_b = 1, interleaved = 8 })[case[1]])
  end
end)

test("gradients of steps add up, those of shared parameters, too; and ranks train as one", function()
  local function train(group)
    ty.manual_seed(4)
    local L = ty.nn.Linear
    local first = L(4, 4)
    local layers = { first, L(4, 6), L(6, 4), first, L(4, 4) }
    for _, l in ipairs(layers) do l:to "f64" end
    local p = dist.pipeline.new(group, layers, { schedule = dist.schedule.one_f_one_b(group.size, 3),
      loss = ty.nn.mse_loss, costs = { 1, 1, 1, 1, 1 } })
    local optimizer = ty.optim.AdamW(p:parameters(), { lr = 0.01 })
    local losses = {}
    for step = 1, 3 do
      optimizer:zero_grad()
      losses[step] = 0
      for part = 1, 2 do
        local x = (ty.arange(24, { dtype = "f64" }):reshape(6, 4) + 7 * step + part):sin()
        losses[step] = losses[step] + p:step(x, (2 * x):cos())
      end
      optimizer:step()
    end
    return losses
  end
  local one = dist.run(1, train)
  for ranks = 2, 5 do
    local many = dist.run(ranks, train)
    for rank = 1, ranks do near(many[rank], one[1], 1e-12) end
  end
end)

test("what runs twice has the same random numbers, and counts once in running means", function()
  local function run(group, again, skip)
    local nn = ty.nn
    ty.manual_seed(5)
    local model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 6), nn.BatchNorm1d(6),
      nn.Linear(6, 2)):to "f64"
    local p = dist.pipeline.new(group, dist.pipeline.layers(model), { schedule = dist.schedule.gpipe(group.size, 4),
      loss = nn.mse_loss, recompute = again })
    ty.manual_seed(6)
    local x = (ty.arange(64, { dtype = "f64" }):reshape(16, 4)):sin()
    if skip then model[3]:eval() end
    local out = { p:step(x, x:narrow(1, 0, 2):contiguous()) }
    for _, q in ipairs(p:parameters()) do out[#out + 1] = q.grad:tolist() end
    for _, stage in ipairs(p.stages) do
      for _, layer in ipairs(stage) do
        for _, buffer in layer:named_buffers() do out[#out + 1] = buffer:tolist() end
      end
    end
    return out
  end
  local twice, once = dist.run(2, run, nil, true), dist.run(2, run, nil, false)
  for rank = 1, 2 do near(twice[rank], once[rank], 1e-12) end
  local other = dist.run(2, run, nil, true, true)
  equal(math.abs(other[1][1] - once[1][1]) > 1e-3, true, "numbers that were dropped make a difference")
end)

test("stages that are themselves divided, with data that is: a grid of eight ranks trains as one", function()
  local function train(group, sizes, chunks)
    local nn = ty.nn
    local Half = nn.module "Half" -- a feed-forward network of which each rank has some of the inner values
    function Half:init(tensor, up, down)
      local n = up.shape[1] // tensor.size
      rawset(self, "tensor", tensor)
      self.up = up:narrow(0, tensor.rank * n, n):contiguous():requires_grad_()
      self.down = down:narrow(1, tensor.rank * n, n):contiguous():requires_grad_()
    end
    function Half:forward(x)
      local h = ty.linear(dist.copied(self.tensor, x), self.up):gelu()
      return x + dist.summed(self.tensor, ty.linear(h, self.down))
    end
    local grid = dist.grid(group, sizes)
    ty.manual_seed(7)
    local layers = { nn.Linear(3, 4):to "f64" }
    for i = 2, 5 do
      local up, down = ty.randn({ 8, 4 }, { dtype = "f64" }), ty.randn({ 4, 8 }, { dtype = "f64" })
      layers[i] = Half(grid.tensor, up / 2, down / 3)
    end
    layers[6] = nn.Linear(4, 3):to "f64"
    local p = dist.pipeline.new(grid.pipeline, layers, { loss = nn.mse_loss,
      schedule = chunks and dist.schedule.interleaved(grid.pipeline.size, 4, chunks)
        or dist.schedule.one_f_one_b(grid.pipeline.size, 4) })
    local optimizer = ty.optim.AdamW(p:parameters(), { lr = 0.02 })
    local buckets, losses = dist.buckets(p:parameters()), {}
    for step = 1, 4 do
      local x = (ty.arange(48, { dtype = "f64" }):reshape(16, 3) * step):sin()
      local share = 16 // grid.data.size
      local mine = x:narrow(0, share * grid.at.data, share):contiguous()
      optimizer:zero_grad()
      local loss = p:step(mine, (3 * mine):cos())
      buckets:mean_gradients(grid.data)
      optimizer:step()
      losses[step] = grid.data:all_reduce(ty.tensor({ loss }, { dtype = "f64" }), "mean"):item()
    end
    return losses
  end
  local function of(n, sizes, chunks)
    return dist.run(n, train, nil, { tensor = sizes[1], pipeline = sizes[2], data = sizes[3] }, chunks)
  end
  local one = of(1, { 1, 1, 1 })[1]
  equal(one[4] < one[1], true, "it learns")
  for _, case in ipairs { { 8, { 2, 2, 2 } }, { 8, { 2, 2, 2 }, 3 }, { 4, { 1, 2, 2 }, 2 }, { 6, { 2, 3, 1 } } } do
    for rank, losses in ipairs(of(table.unpack(case))) do near(losses, one, 1e-12, "rank " .. rank - 1) end
  end
end)

test("a grid puts ranks that share layers side by side and stages far apart", function()
  local got = dist.run(12, function(group)
    local grid = dist.grid(group, { tensor = 2, pipeline = 3, data = 2 })
    return { grid.at, grid.tensor.members, grid.data.members, grid.pipeline.members, grid.pipeline.rank }
  end)
  equal(got[1], { { tensor = 0, pipeline = 0, data = 0 }, { 0, 1 }, { 0, 2 }, { 0, 4, 8 }, 0 })
  equal(got[12], { { tensor = 1, pipeline = 2, data = 1 }, { 10, 11 }, { 9, 11 }, { 3, 7, 11 }, 2 })
end)

test("recorded bubbles are those of the formulas, where ranks are busy alike", function()
  local trial = dist.pipeline_trial
  for _, case in ipairs { { "gpipe", 2, 4, 1 }, { "gpipe", 3, 6, 1 }, { "one_f_one_b", 3, 6, 1 },
    { "interleaved", 2, 4, 2 } } do
    local name, p, m, v = table.unpack(case)
    local r = trial.run(nil, p, { schedule = name, micro_batches = m, chunks = v, layers = p * v, busy = 0.1,
      recompute = false, steps = 1 })
    near(r.of_ideal, (p - 1) / m / v, 0.04 * (p - 1) / m / v, name)
  end
end)

test("what runs twice is not kept: memory of activations, and less of it with one forwards, one backwards", function()
  local function run(name, again, m, chunks)
    return dist.pipeline_trial.run(work, 2, { schedule = name, micro_batches = m, chunks = chunks, recompute = again,
      rows = 4, steps = 1, gradients = true })
  end
  local few, many, kept_few, kept = run("gpipe", true, 2), run("gpipe", true, 8), run("gpipe", false, 2),
    run("gpipe", false, 8)
  equal(many.most < 0.5 * kept.most, true, ("%d of %d bytes"):format(many.most, kept.most))
  equal(many.most < 1.7 * few.most, true, "as much with more micro-batches, but for what goes into the stages")
  equal(kept.most > 3 * kept_few.most, true)
  local alternating = run("one_f_one_b", false, 8)
  equal(alternating.most < 0.4 * kept.most, true, ("%d of %d bytes"):format(alternating.most, kept.most))
  local more = run("interleaved", false, 8, 2)
  near(more.sent / kept.sent, 3, 0.05, "three passings in place of one")
  local one = dist.pipeline_trial.run(work, 1, { micro_batches = 1, rows = 32, steps = 1, gradients = true })
  equal(dist.pipeline_trial.apart(kept.gradients, one.gradients[1]) < 1e-5, true)
  equal(dist.pipeline_trial.apart(alternating.gradients, one.gradients[1]) < 1e-5, true)
end)

test("timelines", function()
  local s = schedule.interleaved(2, 4, 2)
  local rows = schedule.simulate(s).rows
  table.insert(rows[1], { name = "send", from = 1, to = 1.2, bytes = 7 })
  local picture = dist.timeline({ { title = "a < b", rows = rows }, { rows = { {} } } }, { width = 400 })
  local svg = picture:svg()
  local _, boxes = svg:gsub("<rect", "")
  equal(svg:find("a &lt; b", 1, true) ~= nil and svg:find("rank 1", 1, true) ~= nil, true)
  local _, more = dist.timeline({ { title = "a < b", rows = rows }, { rows = { {} } } },
    { width = 400, exchanges = true }):svg():gsub("<rect", "")
  equal(more, boxes + 1, "an exchange is drawn when it is wanted")
  equal(boxes >= 2 * 16 + 3 + 1, true)
  local pixels = picture:pixels()
  equal(pixels.shape[3], 400)
  equal(pixels:to("f32"):std():item() > 10, true)
  fails(function() dist.timeline {} end, "panels: expected at least one")
  fails(function() dist.timeline { { rows = { { { name = "x", from = 0 } } } } } end,
    "expected events { name, from, to }")
  fails(function() dist.timeline { { rows = { { { name = "x", from = 0, to = 0 / 0 } } } } } end, "expected events")
  fails(function() picture:save "x.gif" end, "expected the ending .svg or .png")
end)

test("arguments", function()
  local L = ty.nn.Linear
  local function alone(fn, text) fails(function() dist.run(1, fn) end, text) end
  local mse = ty.nn.mse_loss
  alone(function(g) pipeline.new(g, { L(1, 1) }, {}) end, "schedule: expected one of dist.schedule, got nil")
  alone(function(g) pipeline.new(g, { L(1, 1) }, { schedule = schedule.gpipe(2, 1), loss = mse }) end,
    "expected one for the 1 ranks of the group, got one for 2")
  alone(function(g) pipeline.new(g, {}, { schedule = schedule.gpipe(1, 1), loss = mse }) end,
    "layers: expected at least 1")
  alone(function(g) pipeline.new(g, { L(1, 1) }, { schedule = schedule.gpipe(1, 1), loss = mse, costs = { 1, 2 } }) end,
    "costs: expected one for each of the 1 layers, got 2")
  alone(function(g)
    pipeline.new(g, { L(1, 1) }, { schedule = schedule.gpipe(1, 3), loss = mse }):step(ty.ones(4, 1), ty.ones(4, 1))
  end, "inputs: expected a multiple of the 3 micro-batches along dimension 0, got a tensor [4, 1]")
  alone(function(g) dist.grid(g, { tensor = 2 }) end, "expected a product of 1, the ranks of the group, got 2 * 1 * 1")
  fails(function() pipeline.new(3, {}, {}) end, "group: expected a group, got 3")
  fails(function() pipeline.layers(L(1, 1)) end, "expected a Sequential, a list of modules or a decoder")
  fails(function() pipeline.layers { 3 } end, "layer 1: expected a module")
  fails(function() pipeline.divide({ 1 }, 2) end, "expected at least 2 layers")
  fails(function() schedule.interleaved(2, 3, 2) end, "expected a multiple of the 2 ranks, got 3")
  fails(function() schedule.gpipe(0, 3) end, "ranks: expected an integer >= 1, got 0")
  fails(function() schedule.bubble { {} } end, "expected events forward and backward, got none")
  fails(function() schedule.simulate(3) end, "schedule: expected a schedule, got 3")
  fails(function() dist.pipeline_trial.run(nil, 2) end, "work: expected a workload, or busy layers")
end)

check.finish()
