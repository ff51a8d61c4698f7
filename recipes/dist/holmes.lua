-- Stages of a model on machines whose networks do not speak to each other
-- claim: placed by their networks, ranks train more than 1.4 times as fast as placed by chance
-- system: dist.placement, simulated: GPTs of 3.6 to 39.1 billion parameters on machines with InfiniBand, RoCE, Ethernet
-- paper: Yang et al. 2023, "Holmes: Towards Distributed Training Across Clusters with Heterogeneous NIC Environment"
-- time: 1 second on one CPU core
--
-- The margin is that over Megatron-LM, which does not look at networks, in the paper's figure 6: bars of 74 and 53
-- pixels. Models, batches and plans are the paper's; machines have 8 A100s and four links of 200 Gb/s of InfiniBand or
-- two of RoCE, as its configuration has them, and 25 Gb/s of Ethernet. Nothing is trained and nothing fitted: formulas,
-- and a schedule that is played through; what machines of one network take is held against what the paper measured.
-- By chance, groups of ranks that share layers are moved as they are, within a machine. A harder rival moves whole
-- machines, whose ranks often happen to have one network then. Both choose networks by group and hide exchanges behind
-- computing as ours does, so that placement alone differs, and the layers that go with it. Machines in the order of a
-- list, with one network for the job and nothing hidden, stand for Megatron-LM.
local ty = require "tycho"
local dist = require "tycho.dist"

local r = ty.recipe.declare { args = {
  { "placements", 40, "by chance, of each cluster", quick = 3 },
  { "infiniband", 200.0, "Gb/s of a link, four a machine" }, { "roce", 200.0, "Gb/s of a link, two a machine" },
  { "ethernet", 25.0, "Gb/s of a machine" },
} }
local args = r.args
local placement, costs, stats = dist.placement, dist.costs, ty.stats

local function machines_of(nodes)
  return placement.machines { nodes = nodes, networks = {
    infiniband = { latency = 5e-6, bandwidth = 4 * args.infiniband / 8 * 1e9 },
    roce = { latency = 1e-5, bandwidth = 2 * args.roce / 8 * 1e9 },
    ethernet = { latency = 5e-5, bandwidth = args.ethernet / 8 * 1e9 } },
    cluster = dist.published.clusters.selene }
end

-- So many machines of each network, dealt out in turn.
local function deal(counts)
  local nodes, left = {}, {}
  for name, count in pairs(counts) do left[#left + 1] = { name = name, count = count } end
  table.sort(left, function(a, b) return a.name < b.name end)
  local any = true
  while any do
    any = false
    for _, kind in ipairs(left) do
      if kind.count > 0 then
        nodes[#nodes + 1], kind.count, any = kind.name, kind.count - 1, true
      end
    end
  end
  return nodes
end

-- The paper's groups of parameters.
local sizes = { ["3.6"] = { 30, 3072, 32 }, ["7.5"] = { 36, 4096, 32 }, ["39.1"] = { 48, 8192, 64 } }
local function case(size, counts, tensor, pipeline, sequences)
  local s = sizes[size]
  local nodes = deal(counts)
  return { name = ("%sB on %d machines"):format(size, #nodes), machines = machines_of(nodes), counts = counts,
    model = costs.transformer { layers = s[1], hidden = s[2], heads = s[3], vocabulary = 51200 },
    plan = { tensor = tensor, pipeline = pipeline, data = 8 * #nodes // (tensor * pipeline), micro = 4,
      sequences = sequences, zero = 1, gradient_bytes = 4 } }
end

-- Homogeneous machines, as the paper measured them.
local paper = { { 4, infiniband = 197, roce = 160, ethernet = 122 },
  { 8, infiniband = 148, roce = 145, ethernet = 83 } }
r:say("3.6B on machines of one network, Tflop/s of a GPU: simulated and published")
local ours, theirs = {}, {}
for _, row in ipairs(paper) do
  for _, name in ipairs { "infiniband", "roce", "ethernet" } do
    local c = case("3.6", { [name] = row[1] }, 1, 2, 768)
    local got = placement.step(c.model, c.machines, c.plan, placement.in_order(c.machines, c.plan))
    ours[#ours + 1], theirs[#theirs + 1] = got.flops / 1e12, row[name]
    r:say("%d machines, %-10s %6.1f %6d", row[1], name, got.flops / 1e12, row[name])
  end
end
local order = stats.rank_correlation(ours, theirs)

r:say("\ntimes as fast as%smachines  ranks  listed, one network  layers of stages", (" "):rep(41))
local gains, group_gains, listed_gains, partition_gains, of_best = {}, {}, {}, {}, {}
local pictures
for _, c in ipairs {
  case("3.6", { infiniband = 2, roce = 2 }, 1, 2, 768), case("3.6", { infiniband = 4, roce = 4 }, 1, 2, 1536),
  case("7.5", { infiniband = 4, roce = 4 }, 1, 2, 1536), case("7.5", { infiniband = 6, roce = 6 }, 1, 2, 2688),
  case("39.1", { infiniband = 4, roce = 4 }, 8, 2, 1536),
  case("7.5", { infiniband = 2, roce = 2, ethernet = 2 }, 1, 3, 1536),
  case("7.5", { infiniband = 6, roce = 2 }, 1, 4, 1536),
} do
  local function step(where, options) return placement.step(c.model, c.machines, c.plan, where, options) end
  local where = placement.by_network(c.machines, c.plan)
  local layers = placement.partition(c.model, c.machines, c.plan, where, { overlap = true })
  local even, got = step(where, { overlap = true }), step(where, { layers = layers, overlap = true })
  local by_chance, by_groups, fastest = {}, {}, math.huge
  for i = 1, args.placements do
    local random = step(placement.random(c.machines, c.plan, r.seed + i), { overlap = true })
    by_chance[i], fastest = random.seconds, math.min(fastest, random.seconds)
    by_groups[i] = step(placement.random(c.machines, c.plan, r.seed + i, "group"), { overlap = true }).seconds
  end
  local listed = step(placement.in_order(c.machines, c.plan), { choice = "job" })
  local gain = stats.mean(by_chance) / got.seconds
  local n = #gains + 1
  gains[n], group_gains[n] = gain, stats.mean(by_groups) / got.seconds
  listed_gains[n], partition_gains[n] = listed.seconds / got.seconds, even.seconds / got.seconds
  of_best[n] = got.seconds / fastest
  local words = {}
  for name, count in pairs(c.counts) do words[#words + 1] = ("%d %s"):format(count, name) end
  table.sort(words)
  c.words = table.concat(words, ", ")
  r:say("%-20s %-36s %7.2f %6.2f %13.2f %20s", c.name, c.words, gain, group_gains[#gains], listed_gains[#gains],
    table.concat(layers, " "))
  r:note(c.name .. ", " .. c.words, { gain = gain, groups = group_gains[#gains], listed = listed_gains[#gains],
    partition = partition_gains[#gains], flops = got.flops })
  if not pictures then
    pictures = { { title = ("by networks: %.1f s"):format(got.seconds), rows = got.rows },
      { title = ("listed, one network for the job: %.1f s"):format(listed.seconds), rows = listed.rows } }
  end
end
dist.timeline(pictures, { width = 1100, labels = { "stage 1", "stage 2" } }):save(r:picture "holmes.png")

local margin = 74 / 53
os.exit(r:finish {
  { claim = "times as fast as ranks placed by chance, mean of the clusters", measured = stats.mean(group_gains),
    bar = 1.4 },
  { claim = "times as fast as whole machines placed by chance, mean of the clusters", measured = stats.mean(gains),
    bar = 1.4 },
  { claim = "the same, the worst cluster", measured = math.min(table.unpack(gains)), bar = 1.05 },
  { claim = "seconds, of the best of all placements by chance, the worst cluster",
    measured = math.max(table.unpack(of_best)), bar = 1.0001, below = true },
  { claim = "margin over listed machines with one network, of the published one, figure 6's cluster",
    measured = listed_gains[3] / margin, bar = 0.95 },
  { claim = "times as fast by layers that suit the networks, mean", measured = stats.mean(partition_gains), bar = 1 },
  { claim = "machines of one network: rank correlation with what was published", measured = order, bar = 0.9 },
  { claim = "the same, speed simulated of that published, mean", measured = stats.mean(stats.ratios(ours, theirs)),
    judged = false },
}, true)
