-- ty.checkpoint: values, gradients, random numbers, nesting, memory.
local here = arg and arg[0]:match ".*/" or "tests/lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local nn = ty.nn

local function block(h, w) return ty.tanh(h:matmul(w)):sigmoid() * h end

local function gradients(run, leaves)
  for _, leaf in ipairs(leaves) do leaf:set_grad() end
  local loss = run()
  loss:backward()
  local result = { loss:item() }
  for i, leaf in ipairs(leaves) do result[i + 1] = leaf.grad and leaf.grad:tolist() or "none" end
  return result
end

local function leaves(n)
  ty.manual_seed(4)
  return ty.randn(n, n):requires_grad_(), ty.randn(n, n):requires_grad_()
end

check.test("the same values and gradients", function()
  local x, w = leaves(5)
  local plain = gradients(function() return block(block(x, w), w):sum() end, { x, w })
  local kept = gradients(function() return ty.checkpoint(block, ty.checkpoint(block, x, w), w):sum() end, { x, w })
  check.equal(kept, plain, "bit for bit")
end)

check.test("nested", function()
  local x, w = leaves(5)
  local function pair(h, weight) return block(block(h, weight), weight) end
  local function inner(h, weight)
    return ty.checkpoint(block, ty.checkpoint(block, h, weight), weight) * ty.checkpoint(pair, h, weight)
  end
  local function plain_inner(h, weight) return pair(h, weight) * pair(h, weight) end
  local plain = gradients(function() return pair(plain_inner(x, w), w):sum() end, { x, w })
  local kept = gradients(function()
    return ty.checkpoint(function(h) return pair(ty.checkpoint(inner, h, w), w) end, x):sum()
  end, { x, w })
  check.close(kept, plain, 1e-12)
end)

check.test("random numbers are replayed", function()
  local x = leaves(20)
  local function noisy(h) return ty.dropout(h * 2, 0.5, true) * ty.randn_like(h) end
  ty.manual_seed(8)
  local plain = gradients(function() return (noisy(x) * ty.rand_like(x)):sum() end, { x })
  local after = ty.rand(1):item()
  ty.manual_seed(8)
  local kept = gradients(function() return (ty.checkpoint(noisy, x) * ty.rand_like(x)):sum() end, { x })
  check.equal(kept, plain)
  check.equal(ty.rand(1):item(), after, "the generator goes on as if nothing had run again")
end)

check.test("several results, tables, other arguments", function()
  local x, w = leaves(3)
  local function many(h, scale, flags, weight)
    return { sum = h * scale, list = { h:matmul(weight):exp() } }, flags.on and h:square() or h
  end
  local function total(f)
    local t, extra = f()
    return (t.sum * t.list[1]):sum() + extra:sum()
  end
  local plain = gradients(function() return total(function() return many(x, 3, { on = true }, w) end) end, { x, w })
  local kept = gradients(function()
    return total(function() return ty.checkpoint(many, x, 3, { on = true }, w) end)
  end, { x, w })
  check.equal(kept, plain)
end)

check.test("parameters used inside, without gradients, twice", function()
  local model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
  local x = ty.randn(2, 4)
  local function forward(h) return model(h) end
  local plain = gradients(function() return model(x):square():sum() end, model:parameters())
  local kept = gradients(function() return ty.checkpoint(forward, x):square():sum() end, model:parameters())
  check.equal(kept, plain)
  check.equal(ty.no_grad(function() return ty.checkpoint(forward, x) end).requires_grad, false)
  local loss = ty.checkpoint(forward, x):square():sum()
  loss:backward { keep_graph = true }
  model:zero_grad()
  loss:backward()
  check.equal(model[1].weight.grad:tolist(), plain[2], "the graph can be walked again")
end)

check.test("second derivatives", function()
  local x, w = leaves(3)
  local function run(f)
    local g = ty.grad(f(x, w):square():sum(), { x }, { create_graph = true })[1]
    return ty.grad(g:square():sum(), { w })[1]:tolist()
  end
  check.close(run(function(...) return ty.checkpoint(block, ...) end), run(block), 1e-12)
end)

check.test("mistakes", function()
  local x = leaves(3)
  local calls = 0
  local y = ty.checkpoint(function(h)
    calls = calls + 1
    return calls == 1 and h:exp():exp() or h:exp()
  end, x)
  check.fails(function() y:sum():backward() end, "must do the same both times")
  check.fails(function() ty.checkpoint(function() error "inside" end, x) end, "inside")
  local again = 0
  local z = ty.checkpoint(function(h)
    again = again + 1
    if again > 1 then error "only once" end
    return h:exp():exp()
  end, x)
  check.fails(function() z:sum():backward() end, "only once")
  check.close(gradients(function() return ty.checkpoint(block, x, x):sum() end, { x }),
    gradients(function() return block(x, x):sum() end, { x }), 1e-12, "all is well afterwards")
end)

check.test("memory: a deep net needs the activations of one segment", function()
  local function deep(h)
    for _ = 1, 8 do h = h:sin():cos() end
    return h
  end
  local function peak(f, apart)
    collectgarbage()
    ty.memory.reset_peak "cpu"
    local before = ty.memory.stats("cpu").live
    ty.scope(function()
      local x = ty.randn(64, 1024):requires_grad_()
      local h = x
      for _ = 1, 8 do h = apart and f(h) or ty.scope(f, h) end
      h:sum():backward()
    end)
    return ty.memory.stats("cpu").peak - before
  end
  local plain = peak(deep)
  local kept = peak(function(h) return ty.checkpoint(deep, h) end)
  check.equal(kept * 3 < plain, true, ("%d bytes with checkpoints, %d without"):format(kept, plain))
  local alone = peak(function(h) return ty.checkpoint(deep, h) end, true)
  check.equal(alone <= kept, true, ("%d bytes without a scope around each, %d with one"):format(alone, kept))
end)

check.finish()
