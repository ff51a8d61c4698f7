-- Self-attention computed otherwise: cells, drafts, statistics of the softmax.
local here = arg and arg[0]:match ".*/" or "tests/modules/diffusion/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local diffusion = require "tycho.diffusion"
local hub = require "tycho.hub"

local attention = diffusion.attention
local root = check.root .. "tests/fixtures/diffusers/"

-- Weights that are 0 at the start would hide what attention does.
local function shaken(model)
  ty.manual_seed(3)
  ty.no_grad(function()
    for _, p in ipairs(model:parameters()) do p:add_(ty.randn_like(p) * 0.1) end
  end)
  return model:eval()
end

local dit = shaken(diffusion.DiT { size = 16, patch = 2, depth = 2, width = 32, classes = 0 })
local unet = shaken(diffusion.UNet { levels = { 32, { channels = 32, attention = true } }, classes = 4 })
local t = ty.tensor { 500.0, 20.0 }
local x, condition = ty.randn(2, 1, 16, 16), { labels = ty.zeros({ 2 }, { dtype = "i64" }) }
local function run(model) return ty.no_grad(model, x, t, condition) end
local function far(a, b) return (a - b):abs():amax():item() end
local function wrong(pattern, fn, ...)
  local given = table.pack(...)
  check.fails(function() fn(table.unpack(given, 1, given.n)) end, pattern)
end
local function heads(n) return ty.randn(2, 3, n, 8, { dtype = "f64" }) end

check.test("attention that is replaced by itself, in networks of all kinds, and put back", function()
  local sd1 = shaken(hub.load(root .. "unet_sd1", { dtype = "f32" }))
  local text = { text = { embeddings = ty.randn(2, 5, sd1.context) } }
  local cases = { { dit, x, condition }, { unet, x, condition }, { sd1, ty.randn(2, sd1.in_channels, 8, 8), text } }
  for i, case in ipairs(cases) do
    local function go() return ty.no_grad(case[1], case[2], t, case[3]) end
    local plain, calls = go(), 0
    local replaced = attention.replace(case[1], function(site, q, k, v)
      check.equal(site.name ~= nil and q.shape[3] == k.shape[3], true)
      calls = calls + 1
      return ty.scaled_dot_product_attention(q, k, v)
    end)
    check.equal(go():tolist(), plain:tolist(), "network " .. i)
    check.equal(calls, #replaced.sites)
    wrong("remove() that first", attention.replace, case[1], function() end)
    replaced:remove()
    check.equal(go():tolist(), plain:tolist(), "network " .. i)
    check.equal(calls > 0, true)
  end
  wrong("expected a network with self%-attention", attention.replace, ty.nn.Linear(2, 2), function() end)
end)

check.test("patches that attend with a text: parts are joined as one softmax", function()
  local sd3 = shaken(hub.load(root .. "sd3", { dtype = "f32" }))
  local text = { text = { embeddings = ty.randn(2, 5, sd3.config.joint_attention_dim),
    pooled = ty.randn(2, sd3.config.pooled_projection_dim),
    mask = ty.tensor { { 1, 1, 1, 0, 0 }, { 1, 1, 1, 1, 1 } } } }
  local patch = sd3.config.patch_size
  local map = ty.randn(2, sd3.config.in_channels, 4 * patch, 4 * patch)
  local function go() return ty.no_grad(sd3, map, t, text) end
  local plain, seen = go(), 0
  local replaced = attention.replace(sd3, function(_, q, k, v, part)
    seen = seen + (part and 1 or 0)
    local y = attention.layers.join { attention.layers.part(attention.layers.dense(q, k, v)), part }
    return y
  end)
  check.close(far(go(), plain), 0, 1e-5)
  check.equal(seen > 0, true)
  replaced:remove()
  local draft = attention.draft(sd3, { rows = 4, columns = 4, cell = { 2, 2 }, sparsity = 0 })
  check.close(far(go(), plain), 0, 1e-5)
  draft:remove()
  local part = attention.rettention(sd3, { rows = 4, columns = 4, cell = { 1, 2 }, warmup = 1, every = 9, growth = 0 })
  check.close(far(go(), plain), 0, 1e-5, "outside of a sampler")
  local made = { model = sd3, state = {} }
  made.state[part] = part:start(made)
  for step = 1, 3 do
    made.step = step
    check.close(far(part:call(made, go, { branches = { "condition" } }), plain), 0, 1e-5)
  end
  part:remove()
  check.equal(go():tolist(), plain:tolist())
end)

check.test("cells: tokens of a place together, and back", function()
  local cells = attention.cells { rows = 4, columns = 6, frames = 2, cell = { 2, 3 } }
  check.equal({ cells.tokens, cells.size, cells.count }, { 48, 6, 8 })
  check.equal(cells.order:narrow(0, 0, 6):tolist(), { 0, 1, 2, 6, 7, 8 })
  check.equal(cells.order:narrow(0, 30, 6):tolist(), { 27, 28, 29, 33, 34, 35 }, "the second cell of the second map")
  local q = heads(48)
  check.equal(cells:restore(cells:gather(q)):tolist(), q:tolist())
  check.equal(cells:nearest(1):flatten():tolist(), { 0, 1, 2, 3, 4, 5, 6, 7 })
  local two = cells:nearest(2):reshape(8, 2):tolist()
  check.equal(two[1], { 0, 4 }, "the same place in the other map is one step away")
  wrong("divide 4 rows and 6 columns", attention.cells, { rows = 4, columns = 6, cell = { 3, 3 } })
  wrong("rows: expected", attention.cells, { columns = 4 })
  wrong("expected at most 8 cells", cells.nearest, cells, 9)
  wrong("expected %[b, h, 48, d%]", cells.gather, cells, heads(47))
end)

-- ---- drafts ----

local cells = attention.cells { rows = 8, columns = 8, cell = { 2, 4 } }

-- Attention of tokens in the order of the map, in which cells see the listed ones, with the [t, t] matrix.
local function masked(q, k, v, blocks)
  local n = cells.count
  local seen = ty.zeros(q.shape[1], q.shape[2], n, n + 1):scatter_add(3, blocks + 1, ty.ones_like(blocks, "f32"))
  seen = seen:narrow(3, 1, n):gt(0):repeat_interleave(cells.size, 2):repeat_interleave(cells.size, 3)
  seen = seen:index_select(2, cells.inverse):index_select(3, cells.inverse)
  return ty.scaled_dot_product_attention(q, k, v, seen)
end

check.test("a draft with nothing left out is dense attention", function()
  local q, k, v = heads(64), heads(64), heads(64)
  check.close(far(attention.draft_attention(q, k, v, cells, 0), ty.scaled_dot_product_attention(q, k, v)), 0, 1e-12)
  local plain = run(dit)
  local draft = attention.draft(dit, { rows = 8, columns = 8, cell = { 2, 4 }, sparsity = 0 })
  check.close(far(run(dit), plain), 0, 1e-5)
  draft.sparsity = 0.9
  check.equal(far(run(dit), plain) > 1e-3, true)
  draft:remove()
  check.equal(run(dit):tolist(), plain:tolist())
end)

check.test("a sparse draft is dense attention under the expanded mask", function()
  local q, k, v = heads(64), heads(64), heads(64)
  local map = attention.draft_map(cells:gather(q), cells:gather(k), cells)
  local blocks = attention.draft_blocks(map, 0.7)
  check.close(far(attention.draft_attention(q, k, v, cells, 0.7), masked(q, k, v, blocks)), 0, 1e-12)
end)

check.test("the draft of what is constant in cells is the map itself; the threshold is a head's", function()
  local means = ty.randn(2, 3, 8, 8, { dtype = "f64" })
  local q = means:repeat_interleave(cells.size, 2)
  local map = attention.draft_map(q, q, cells)
  local full = (q:matmul(q:transpose(-2, -1)) * 8 ^ -0.5):exp()
  full = full:reshape(2, 3, 8, 8, 8, 8):sum { 3, 5 }
  check.close(far(map, full / full:sum(-1, true)), 0, 1e-12)
  -- 16 of 64 entries, and the diagonal: counted by hand.
  local blocks = attention.draft_blocks(map, 0.75):tolist()
  for b, of_sample in ipairs(map:tolist()) do
    for h, rows in ipairs(of_sample) do
      local all = {}
      for _, row in ipairs(rows) do
        for _, value in ipairs(row) do all[#all + 1] = value end
      end
      table.sort(all, function(m, n) return m > n end)
      for i, row in ipairs(rows) do
        local wanted = {}
        for j, value in ipairs(row) do
          if value >= all[16] or i == j then wanted[#wanted + 1] = j - 1 end
        end
        local found = {}
        for _, j in ipairs(blocks[b][h][i]) do
          if j >= 0 then found[#found + 1] = j end
        end
        table.sort(found)
        check.equal(found, wanted)
      end
    end
  end
end)

check.test("draft: wrong arguments", function()
  wrong("sparsity: expected a number in %[0, 1%]", attention.draft, dit, { rows = 8, columns = 8, sparsity = 2 })
  wrong("map: expected %[b, h, cells, cells%]", attention.draft_blocks, heads(5), 0.5)
end)

-- ---- re-ttention ----

local function sampler(part, steps)
  return diffusion.Flow():sampler { steps = steps, solver = diffusion.solver.euler(), parts = { part } }
end
local function draw(part, steps)
  return sampler(part, steps):sample(dit, { 2, 1, 16, 16 }, { condition = condition, seeds = { 1, 2 } })
end

check.test("the statistics of a softmax over some of the keys", function()
  local q, k, v = heads(64), heads(64), heads(64)
  local blocks = cells:nearest(2)
  local g, gk, gv = cells:gather(q), cells:gather(k), cells:gather(v)
  local part, part_lse = ty.block_sparse_attention(g, gk, gv, blocks, 8, 8)
  local weights = (g:matmul(gk:transpose(-2, -1)) * 8 ^ -0.5):exp()
  local seen = ty.zeros(8, 8):scatter(1, blocks:reshape(8, 2), 1):repeat_interleave(8, 0):repeat_interleave(8, 1)
  local y, lse = ty.block_sparse_attention(g, gk, gv, ty.zeros({ 1, 1, 1, 1 }, { dtype = "i64" }), 64, 64)
  local rho, residual = attention.statistics(y, lse, part, part_lse)
  check.close(far(rho, (weights * seen):sum(-1, true) / weights:sum(-1, true)), 0, 1e-12)
  check.close(far(residual, (weights * (1 - seen)):matmul(gv) / weights:sum(-1, true)), 0, 1e-12)
  local one, none = attention.statistics(y, lse, y, lse)
  check.equal({ far(one, ty.ones_like(one)), far(none, ty.zeros_like(none)) }, { 0.0, 0.0 }, "all keys: 1 and nothing")
end)

check.test("re-ttention: with all keys the same pictures; a sparse step after the same inputs is dense", function()
  local plain = draw(nil, 8)
  local part = attention.rettention(dit, { rows = 8, columns = 8, cell = { 2, 4 }, kept = 8, warmup = 2, every = 3,
    growth = 0 })
  check.equal(part.share, 1.0)
  local all, found = draw(part, 8)
  check.close(far(all, plain), 0, 1e-4)
  local steps = {}
  for _, note in ipairs(part:notes(found)) do
    check.close(note.rho, 1, 1e-5)
    if note.layer == 1 then steps[#steps + 1] = note.step end
  end
  check.equal(steps, { 2, 4, 7 }, "dense are 1, 2, 4 and 7, of which those before a sparse one note")
  part:remove()
  -- By hand: calls of the part with the same inputs in a dense step and two sparse ones.
  for growth, same in pairs { [0] = 2, [0.5] = 1 } do
    part = attention.rettention(dit, { rows = 8, columns = 8, cell = { 2, 4 }, warmup = 1, every = 9, growth = growth })
    local made, wanted = { model = dit, state = {}, step = 0 }, run(dit)
    made.state[part] = part:start(made)
    for step = 1, 3 do
      made.step = step
      local y = part:call(made, function() return run(dit) end, { branches = { "condition" } })
      check.equal(far(y, wanted) < 1e-5, step <= 1 + same, ("step %d, growth %g"):format(step, growth))
    end
    part:remove()
  end
  check.equal(draw(nil, 8):tolist(), plain:tolist())
end)

check.test("re-ttention: without statistics it is plain sparse attention; wrong use", function()
  local options = { rows = 8, columns = 8, cell = { 2, 4 }, warmup = 1, every = 99, ratio = false, residual = false }
  local part = attention.rettention(dit, options)
  local made = { model = dit, state = {}, step = 2 }
  made.state[part] = part:start(made)
  wrong("expected a dense step before", part.call, part, made, function() return run(dit) end,
    { branches = { "condition" } })
  made.step = 1
  part:call(made, function() return run(dit) end, { branches = { "condition" } })
  made.step = 2
  local y = part:call(made, function() return run(dit) end, { branches = { "condition" } })
  part:remove()
  local replaced = attention.replace(dit, function(_, q, k, v)
    return masked(q, k, v, cells:nearest(1):expand(2, 4, 8, 1))
  end)
  check.close(far(y, run(dit)), 0, 1e-5)
  replaced:remove()
  wrong("rows", attention.rettention, dit, {})
  part = attention.rettention(dit, options)
  wrong("network to be the one", sampler(part, 2).sample, sampler(part, 2), unet, { 2, 1, 16, 16 },
    { condition = condition })
  wrong("notes: run", part.notes, part, {})
  part:remove()
end)

-- ---- log-linear ----

check.test("Z-order: blocks of 4 are squares, of squares", function()
  check.equal(attention.z_order(4):tolist(), { 0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15 })
  check.equal(attention.z_order(8):argsort():index_select(0, attention.z_order(8)):tolist(), ty.arange(64):tolist())
  wrong("a power of 2", attention.z_order, 6)
end)

check.test("log-linear attention that keeps all blocks is dense, with its gradients", function()
  local q, k, v = heads(64):requires_grad_(), heads(64):requires_grad_(), heads(64):requires_grad_()
  local weight = heads(64)
  local y = attention.loglinear(q, k, v, { block = 4, kept = 16, levels = 1, enrich = false })
  local dense = ty.scaled_dot_product_attention(q, k, v)
  check.close(far(y:detach(), dense:detach()), 0, 1e-12)
  local a, b = ty.grad((y * weight):sum(), { q, k, v }), ty.grad((dense * weight):sum(), { q, k, v })
  for i = 1, 3 do check.close(far(a[i], b[i]), 0, 1e-11) end
end)

-- The same by loops over queries: what is chosen, one softmax over tokens and means.
local function by_hand(q, k, v, block, kept, levels)
  local qs, ks, vs = { [0] = q }, { [0] = k }, { [0] = v }
  for l = 1, levels do
    for _, list in ipairs { qs, ks, vs } do list[l] = list[l - 1]:reshape(-1, block, q.shape[2]):mean(1) end
  end
  local function dot(a, i, b, j) return (a:select(0, i) * b:select(0, j)):sum():item() end
  local function best(l, i, candidates)
    table.sort(candidates, function(m, n) return dot(qs[l], i, ks[l], m) > dot(qs[l], i, ks[l], n) end)
    return table.move(candidates, 1, math.min(kept, #candidates), 1, {})
  end
  local function children(list)
    local all = {}
    for _, parent in ipairs(list) do
      for c = 0, block - 1 do all[#all + 1] = parent * block + c end
    end
    return all
  end
  local rows = {}
  for i = 0, q.shape[1] - 1 do
    local at, terms, list = {}, {}, {}
    for l = 1, levels do at[l] = i // math.tointeger(block ^ l) end
    for j = 0, ks[levels].shape[1] - 1 do
      list[#list + 1] = j
      terms[#terms + 1] = { levels, j }
    end
    for l = levels, 1, -1 do
      list = children(best(l, at[l], list))
      for _, j in ipairs(list) do terms[#terms + 1] = { l - 1, j } end
    end
    local sum, y = 0.0, 0.0
    for _, term in ipairs(terms) do
      local w = block ^ term[1] * math.exp(dot(q, i, ks[term[1]], term[2]) * q.shape[2] ^ -0.5)
      sum, y = sum + w, vs[term[1]]:select(0, term[2]) * w + y
    end
    rows[i + 1] = y / sum
  end
  return ty.stack(rows, 0)
end

check.test("log-linear attention, by loops over queries: two and three levels", function()
  for _, case in ipairs { { 64, 4, 2, 2 }, { 32, 2, 3, 3 }, { 32, 2, 2, 4 } } do
    local n, block, kept, levels = table.unpack(case)
    local function some() return ty.randn(n, 4, { dtype = "f64" }) end
    local q, k, v = some(), some(), some()
    local function four(z) return z:reshape(1, 1, n, 4) end
    local y = attention.loglinear(four(q), four(k), four(v), { block = block, kept = kept, levels = levels })
    check.close(far(y:reshape(n, 4), by_hand(q, k, v, block, kept, levels)), 0, 1e-10)
  end
end)

check.test("log-linear attention: constant keys are averages, gradients by differences, levels", function()
  local v = heads(64)
  local y = attention.loglinear(heads(64) * 0, heads(64), v, { block = 4, kept = 16, levels = 2 })
  check.close(far(y, v:mean(2, true):expand(v.shape)), 0, 1e-12, "all blocks and their means")
  local q, k = heads(16):requires_grad_(), heads(16):requires_grad_()
  v = heads(16):requires_grad_()
  local weight = heads(16)
  local function value() return (attention.loglinear(q, k, v, { block = 4, kept = 1, levels = 2 }) * weight):sum() end
  local gradients = ty.grad(value(), { q, k, v })
  for i, z in ipairs { q, k, v } do
    local step = ty.randn_like(z) * 1e-6
    local before = value():item()
    ty.no_grad(function() z:add_(step) end)
    local change = value():item() - before
    ty.no_grad(function() z:sub_(step) end)
    check.close(change, (gradients[i] * step):sum():item(), 1e-8)
  end
  check.equal({ attention.levels(256, 16, 8), attention.levels(4096, 16, 8), attention.levels(65536, 16, 8),
    attention.levels(60, 16, 8) }, { 1, 2, 3, 0 })
  wrong("that 16%^1 divides", attention.loglinear, heads(60), heads(60), heads(60))
  local plain = run(dit)
  local replaced = attention.llsa(dit, { block = 4, kept = 16, levels = 1, enrich = false })
  check.close(far(run(dit), plain), 0, 1e-5)
  replaced:remove()
  check.equal(run(dit):tolist(), plain:tolist())
end)

check.finish()
