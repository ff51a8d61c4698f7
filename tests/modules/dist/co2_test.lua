-- CO2 against its equations in numbers of Lua, and that its all-reduce is hidden behind the next round.
local here = arg and arg[0]:match ".*/" or "tests/modules/dist/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local dist = require "tycho.dist"

local test, equal, near, fails = check.test, check.equal, check.close, check.fails

local function trained(x, rank, round) return x + 0.3 * ((rank + 1) * math.sin(round) - x) end

local function run(n, options, rounds)
  return dist.run(n, function(group, o, count)
    local ty_, d = require "tycho", require "tycho.dist"
    local a = ty_.tensor({ 1.0, -2.0 }, { dtype = "f64" }):requires_grad_()
    local b = ty_.tensor({ 0.5 }, { dtype = "f64" }):requires_grad_()
    local outer, all = d.CO2(group, { a, b }, o), {}
    for round = 1, count + 1 do
      if round <= count then
        for _, p in ipairs { a, b } do
          local x = p:detach()
          x:add_((group.rank + 1) * math.sin(round) - x, 0.3)
        end
        outer:step()
      else
        outer:finish()
        outer:finish() -- nothing is left
      end
      all[round] = { a[0]:item(), a[1]:item(), b[0]:item() }
    end
    return all
  end, nil, options, rounds)
end

-- The same in Lua: x of all rounds, and what the gaps were.
local function reference(n, o, rounds)
  local x, m, late, moved, largest, all, gaps = { 1.0, -2.0, 0.5 }, { 0, 0, 0 }, nil, nil, 0, {}, {}
  for round = 1, rounds + 1 do
    local change = {}
    for k = 1, 3 do
      change[k] = 0
      for rank = 0, n - 1 do change[k] = change[k] + (x[k] - trained(x[k], rank, round)) / n end
    end
    if late then
      largest = math.max(largest, moved or 0)
      local gap = o.penalty ~= "gap" and o.penalty or moved and 1 + moved / largest or 1
      gaps[#gaps + 1] = gap
      local length = 0
      for k = 1, 3 do
        m[k] = o.momentum * m[k] + late[k] / gap
        local step = o.lr * math.max(-o.clip, math.min(o.clip, m[k]))
        x[k], length = x[k] - step, length + step ^ 2
      end
      moved = math.sqrt(length)
    end
    late = change
    all[round] = { x[1], x[2], x[3] }
  end
  return all, gaps
end

test("CO2 is its equations: a change is used one round late, by what is stale, and clipped", function()
  for _, o in ipairs {
    { lr = 0.9, momentum = 0.3, penalty = "gap", clip = math.huge },
    { lr = 0.9, momentum = 0.3, penalty = "gap", clip = 0.2 },
    { lr = 0.7, momentum = 0, penalty = 1.5, clip = math.huge },
  } do
    local got, want, gaps = run(3, o, 6), reference(3, o, 6)
    for rank = 1, 3 do
      for round = 1, 7 do near(got[rank][round], want[round], 1e-12, "round " .. round) end
    end
    equal(got[1][1], { 1, -2, 0.5 }, "the first round has nothing yet")
    equal(gaps[1] == (o.penalty == "gap" and 1 or 1.5), true)
    equal(gaps[2] == (o.penalty == "gap" and 2 or 1.5), true)
    if o.penalty == "gap" then equal(gaps[6] > 1 and gaps[6] < 2, true) end
  end
end)

test("changes one round late swing for ever where rounds go all the way; with the penalty they do not", function()
  local function distance(penalty)
    return dist.run(1, function(group, p)
      local ty_, d = require "tycho", require "tycho.dist"
      local x = ty_.tensor({ 1.0 }, { dtype = "f64" }):requires_grad_()
      local outer, most = d.CO2(group, { x }, { penalty = p, momentum = 0 }), 0
      for round = 1, 60 do
        x:detach():zero_() -- a round ends at the minimum
        outer:step()
        if round > 50 then most = math.max(most, math.abs(x:item())) end
      end
      return most
    end, nil, penalty)[1]
  end
  near(distance(1), 1, 1e-12)
  equal(distance(2) < 1e-6, true)
  equal(distance "gap" < 0.5, true, distance "gap")
end)

test("the network is waited for only where it takes longer than a round", function()
  local function seconds(kind, latency)
    return dist.run(2, function(group, name)
      local ty_, d = require "tycho", require "tycho.dist"
      local x = ty_.ones(1000):requires_grad_()
      local outer = d[name](group, { x })
      for _ = 1, 10 do
        group:advance(1)
        outer:step()
      end
      if outer.finish then outer:finish() end
      return group:clock()
    end, { latency = latency }, kind)[1]
  end
  near(seconds("CO2", 0.45), 10.9, 0.3) -- an all-reduce of two ranks has two latencies; the last is waited for
  near(seconds("DiLoCo", 0.45), 19, 0.3)
  near(seconds("CO2", 1), 21, 0.3, "ten all-reduces, one after the other")
end)

test("arguments", function()
  local function alone(options, text)
    fails(function() dist.run(1, function(g) require("tycho.dist").CO2(g, { ty.ones(1) }, options) end) end, text)
  end
  alone({ penalty = 0.5 }, "dist.CO2: penalty: expected")
  alone({ penalty = "gaps" }, "dist.CO2: penalty: expected")
  alone({ clip = 0 }, "dist.CO2: clip: expected")
  fails(function() dist.CO2(3, {}) end, "dist.CO2: group: expected a group, got 3")
end)

check.finish()
