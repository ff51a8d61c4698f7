-- Sequences without padding: packing, who gets what, items that change ranks, and training that is that of padded rows.
local here = arg and arg[0]:match ".*/" or "tests/modules/dist/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local dist = require "tycho.dist"

local unpadded, trial = dist.unpadded, dist.unpadded_trial
local test, equal, close, fails = check.test, check.equal, check.close, check.fails

local function item(n, first) return ty.stack({ ty.arange(n) + first, ty.arange(n) - first }, 0) end

test("packing", function()
  local packed = unpadded.pack { item(3, 10), item(1, 20), item(2, 30) }
  equal(packed.values:tolist(), { { 10, 11, 12, 20, 30, 31 }, { -10, -9, -8, -20, -30, -29 } })
  equal({ packed.cu_seqlens:tolist(), packed.longest }, { { 0, 3, 4, 6 }, 3 })
end)

test("work is divided, and what need not move stays", function()
  local to, loads = unpadded.assign { { 5, 5 }, { 5, 5 } }
  equal({ to, loads }, { { { 0, 0 }, { 1, 1 } }, { 10, 10 } })
  to, loads = unpadded.assign { { 9, 1 }, { 2, 2, 2 }, {} }
  equal(to[1][1], 0)
  equal(math.max(table.unpack(loads)), 9)
  equal(loads[1] + loads[2] + loads[3], 16)
  -- Never more than a third above the best that there could be (Graham 1969), here for numbers drawn at random.
  local drawn = ty.seeded_noise(ty.empty(4, 16), 3, "uniform"):tolist()
  loads = select(2, unpadded.assign(drawn))
  local total, most = 0, 0
  for _, load in ipairs(loads) do total, most = total + load, math.max(most, load) end
  equal(most <= total / 4 * 1.02, true, most / total * 4)
  equal({ unpadded.cost(10, 2), unpadded.cost(0, 2) }, { 220, 0 })
end)

test("items change ranks, all of them and each once, while ranks go on", function()
  local got = dist.run(3, function(group)
    local d = require "tycho.dist"
    local items = {}
    for i = 1, group.rank == 1 and 0 or 4 do
      local n = (group.rank == 0 and 40 or 3) + i
      items[i] = ty.stack({ ty.full({ n }, 10 * group.rank + i, { dtype = "i64" }), ty.arange(n) }, 0)
    end
    local coming = d.unpadded.exchange(group, items, { width = 4 })
    group:advance(1)
    local before = group:clock()
    local mine, list, tokens = coming:wait(), {}, 0
    for i, x in ipairs(mine) do
      list[i] = { x[0][0]:item(), x.shape[2], x[1]:equal(ty.arange(x.shape[2])) }
      tokens = tokens + x.shape[2]
    end
    return { list = list, tokens = tokens, waited = group:clock() - before, moved = coming.moved,
      calls = group:traffic().calls }
  end, { latency = 0.01 })
  local seen, all = {}, 0
  for _, of in ipairs(got) do
    for _, one in ipairs(of.list) do
      equal({ seen[one[1]], one[3] }, { nil, true })
      seen[one[1]] = one[2]
      all = all + 1
    end
    equal(of.waited < 0.01, true, "messages had a second to arrive")
    equal(of.calls.all_reduce + of.calls.all_gather, 2)
  end
  equal({ all, seen[1], seen[24] }, { 8, 41, 7 })
  equal(got[2].tokens > 40, true, "a rank without items gets some")
  equal(got[1].moved > 0 and got[2].moved == 0, true)
end)

test("losses and gradients of unpadded ranks are those of one rank with padding", function()
  local passages = trial.passages { longest = 96, verses = 2, vocabulary = 300 }
  passages.items = table.move(passages.items, 1, 60, 1, {})
  local config = { vocab_size = passages.vocabulary, hidden_size = 16, num_hidden_layers = 2, num_attention_heads = 2,
    intermediate_size = 32, max_position_embeddings = 96, hidden_dropout_prob = 0, attention_probs_dropout_prob = 0 }
  local function run(ranks, options)
    local o = { config = config, passages = passages, items = 12 // ranks, steps = 3, warmup = 1, dtype = "f64",
      gradients = true }
    for key, value in pairs(options) do o[key] = value end
    return dist.run(ranks, function(group, settings)
      return require("tycho.dist").unpadded_trial.train(group, settings)
    end, nil, o)
  end
  local want = run(1, { way = "all" })[1]
  for _, options in ipairs { { way = "longest" }, { way = "unpadded" }, { way = "unpadded", balanced = true } } do
    for _, ranks in ipairs { 1, 3 } do
      local got = run(ranks, options)
      close(got[1].losses, want.losses, 1e-10)
      for i, g in ipairs(want.gradients) do close((got[ranks].gradients[i] - g):abs():max():item(), 0, 1e-11) end
      if options.way == "unpadded" then
        for _, of in ipairs(got) do equal(of.tokens, of.real) end
      else
        equal(got[1].tokens > got[1].real, true)
      end
    end
  end
end)

test("arguments", function()
  fails(function() unpadded.pack {} end, "dist.unpadded.pack: items: expected at least one, got none")
  fails(function() unpadded.pack { ty.ones(3) } end, "items[1]: expected i64")
  fails(function() unpadded.pack { item(2, 0), ty.ones(3, 2):to "i64" } end, "items[2]: expected i64 [2, length]")
  fails(function() unpadded.assign { { -1 } } end, "costs[1][1]: expected a number >= 0")
  fails(function() unpadded.exchange(3, {}) end, "group: expected a group, got 3")
  fails(function() unpadded.cost(-1, 2) end, "length: expected an integer >= 0")
end)

check.finish()
