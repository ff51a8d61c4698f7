-- Unlearning: what is chosen to be forgotten, closed form and gradients of each method, what must not change, the way
-- back; and painters of pixels, which these run on.
local here = (arg and arg[0]:match ".*/" or "tests/modules/diffusion/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local diffusion, zoo = require "tycho.diffusion", require "tycho.zoo"

local unlearn = diffusion.unlearn

ty.manual_seed(3)
local painter = zoo.canvas.painter { widths = { 8, 16 }, text = 16 }
ty.no_grad(function() -- layers that begin at zero would hide everything
  for _, p in painter.network:named_parameters() do p:add_(ty.randn_like(p) * 0.1) end
end)

local prompts = {}
for _, style in ipairs { "hatched", "plain", "neon" } do
  for _, kind in ipairs { "fish", "apple" } do
    prompts[#prompts + 1] = ("a %s %s on a pink ground"):format(style, kind)
  end
end
local function task()
  return unlearn.task(painter, { word = "hatched", other = "plain", prompts = prompts, paint = { steps = 2 } })
end

local function weights()
  local list = {}
  for name, p in painter.network:named_parameters() do list[name] = p:detach():clone() end
  return list
end

-- Names of the weights that are not what they were.
local function changed(before)
  local names = {}
  for name, p in painter.network:named_parameters() do
    if not p:detach():eq(before[name]):all():item() then names[name] = true end
  end
  return names
end

check.test("pictures of pixels: folded and unfolded nothing is lost", function()
  local x = ty.randint(0, 256, { 2, 3, 32, 32 }):to "u8"
  local z = painter:encode(x)
  check.equal(z.shape, { 2, 48, 8, 8 })
  check.ok(painter:decode(z):eq(x):all():item())
  check.equal(painter:factor(), 4)
  check.equal(painter:paint({ "a neon fish on a blue ground" }, { steps = 2 }).shape, { 1, 3, 32, 32 })
  check.fails(function()
    local parts = { unet = { config = { in_channels = 4 } } }
    for key, value in pairs(painter.pipeline.components) do parts[key] = parts[key] or value end
    diffusion.TextToImage { class = "StableDiffusionPipeline", components = parts }
  end, "pipeline.components.vae: expected one, got nil")
end)

check.test("a task: prompts with the word, the same with another, and the rest", function()
  local t = task()
  check.equal(t.forget, { "a hatched fish on a pink ground", "a hatched apple on a pink ground" })
  check.equal(t.anchor, { "a plain fish on a pink ground", "a plain apple on a pink ground" })
  check.equal(#t.retain, 4)
  local row = t.positions:tolist()[1]
  for i, is in ipairs(row) do check.equal(is, i == 3, "the word is the third token, behind the mark and 'a'") end
  check.equal(unlearn.task(painter, { word = "hatched", other = "", prompts = prompts }).anchor[1],
    "a fish on a pink ground")
  check.fails(function() unlearn.task(painter, { word = "sepia", other = "plain", prompts = prompts }) end,
    "unlearn.task: prompts: expected some with 'sepia' and some without, got 0 and 6")
end)

check.test("UCE: without edits the weight stays; with them the normal equations hold", function()
  local w0, c = ty.randn({ 5, 7 }, { dtype = "f64" }), ty.randn({ 3, 7 }, { dtype = "f64" })
  local target, kept = ty.randn({ 3, 7 }, { dtype = "f64" }), ty.randn({ 9, 7 }, { dtype = "f64" })
  local o = { erase = 0.7, preserve = 0.3, lambda = 0.2 }
  check.ok((unlearn.solve_uce(w0, nil, nil, kept, o) - w0):abs():max():item() < 1e-12, "no edits")
  local w = unlearn.solve_uce(w0, c, target, kept, o)
  -- The gradient of  a sum |W c - W0 t|^2 + b sum |W p - W0 p|^2 + lambda |W - W0|^2  is zero there.
  local moved = w - w0
  local gradient = (c:matmul(w:transpose(0, 1)) - target:matmul(w0:transpose(0, 1))):transpose(0, 1):matmul(c) * 0.7
    + moved:matmul(kept:transpose(0, 1):matmul(kept)) * 0.3 + moved * 0.2
  check.ok(gradient:abs():max():item() < 1e-10, "normal equations")
  -- An edit that weighs more than all else is carried out.
  local strong = unlearn.solve_uce(w0, c, target, nil, { erase = 1e9, preserve = 0, lambda = 1 })
  check.ok((c:matmul(strong:transpose(0, 1)) - target:matmul(w0:transpose(0, 1))):abs():max():item() < 1e-6)
  local before = weights()
  check.equal(unlearn.uce(painter, task(), { erase = 0 }).changed < 40, true) -- rounding alone
  for name, p in painter.network:named_parameters() do
    check.ok((p - before[name]):abs():max():item() < 1e-6, name)
  end
  unlearn.use(painter, before)
end)

check.test("zero steps change nothing; what changes is what was chosen; and it is taken back", function()
  local allowed = { esd = "attn2", ablation = "attn2%.to_[kv]", forget_me_not = "attn2", uce = "attn2%.to_[kv]",
    salun = "" }
  for name, pattern in pairs(allowed) do
    local before = weights()
    if name ~= "uce" then
      local report = unlearn[name](painter, task(), { steps = 0 })
      check.equal({ next(changed(before)), report.changed, report.bytes }, { nil, 0, 0 }, name)
    end
    local report = unlearn[name](painter, task(), name ~= "uce" and { steps = 2, batch = 2, lr = 1e-3 } or nil)
    check.ok(report.changed > 0 and report.changed <= report.numbers and report.bytes == 4 * report.changed, name)
    for other in pairs(changed(before)) do check.ok(other:find(pattern), name .. " changed " .. other) end
    local state = unlearn.state(painter, report)
    unlearn.undo(painter, report)
    check.equal(next(changed(before)), nil, name .. " taken back")
    unlearn.use(painter, state)
    check.ok(next(changed(before)), name .. " put on again")
    unlearn.use(painter, before)
  end
end)

check.test("SalUn changes no number that the mask does not allow, and as many are allowed as were asked for", function()
  local before = weights()
  local report = unlearn.salun(painter, task(), { steps = 3, batch = 2, lr = 1e-2, share = 0.1, saliency_batches = 2 })
  local open, all = 0, 0
  for name, p in painter.network:named_parameters() do
    local mask = report.masks[name]
    check.equal(((p:detach() - before[name]) * (1 - mask)):abs():max():item(), 0, name)
    open, all = open + mask:sum():item(), all + mask:numel()
  end
  check.ok(math.abs(open / all - 0.1) < 0.002, ("%d of %d"):format(open, all))
  unlearn.use(painter, before)
end)

check.test("forget-me-not: the loss is the length of the attention to the word's tokens", function()
  local t, before = task(), weights()
  -- Without queries all twelve tokens get as much. Four layers of four heads see 4 x 4 places.
  ty.no_grad(function()
    for name, p in painter.network:named_parameters() do
      if name:find "attn2.to_q" then p:zero_() end
    end
  end)
  local even = weights()
  local report = unlearn.forget_me_not(painter, t, { steps = 1, batch = 3, lr = 1e-9 })
  check.close(report.losses[1], (3 * 4 * 4 * 16 / 144) ^ 0.5, 1e-5)
  unlearn.use(painter, even)
  unlearn.use(painter, before)
  local losses = unlearn.forget_me_not(painter, t, { steps = 12, batch = 4, lr = 5e-3 }).losses
  check.ok(losses[12] < 0.9 * losses[1], ("from %g to %g"):format(losses[1], losses[12]))
  for _, module in painter.network:named_modules() do check.equal(rawget(module, "_watched"), nil) end
  unlearn.use(painter, before)
end)

check.test("ESD's target: guidance turned round; ablation's: what is said of the anchor", function()
  -- One step at a tiny rate leaves the network as it is, so that the loss can be computed beside it.
  local t, before = task(), weights()
  local loss = unlearn.ablation(painter, t, { steps = 1, batch = 4, lr = 1e-9, seed = 5 }).losses[1]
  unlearn.use(painter, before)
  check.ok(loss > 0)
  local same = unlearn.task(painter, { word = "hatched", other = "hatched", prompts = prompts, paint = { steps = 2 } })
  check.close(unlearn.ablation(painter, same, { steps = 1, batch = 4, lr = 1e-9, seed = 5 }).losses[1], 0, 1e-12)
  unlearn.use(painter, before)
  -- eta = -1 asks for what is said of the concept: nothing is to learn.
  check.close(unlearn.esd(painter, t, { steps = 1, batch = 2, lr = 1e-9, eta = -1 }).losses[1], 0, 1e-10)
  unlearn.use(painter, before)
  check.ok(unlearn.esd(painter, t, { steps = 1, batch = 2, lr = 1e-9, eta = 1 }).losses[1] > 1e-8)
  unlearn.use(painter, before)
end)

check.test("metrics: forgetting, and retention in the domain and across", function()
  local wanted = { style = ty.tensor { 0, 0, 1, 1, 2, 2 }, kind = ty.tensor { 0, 1, 0, 1, 0, 1 } }
  local seen = { style = ty.tensor { 0, 3, 1, 0, 2, 2 }, kind = ty.tensor { 5, 5, 0, 1, 0, 5 } }
  check.equal(unlearn.retention(wanted, seen, "style", "kind", 0),
    { forgetting = 0.5, in_domain = 0.75, cross_domain = 0.75 })
  check.fails(function() unlearn.retention(wanted, seen, "style", "kind", 7) end,
    "unlearn.retention: wanted.style: expected pictures with 7 and without, got 0 and 6")
end)

check.test("benchmark: the best of tries once, the contender with the best, fronts that fall", function()
  local bench = unlearn.benchmark { painter = {}, judge = {} }
  local asked = 0
  local function tries(...)
    local list = {}
    for i, score in ipairs { ... } do
      list[i] = function()
        asked = asked + 1
        return score
      end
    end
    return list
  end
  check.equal({ bench:best("a of x", tries(0.1, 0.5, 0.5)), bench:best("a of x", tries(1)), asked }, { 2, 2, 3 })
  bench:best("a of y", tries(0.7))
  bench:best("ab of x", tries(0.9))
  bench:best("ab of y", tries(0.2))
  check.equal({ bench:winner { "a", "ab" }, bench:winner { "ab" } }, { "a", "ab" })
  check.fails(function() bench:winner { "b" } end, "UnlearnBenchmark:winner: names: nothing was chosen for 'b'")
  for k, seen in ipairs { { 0, 1 }, { 0.5, 0.9 }, { 1, 0.8 } } do
    bench:add("falls", k, { forgetting = seen[1], retention = seen[2] })
    bench:add("stays", k, { forgetting = seen[1], retention = 1 })
  end
  check.equal(bench:falling { "falls", "stays" }, 1)
end)

check.test("mistakes", function()
  check.fails(function() unlearn.esd(painter, task(), { part = "heads" }) end,
    'unlearn.esd: part: expected "all", "cross", "cross_keys" or "no_cross", got "heads"')
  check.fails(function() unlearn.salun(painter, task(), { share = 0 }) end, "unlearn.salun: share: expected a number")
  check.fails(function() unlearn.use(painter, { nothing = ty.ones(1) }) end,
    "unlearn.use: state: expected weights of the network, got 'nothing'")
end)

check.finish()
