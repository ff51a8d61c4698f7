-- Tokens cached from step to step: nothing changed where nothing is used again, an unchanged picture gives the same
-- where all is, the hard choice against the relaxed one, gradients of the gate by finite differences, memories of
-- episodes.
local here = arg and arg[0]:match ".*/" or "tests/modules/vlm/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local models, vlm = require "tycho.models", require "tycho.vlm"
local cache = vlm.token_cache

local function model()
  ty.manual_seed(3)
  local m = models.ActionModel { words = { "a", "b", "c" }, image_size = 32, patch_size = 8, tower_channels = 8,
    phrase_length = 4, text_config = { hidden_size = 16, intermediate_size = 24, num_hidden_layers = 3,
      num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 64 }, head_hidden_size = 16,
    head_layers = 1, head_heads = 2 }
  -- Larger than they begin, so that all parts of a layer matter.
  for _, p in ipairs(m.language_model:parameters()) do
    if p.ndim == 2 then ty.no_grad(function() p:mul_(8) end) end
  end
  return m:eval()
end

local words = ty.tensor({ { 2, 3, 0, 0 }, { 4, 2, 3, 0 }, { 3, 0, 0, 0 } }, { dtype = "i64" })
local function look(episodes)
  return { images = ty.randn(3, 3, 32, 32), states = ty.randn(3, 4), words = words, episodes = episodes }
end
local function apart(a, b) return (a - b):abs():max():item() end
local function none(now) return ty.zeros({ now.seen.shape[1], 16 }, { dtype = "bool" }) end
local function all(now) return ty.ones({ now.seen.shape[1], 16 }, { dtype = "bool" }) end

check.test("nothing used again: the model's own state, at every step", function()
  local m = model()
  local policy = cache.apply(m, { choose = none })
  for _ = 1, 3 do
    local o = look { 5, 6, 7 }
    local want = ty.no_grad(function() return m:encode(o).query end)
    check.ok(apart(policy:encode(o).query, want) < 1e-4)
  end
  check.equal(policy.reused, 0)
end)

check.test("the same picture and all of it used again: the same state", function()
  local m = model()
  local policy, o = cache.apply(m, { choose = all }), look { 5, 6, 7 }
  local first = policy:encode(o).query
  local again = policy:encode(o)
  check.ok(apart(again.query, first) < 1e-4)
  check.equal(again.reused:all():item(), true)
  check.equal(policy.reused, 0.5)
  -- Another picture does not change it, other joints do: no token of the picture was computed.
  local other = look { 5, 6, 7 }
  other.states = o.states
  check.ok(apart(policy:encode(other).query, first) < 1e-4)
  check.ok(apart(policy:encode(look { 5, 6, 7 }).query, first) > 1e-3)
end)

check.test("the hard choice is the relaxed one where this is 0 or 1", function()
  local m = model()
  ty.no_grad(function()
    local before, now = look(), look()
    local _, old = cache.mixed(m, m:embed(before))
    local x = m:embed(now)
    local fresh = ty.tensor({ { 1, 4, 9 }, { 0, 1, 2 }, { 13, 14, 15 } }, { dtype = "i64" })
    local mask = ty.ones({ 3, 16 }):scatter(1, fresh, ty.zeros { 3, 3 })
    local soft, kept = cache.mixed(m, x, old, mask)
    local hard, memory = cache.resume(m, x, old, fresh)
    check.ok(apart(soft, hard) < 1e-4)
    for i = 1, 3 do
      for j = 1, 2 do check.ok(apart(kept[i][j], memory[i][j]) < 1e-4) end
    end
    check.ok(apart(soft, (cache.mixed(m, x))) > 1e-3)
  end)
end)

check.test("gradients of the mix by finite differences", function()
  local m = model():to "f64"
  local before, now = look(), look()
  for _, o in ipairs { before, now } do o.images, o.states = o.images:to "f64", o.states:to "f64" end
  local old, x = ty.no_grad(function()
    local _, memory = cache.mixed(m, m:embed(before))
    return memory, m:embed(now)
  end)
  local mask = ty.rand(3, 16):to "f64"
  local direction = ty.randn(3, 16):to "f64"
  local weights = ty.randn(3, 16):to "f64"
  local function value(of) return (cache.mixed(m, x, old, of) * weights):sum() end
  local leaf = mask:clone():requires_grad_(true)
  value(leaf):backward()
  local slope = (leaf.grad * direction):sum():item()
  local step = 1e-5
  local found = ty.no_grad(function()
    return (value(mask + direction * step):item() - value(mask - direction * step):item()) / (2 * step)
  end)
  check.close(slope, found, 1e-5)
  check.ok(math.abs(slope) > 1e-6)
end)

check.test("the gate: as many as a ratio says, the highest scores, gradients through both networks", function()
  local m = model()
  local gate = cache.Gate(m, { ratios = { 0, 0.25, 1 } })
  local scores, logits = ty.randn(4, 16), ty.tensor { { 9, 0, 0 }, { 0, 9, 0 }, { 0, 0, 9 }, { 0, 9, 0 } }
  local mask = gate:mask(scores, logits, { noise = false })
  check.close(mask:sum({ 1 }):tolist(), { 0, 4, 16, 4 }, 1e-5)
  local top = scores:topk(4, 1):select(0, 1):min():item()
  check.close((mask:select(0, 1) * scores:select(0, 1):ge(top):to "f32"):sum():item(), 4, 1e-5)
  local states = ty.randn(3, 4)
  local s, l = gate(ty.randn(3, 16, 16), ty.randn(3, 16, 16), states, states * 0.5)
  -- The relaxed mask is differentiable in what both say.
  gate:mask(s, l + ty.tensor { 0, 5, 0 }, { noise = false }):square():sum():backward()
  check.ok(gate.score.weight.grad:abs():max():item() > 0)
  check.ok(gate.ratio[3].weight.grad:abs():max():item() > 0)
end)

check.test("the cost alone: a gate learns to use everything again; without it nothing drives it there", function()
  local m = model()
  ty.manual_seed(1)
  local gate = cache.Gate(m)
  local report = cache.fit(m, gate, function() return { now = look(), before = look() } end,
    function(query) return query:sum() * 0 end, { steps = 60, cost = 1, lr = 0.02 })
  check.ok(report.reused > 0.8, ("reused %.2f"):format(report.reused))
  local policy = cache.apply(m, { choose = gate:eval():chooser() })
  for _ = 1, 2 do policy:encode(look { 1, 2, 3 }) end
  check.ok(policy.reused > 0.4)
end)

check.test("episodes have memories of their own, and counts of all sizes", function()
  local m = model()
  local function some(now) -- row i keeps i tokens more
    local n = now.seen.shape[1]
    return ty.arange(16):reshape(1, 16):lt(ty.arange(n):reshape(n, 1) * 5 + 3)
  end
  local together = cache.apply(m, { choose = some, step = 1 })
  local looks = { look { 1, 2, 3 }, look { 1, 2, 3 } }
  together:encode(looks[1])
  local want = together:encode(looks[2])
  for i = 0, 2 do
    local alone = cache.apply(m, { choose = function(now)
      return ty.arange(16):reshape(1, 16):lt(i * 5 + 3):expand(now.seen.shape[1], 16)
    end, step = 1 })
    local found
    for _, o in ipairs(looks) do
      found = alone:encode { images = o.images:narrow(0, i, 1), states = o.states:narrow(0, i, 1),
        words = words:narrow(0, i, 1), episodes = { 9 } }
    end
    check.ok(apart(found.query:select(0, 0), want.query:select(0, i)) < 1e-4)
  end
end)

check.test("wrong arguments", function()
  local m = model()
  check.fails(function() cache.apply(m) end, "choose: expected a function")
  check.fails(function() cache.chooser("none", {}) end, 'expected "fixed", "random" or "similar"')
  check.fails(function() cache.apply(m, { choose = none }):encode(look()) end, "observation.episodes")
end)

check.finish()
