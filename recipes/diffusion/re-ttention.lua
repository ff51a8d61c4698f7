-- Three percent of the keys, with what dense steps say of the softmax
-- claim: with 3 % of the tokens in sparse steps pictures stay those of dense attention, where plain sparse attention
--   with the same tokens and the same dense steps loses them
-- system: Re-ttention on a text-to-image transformer of the zoo
-- paper: Chen et al. 2025, "Re-ttention: Ultra Sparse Visual Generation via Attention Statistical Reshape"
-- time: 4 minutes on one CPU core
--
-- Beside it stand plain sparse attention, the share of the softmax alone and the residual alone. All keep the authors'
-- dense steps (8 of 20). A query sees its own cell, 2 of 64 patches, and the text, as it does in networks where the
-- text has an attention of its own. At 64 patches nothing is saved: what a sparse layer saves is timed at long
-- sequences, with the same share of keys, ordering and joining included.
local ty = require "tycho"
local diffusion, zoo = require "tycho.diffusion", require "tycho.zoo"

local r = ty.recipe.declare { seeds = 3,
  args = {
    { "model", "scene-dit", "a transformer of the zoo, or a folder of diffusers with a path" },
    { "steps", 20, "of the sampler", quick = 7 },
    { "count", 24, "prompts for each seed", quick = 2 },
    { "scale", 4.0, "of guidance" },
    { "growth", 0.04, "of the share of the softmax, a sparse step" },
    { "tokens", 16384, "of the sequence that is timed", quick = 1024 },
  } }
local args = r.args

local yardstick = zoo.yardstick { model = args.model, device = r.device, real = r.quick and 8 or 256 }
local network = yardstick.painter.network
local process, solver = yardstick.painter.process, diffusion.solver.euler()
local side = yardstick.size // 4 // network.config.patch_size

local function sampler(options)
  if not options then return process:sampler { steps = args.steps, guidance = args.scale, solver = solver } end
  local o = { rows = side, columns = side, cell = { 1, 2 }, kept = 1, growth = args.growth }
  for key, value in pairs(options) do o[key] = value end
  local model = network:clone()
  local part = diffusion.attention.rettention(model, o)
  return { sampler = process:sampler { steps = args.steps, guidance = args.scale, solver = solver, parts = { part } },
    model = model, part = part }
end

-- ---- quality ----

local reuse = sampler {}
local list = yardstick:compare(sampler(), { ["Re-ttention"] = reuse,
  plain = sampler { ratio = false, residual = false }, ["share only"] = sampler { residual = false },
  ["residual only"] = sampler { ratio = false } },
  { count = args.count, seeds = r.seeds, fewer = false })
for i, comparison in ipairs(list) do r:say("seed %d\n%s", r.seeds[i], tostring(comparison)) end

local _, run = yardstick:draw(reuse.sampler, yardstick:prompts("training", 0, 2, 7), { network = reuse.model })
local by_step = {}
for _, note in ipairs(reuse.part:notes(run)) do
  by_step[note.step] = (by_step[note.step] or "") .. (" %.3f"):format(note.rho)
end
for step = 1, args.steps do
  if by_step[step] then r:say("share of the softmax that is kept, by layer, step %d:%s", step, by_step[step]) end
end

local few, sheet = math.min(6, args.count), {}
for _, name in ipairs { "full", "Re-ttention", "plain" } do
  sheet[#sheet + 1] = list[1]:row(name).samples:narrow(0, 0, few)
end
ty.plot.grid(ty.concat(sheet, 0):to "f32" / 127.5 - 1, { columns = few, scale = 2 }):save(r:picture "rettention.png")

-- ---- seconds of a layer ----

local speedups = {}
for i, seed in ipairs(r.seeds) do
  ty.manual_seed(seed)
  local n = math.floor(args.tokens ^ 0.5 + 0.5)
  local cells = diffusion.attention.cells { rows = n, columns = n, cell = { 8, 8 } }
  local there = { device = r.device }
  local blocks = cells:nearest(math.max(1, cells.count // 32)):to(there)
  local q, k, v = ty.randn({ 3, 1, n * n, 64 }, there):chunk(3, 0)
  local rho, residual = ty.rand({ 1, 1, n * n, 1 }, there), ty.randn({ 1, 1, n * n, 64 }, there)
  local took = r:time({
    dense = function() return ty.scaled_dot_product_attention(q, k, v) end,
    sparse = function()
      local y = ty.block_sparse_attention(cells:gather(q), cells:gather(k), cells:gather(v), blocks, 64, 64)
      return cells:restore(y * rho + residual)
    end }, { rounds = 3 })
  speedups[i] = took.dense / took.sparse
  r:say("%d tokens: dense %.4f s, %.1f %% of the keys %.4f s", n * n, took.dense, 100 / 32, took.sparse)
end

-- ---- the table ----

local function each(fn)
  local values = {}
  for i, comparison in ipairs(list) do values[i] = fn(comparison) end
  return values
end
local function more(name)
  return each(function(c) return c:row "Re-ttention".psnr - c:row(name).psnr end)
end
local function judged(name, field)
  return each(function(c) return c:row(name).judged[field] / c:row "full".judged[field] end)
end
os.exit(r:finish {
  { claim = "share of the patches that a query sees", measured = reuse.part.share, bar = 0.032, below = true },
  { claim = "PSNR to the pictures of dense attention, in dB",
    values = each(function(c) return c:row "Re-ttention".psnr end), bar = 25,
    baseline = each(function(c) return c:row "plain".psnr end) },
  { claim = "PSNR, less that of plain sparse attention, in dB", values = more "plain", bar = 3 },
  { claim = "PSNR, less that with the share alone, in dB", values = more "share only", bar = 0 },
  { claim = "PSNR, less that with the residual alone, in dB", values = more "residual only", bar = 0 },
  { claim = "captions found, of those of dense attention", values = judged("Re-ttention", "captions"), bar = 0.95,
    baseline = judged("plain", "captions") },
  { claim = "distance to real pictures, of that of dense attention", values = judged("Re-ttention", "frechet"),
    bar = 1.1, below = true, baseline = judged("plain", "frechet") },
  { claim = "seconds of dense attention, of those with 3 % of the keys, long sequence", values = speedups, bar = 8 },
}, true)
