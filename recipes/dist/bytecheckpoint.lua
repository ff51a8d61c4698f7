-- Saving checkpoints while training goes on, and loading them by other ranks
-- claim: training stands still for 2 % of the time that saving takes, and a kill at any moment loses nothing
-- system: universal.saver (copies, background writers, each thing written once) and universal.load (read once)
-- paper: Wan et al. 2024, "ByteCheckpoint: A Unified Checkpointing System for Large Foundation Model Development"
-- time: 1 minute on one CPU core
--
-- A Llama trains on 2 x 2 ranks, of which those with the same parameters all keep the optimizer's state: much is there
-- twice or four times. Each rank may write so many bytes a second, which is what four have of a disk that takes
-- 200 MB/s; files are synced. At twice the rate the share that training stands still is twice as large, because it is
-- the time of a copy in memory. Stalls are of the ranks' clocks, which count as if each had a core of its own, and of
-- all saves but the first, in which it is decided who writes what. The time that saving takes is that of the bytes at
-- the rate, which is less than what passed. What is read is counted by the ranks, and by the system, which counts the
-- lists as well. Jobs are killed from outside (kill -9), at moments that are drawn; then all of the checkpoint is read.
local ty = require "tycho"
local dist = require "tycho.dist"
local trial = dist.universal_trial

local r = ty.recipe.declare {
  args = {
    { "length", 32, "tokens of a row", quick = 8 }, { "width", 256, "hidden size of the Llama", quick = 32 },
    { "layers", 4, "layers of it", quick = 1 }, { "saves", 6, "checkpoints", quick = 2 },
    { "steps", 6, "training steps for each", quick = 1 },
    { "rate", 50000000, "bytes a second that a rank may write", quick = 5000000 },
    { "kills", 20, "jobs that are killed", quick = 1 },
    { "longest", 1.0, "seconds after which a job is killed at the latest", quick = 0.1 },
  },
}
local args = r.args
local work = dist.workload.open { length = args.length, width = args.width, heads = 8, layers = args.layers, rows = 8,
  chapters = r.quick and 12 or nil, vocabulary = r.quick and 260 or nil }
local folder = r:path "checkpoints"
ty.io.mkdir(folder)

-- Trains on a rank and saves: how = "background", "at once" or nil. What the rank did when, and what was written.
local function train(group, how, path)
  local t, d = require "tycho", require "tycho.dist"
  local now = t.core.system.clock
  local trainer = d.universal_trial.new(group, work, { tensor = 2, data = 2, replicas = true })
  local saver <close> = d.universal.saver(group, { rate = args.rate, chunk = 1 << 18 })
  local out, stalls, writes = { trained = {}, losses = {} }, {}, {}
  for step = 1, args.saves * args.steps do
    local from = now()
    out.losses[step] = t.scope(function() return trainer:step() end)
    table.insert(out.trained, { name = "compute", from = from, to = now() })
    if how and step % args.steps == 0 then
      from = now()
      if how == "background" then
        trainer:save(path, saver)
      else
        local pieces, values = trainer:pieces()
        d.universal.save(group, path, pieces, values, { rate = args.rate })
      end
      stalls[#stalls + 1], writes[#writes + 1] = now() - from, { name = "write", from = from, to = now() }
      table.insert(out.trained, { name = "save", from = from, to = now() })
    end
  end
  saver:wait()
  for i, seconds in ipairs(saver.stats.seconds) do writes[i].to = writes[i].from + seconds end
  if how == "background" then stalls = saver.stats.stalls end
  out.stalls, out.writes, out.loads, out.stats = stalls, writes, saver.loads, saver.stats
  return out
end
local first = folder .. "/first"
local unsaved = dist.run(4, train)
local background = dist.run(4, train, nil, "background", first)
local at_once = dist.run(4, train, nil, "at once", folder .. "/at-once")

local copy, had, most, shares, blocked, begun, off = 0, 0, 0, {}, {}, {}, 0
for rank, of in ipairs(background) do
  local bytes = of.stats.bytes
  copy, had, most = copy + bytes, had + of.stats.had, math.max(most, bytes)
  for i, stall in ipairs(of.stalls) do
    local share = stall * args.rate / bytes
    if i > 1 then shares[#shares + 1] = share else begun[rank] = share end
    blocked[#blocked + 1] = at_once[rank].stalls[i] / stall
  end
  for step, loss in ipairs(of.losses) do if loss ~= unsaved[rank].losses[step] then off = off + 1 end end
  r:say("rank %d writes %.1f of its %.1f MB in %.2f s; stands still for %.2f ms (at first %.2f), at once %.2f s",
    rank - 1, bytes / 1e6, of.stats.had / 1e6, ty.stats.median(of.stats.seconds), 1e3 * ty.stats.median(of.stalls),
    1e3 * of.stalls[1], ty.stats.median(at_once[rank].stalls))
end
local panels = {}
for i, of in ipairs { background, at_once } do
  panels[i] = { title = i == 1 and "Saved in the background" or "Saved at once", rows = {} }
  for rank = 1, 2 do
    table.insert(panels[i].rows, of[rank].trained)
    table.insert(panels[i].rows, of[rank].writes)
  end
end
dist.timeline(panels, { width = 1100, colors = { save = { 0.85, 0.2, 0.15 }, write = { 0.75, 0.7, 0.6 } },
  labels = { "rank 0 trains", "writes", "rank 1 trains", "writes" } }):save(r:picture "bytecheckpoint.png")

-- Loads on a rank, saves again, and says what was read and the losses of the next two steps.
local function resume(group, layout, from, directly, to)
  local d = require "tycho.dist"
  local trainer = d.universal_trial.new(group, work, { tensor = layout[1], data = layout[2], replicas = layout[3] })
  group:barrier()
  local before = d.universal_trial.asked()
  local source = trainer:load(from, directly)
  group:barrier()
  local out = { bytes = source.bytes, wanted = source.wanted, passed = source.passed,
    asked = before and d.universal_trial.asked() - before }
  if to then
    trainer:save(to)
    d.universal.consolidate(group, to)
  end
  out.losses = { trainer:step(), trainer:step() }
  return out
end
local layouts = r.quick and { { 1, 2, true } }
  or { { 2, 2, true }, { 2, 2 }, { 1, 4, true }, { 4, 1 }, { 1, 2 }, { 1, 1 } }
r:say("\n%.1f MB are one copy; read by layers x data\n%s", copy / 1e6,
  "              read   by the system     wanted     passed on  files that differ")
local read, system, files, apart = 0, 0, 0, 0
for i, layout in ipairs(layouts) do
  local ranks, again = layout[1] * layout[2], ("%s/again%d"):format(folder, i)
  local directly = dist.run(ranks, resume, nil, layout, first, true, again)
  local by_atoms = dist.run(ranks, resume, nil, layout, first, false)
  local bytes, wanted, passed = 0, 0, 0
  for rank, of in ipairs(directly) do
    bytes, wanted, passed = bytes + of.bytes, wanted + of.wanted, passed + of.passed
    for k, loss in ipairs(of.losses) do if loss ~= by_atoms[rank].losses[k] then apart = apart + 1 end end
  end
  local differ = trial.differing(first, again)
  read, files = math.max(read, bytes / copy), files + differ
  system = math.max(system, (directly[1].asked or bytes) / copy)
  r:say("%6d x %d %8.4f %15.4f %10.2f %13.2f %18d", layout[1], layout[2], bytes / copy,
    (directly[1].asked or bytes) / copy, wanted / copy, passed / copy, differ)
end

local killed = dist.universal_kills.run { folder = folder .. "/kills", kills = args.kills, longest = args.longest,
  width = r.quick and 32 or 64, layers = r.quick and 1 or 2, seed = r.seed, more = r.quick and 1 or 10 }
r:say("\n%d jobs killed, %d while a checkpoint was written; %d steps, %d of them more than once", killed.kills,
  killed.during, killed.steps, killed.again)
r.metrics.kills = killed

os.exit(r:finish {
  { claim = "training stands still, of the time that saving takes", measured = ty.stats.median(shares), bar = 0.02,
    below = true },
  { claim = "the same, of the rank and the save where it is most", measured = math.max(table.unpack(shares)),
    judged = false },
  { claim = "in the first save, in which ranks decide who writes what", measured = math.max(table.unpack(begun)),
    judged = false },
  { claim = "times as long as it stands still when all is saved at once", measured = ty.stats.median(blocked),
    bar = 50 },
  { claim = "losses that saving has changed", measured = off, bar = 0, below = true },
  { claim = "bytes that ranks have, of those that they write", measured = had / copy, judged = false },
  { claim = "bytes of the rank that writes most, of the mean", measured = most * 4 / copy, bar = 1.1, below = true },
  { claim = "bytes that all ranks read, of one copy: the layout that reads most", measured = read, bar = 1,
    below = true },
  { claim = "the same as the system counts them, with the lists", measured = system, bar = 1.05, below = true },
  { claim = "files of parameters and moments that differ once loaded and saved by another layout", measured = files,
    bar = 0, below = true },
  { claim = "next losses that differ from those after all was put together", measured = apart, bar = 0, below = true },
  { claim = "checkpoints that counted and were not there after a kill", measured = killed.lost, bar = 0, below = true },
  { claim = "losses that differ from those of jobs that were not killed", measured = killed.differ, bar = 0,
    below = true },
  { claim = "kills while a checkpoint was being written, of all", measured = killed.during / killed.kills, bar = 0.25 },
}, true)
