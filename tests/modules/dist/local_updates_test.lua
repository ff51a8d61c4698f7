-- DiLoCo and NoLoCo against their equations in numbers of Lua, who waits for whom, and what is exchanged.
local here = arg and arg[0]:match ".*/" or "tests/modules/dist/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local dist = require "tycho.dist"
local updates = dist.local_updates

local test, equal, near, fails = check.test, check.equal, check.close, check.fails

-- What a replica's own steps make of its weights: each is drawn towards a place of its own.
local function trained(x, rank, round) return x + 0.3 * ((rank + 1) * math.sin(round) - x) end

-- `rounds` rounds of an outer optimizer on two tensors, the slow weights of all of them, by rank.
local function weights_of(n, kind, options, rounds, own)
  return dist.run(n, function(group, name, o, count, apart)
    local ty_, d = require "tycho", require "tycho.dist"
    local first = apart and group.rank or 0
    local a = ty_.tensor({ 1.0 + first, -2.0 }, { dtype = "f64" }):requires_grad_()
    local b = ty_.tensor({ { 0.5 - first } }, { dtype = "f64" }):requires_grad_()
    local outer = d[name](group, { a, b }, o)
    local all = {}
    for round = 1, count do
      for _, p in ipairs { a, b } do
        local x = p:detach()
        x:add_((group.rank + 1) * math.sin(round) - x, 0.3)
      end
      outer:step()
      all[round] = { a[0]:item(), a[1]:item(), b[0][0]:item() }
    end
    return all
  end, nil, kind, options, rounds, own)
end

test("pairs: of an even number all, of an odd number all but one, another each round", function()
  local met, alone = {}, {}
  for round = 1, 300 do
    local seen = 0
    for rank = 0, 5 do
      local partner = updates.partner(6, rank, 3, round)
      equal(updates.partner(6, partner, 3, round) == rank and partner ~= rank, true)
      met[rank * 6 + partner] = (met[rank * 6 + partner] or 0) + 1
      seen = seen + (updates.partner(5, math.min(rank, 4), 3, round) and rank < 5 and 1 or 0)
      if rank < 5 and not updates.partner(5, rank, 3, round) then alone[rank] = (alone[rank] or 0) + 1 end
    end
    equal(seen, 4)
  end
  for a = 0, 5 do
    for b = 0, 5 do equal(a == b or met[a * 6 + b] > 30 and met[a * 6 + b] < 95, true, "of 300, 60 are expected") end
  end
  for rank = 0, 4 do equal(alone[rank] > 30, true) end
  local same = 0
  for round = 1, 50 do same = same + (updates.partner(6, 0, 3, round) == updates.partner(6, 0, 4, round) and 1 or 0) end
  equal(same < 30, true, "other seeds have other pairs")
  equal(updates.partner(1, 0, 0, 1), nil)
end)

test("DiLoCo is Nesterov's momentum on the mean change", function()
  local n, lr, momentum = 3, 0.7, 0.6
  local got = weights_of(n, "DiLoCo", { lr = lr, momentum = momentum }, 5)
  for k, first in ipairs { 1.0, -2.0, 0.5 } do
    local x, m = first, 0
    for round = 1, 5 do
      local change = 0
      for rank = 0, n - 1 do change = change + (x - trained(x, rank, round)) / n end
      m = momentum * m + change
      x = x - lr * (change + momentum * m)
      for rank = 1, n do near(got[rank][round][k], x, 1e-12) end
    end
  end
end)

-- One weight of all replicas by eq. 2 and 3.
local function noloco(x, o, rounds)
  local n, m, all = #x, {}, {}
  for rank = 1, n do m[rank] = 0 end
  for round = 1, rounds do
    local next_x = {}
    for rank = 1, n do
      local partner = updates.partner(n, rank - 1, o.seed, round)
      local group = { rank, partner and partner + 1 }
      local change, mean = 0, 0
      for _, j in ipairs(group) do
        change = change + (trained(x[j], j - 1, round) - x[j]) / #group
        mean = mean + x[j] / #group
      end
      m[rank] = o.momentum * m[rank] + o.lr * change - o.pull * (x[rank] - mean)
      next_x[rank] = x[rank] + m[rank]
    end
    x = next_x
    all[round] = x
  end
  return all
end

test("NoLoCo is its equations, replicas of an even and an odd number, from different weights", function()
  for _, n in ipairs { 4, 5 } do
    local o = { lr = 0.8, momentum = 0.4, pull = 0.9, seed = 7 }
    local got = weights_of(n, "NoLoCo", o, 6, true)
    local a, b = {}, {}
    for rank = 1, n do a[rank], b[rank] = rank, 1.5 - rank end
    local want_a, want_b = noloco(a, o, 6), noloco(b, o, 6)
    for rank = 1, n do
      for round = 1, 6 do
        near(got[rank][round][1], want_a[round][rank], 1e-12)
        near(got[rank][round][3], want_b[round][rank], 1e-12)
      end
    end
  end
end)

test("the pull brings replicas together and leaves their mean; without it, or with too much, it does not", function()
  local function after(pull, rounds)
    return dist.run(6, function(group, strength, count)
      local ty_, d = require "tycho", require "tycho.dist"
      local x = ty_.tensor({ group.rank * 1.0 }, { dtype = "f64" }):requires_grad_()
      local outer = d.NoLoCo(group, { x }, { pull = strength, momentum = 0.5 })
      for _ = 1, count do outer:step() end
      return x:detach()
    end, nil, pull, rounds)
  end
  for _, pull in ipairs { 0.6, 0.7, 1.0 } do
    local x = after(pull, 60)
    near(ty.concat(x):mean():item(), 2.5, 1e-9)
    equal(updates.spread(x) < 0.05, true, pull .. ": " .. updates.spread(x))
  end
  near(updates.spread(after(0, 20)), math.sqrt(35 / 12), 1e-12)
  equal(updates.spread(after(3, 60)) > 100, true)
end)

test("messages with the partner alone: no collective, no wait for others, slow weights come meanwhile", function()
  local got = dist.run(4, function(group)
    local ty_, d = require "tycho", require "tycho.dist"
    local x = ty_.ones(1000):requires_grad_()
    local outer = d.NoLoCo(group, { x })
    group:advance(group.rank == 0 and 5 or 1)
    outer:step()
    local one = group:clock()
    for _ = 1, 3 do outer:step() end
    local t = group:traffic()
    return { one, t.calls, d.local_updates.partner(4, group.rank, 0, 1), t.bytes }
  end, { latency = 0.5, bandwidth = 8000 })
  -- A message is 4,000 bytes, 0.5 s, and 0.5 s on its way. Slow weights leave at once and arrive after 1 s.
  for rank = 0, 3 do
    local clock, calls, partner, bytes = table.unpack(got[rank + 1])
    near(clock, (rank == 0 or partner == 0) and 6 or 2, 0.2)
    for kind, count in pairs(calls) do equal(count, kind == "send" and 9 or 0, kind) end
    equal(bytes, 36000)
  end
end)

test("the spread of replicas", function()
  local x = { ty.tensor { 1.0, 2 }, ty.tensor { 3.0, 2 } }
  near(updates.spread(x), math.sqrt(0.5), 1e-12)
  equal(updates.spread { x[1] }, 0)
end)

test("training: the rows of data-parallel ranks are those of one, and what each way exchanges", function()
  local work = dist.workload.open { length = 12, width = 32, layers = 1, rows = 8, chapters = 20, vocabulary = 300 }
  local function train(n, options)
    local function one(group, w, o) return require("tycho.dist").local_training.train(group, w, o) end
    return dist.run(n, one, nil, work,
      options)
  end
  local one, two = train(1, { steps = 5, batch = 4 }), train(2, { steps = 5, batch = 2, curve = 2 })
  near(two[1].held_out, one[1].held_out, 2e-5)
  equal(#two[1].curve, 2)
  equal(two[1].collectives > 0, true)
  local o = { method = "DiLoCo", steps = 9, every = 3, batch = 2, snapshots = 3 }
  local diloco = train(2, o)
  equal({ diloco[1].collectives, #diloco[1].weights }, { 3, 3 })
  near(diloco[1].held_out, diloco[2].held_out, 0)
  o.method = "local SGD"
  local mean = train(2, o)
  equal(updates.spread { mean[1].weights[3], mean[2].weights[3] }, 0)
  equal(mean[1].weights[3]:equal(diloco[1].weights[3]), false)
  o.method = "NoLoCo"
  local noloco_ = train(2, o)
  for rank = 1, 2 do equal({ noloco_[rank].collectives, noloco_[rank].traffic.calls.send }, { 0, 7 }) end
  equal(updates.spread { noloco_[1].weights[1], noloco_[2].weights[1] } >= 0, true)
  o.method = "CO2"
  equal(train(2, o)[2].collectives, 3)
end)

test("the pace of rounds: one late replica holds up all of DiLoCo's, and of NoLoCo's its partner", function()
  local function seconds(n, o)
    local most = 0
    for _, x in ipairs(dist.run(n, function(group, options)
      return require("tycho.dist").local_training.pace(group, options)
    end, nil, o)) do
      most = math.max(most, x.seconds)
      equal(x.seconds >= x.waited, true)
    end
    return most
  end
  local o = { method = "DiLoCo", weights = 10, rounds = 10, late = 2 }
  near(seconds(8, o), 30, 0.1)
  o.method = "NoLoCo"
  local own = seconds(8, o)
  equal(own > 12 and own < 26, true, own)
  o.late, o.jitter = 0, 0.5
  local jittered = seconds(8, o)
  o.method = "DiLoCo"
  equal(jittered < seconds(8, o), true)
  near(seconds(1, { weights = 1, rounds = 3, method = "CO2", round_seconds = 2 }), 6, 0.1)
  near(seconds(2, { weights = 1, rounds = 3, method = "data parallel", every = 4 }), 3, 0.1)
end)

test("arguments", function()
  local function alone(fn, text) fails(function() dist.run(1, fn) end, text) end
  fails(function() dist.NoLoCo(3, {}) end, "dist.NoLoCo: group: expected a group, got 3")
  alone(function(g) require("tycho.dist").DiLoCo(g, {}) end, "dist.DiLoCo: parameters: expected at least one")
  alone(function(g) require("tycho.dist").DiLoCo(g, { ty.ones(1) }, { momentum = 1 }) end, "momentum: expected")
  alone(function(g) require("tycho.dist").NoLoCo(g, { ty.ones(1) }, { pull = -1 }) end, "pull: expected")
  alone(function(g)
    local d = require "tycho.dist"
    d.local_training.train(g, d.workload.open { chapters = 20 }, { method = "SGD" })
  end, "dist.local_training.train: method: expected")
  fails(function() updates.partner(2, 2, 0, 0) end, "updates.partner: rank: expected a rank of 0 to 1, got 2")
  fails(function() updates.spread {} end, "replicas: expected at least one")
  fails(function() updates.spread { ty.ones(1), ty.ones(2) } end, "expected tensors of one shape")
  fails(function() dist.local_training.pace(3) end, "dist.local_training.pace: group: expected a group, got 3")
  fails(function() dist.local_training.train(3, {}) end, "group: expected a group, got 3")
end)

check.finish()
