--- What training a transformer on many devices costs, by formulas: parameters, activations, operations, bytes and
-- seconds of collectives over the links of a cluster. Nothing runs here. dist.plans puts whole steps together from it.
--
--     local model = dist.costs.transformer { layers = 96, hidden = 12288, heads = 96, vocabulary = 50304 }
--     local cluster = dist.costs.cluster { flops = 312e12, memory = 80e9, bandwidth = 2e12,
--       tiers = { { size = 8, latency = 5e-6, bandwidth = 230e9 }, { latency = 1e-5, bandwidth = 25e9 } } }
--     print(model:parameters(), model:flops(1536), cluster:seconds("all_reduce", { 0, 1, 2, 3 }, 1 << 26))
--
-- Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM";
-- Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models". Collectives are rings, as
-- the clocks of dist.run have them.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local core = ty.core.comm_core
local expect, fail = arguments.expect, arguments.fail
local M = {}

local KINDS = '"all_reduce" or "reduce_scatter" or "all_gather" or "broadcast" or "all_to_all" or "barrier"'

--- Seconds of a collective over a ring of ranks whose slowest link is given: what the clocks of dist.run say.
---@param kind string    all_reduce, reduce_scatter, all_gather, broadcast, all_to_all or barrier
---@param ranks integer
---@param bytes number   all that a rank has or, of an all-gather, gets
---@param link { latency: number, bandwidth: number }  seconds, bytes a second
---@return number seconds
function M.seconds(kind, ranks, bytes, link)
  local who = "dist.costs.seconds"
  expect(who, "kind", kind, KINDS)
  expect(who, "ranks", ranks, "an integer in [1, 1048576]")
  expect(who, "bytes", bytes, "a finite number in [0, 1e18]")
  expect(who, "link", link, "a table")
  expect(who, "link.latency", link.latency, "a finite number >= 0")
  expect(who, "link.bandwidth", link.bandwidth, "a number > 0")
  return core.seconds(kind, ranks, math.floor(bytes), link.latency, link.bandwidth)
end

--- Seconds until a message has arrived.
---@param bytes number
---@param link { latency: number, bandwidth: number }
---@return number seconds
function M.message(bytes, link)
  local who = "dist.costs.message"
  expect(who, "bytes", bytes, "a finite number >= 0")
  expect(who, "link", link, "a table")
  expect(who, "link.latency", link.latency, "a finite number >= 0")
  expect(who, "link.bandwidth", link.bandwidth, "a number > 0")
  return link.latency + bytes / link.bandwidth
end

-- ---- clusters ----

---@class CostTier
---@field size? integer     neighbours in rank that this tier joins; the last tier joins all
---@field latency number    seconds
---@field bandwidth number  bytes a second that a device sends; where the tier is shared, those that a unit of the tier
-- below sends, of which rings that leave the unit at the same time have equal parts
---@field shared? boolean

--- Devices of one kind and the links between them.
---@class CostCluster
---@field flops number      operations a second of a device at best
---@field memory number     bytes of a device
---@field bandwidth number  bytes a second of its memory
---@field efficiency number of these operations, what a large matrix product reaches
---@field launch number     seconds that each kernel takes besides
---@field units integer     processors of a device, over which tiles of a product are dealt out
---@field tile integer      rows and columns of a tile
---@field tiers CostTier[]
local Cluster = {}
Cluster.__index = Cluster
Cluster.__name = "CostCluster"

--- A cluster. Devices with neighbouring ranks are near each other: the first tier joins the first `size` of them, the
-- next tier so many of these. options: flops, memory, bandwidth, tiers; efficiency (0.8), launch (0), units (1), tile
-- (1: products of any size are as efficient).
---@param options table
---@return CostCluster
function M.cluster(options)
  local who, none = "dist.costs.cluster", arguments.none
  local o = arguments.read(who, options, { flops = none, memory = none, bandwidth = none, tiers = none,
    efficiency = 0.8, launch = 0.0, units = 1, tile = 1 },
    { flops = "a finite number > 0", memory = "a number > 0", bandwidth = "a number > 0", tiers = "a list of tables",
      efficiency = "a number in (0, 1]", launch = "a finite number >= 0", units = "an integer >= 1",
      tile = "an integer >= 1" })
  for _, name in ipairs { "flops", "memory", "bandwidth", "tiers" } do
    if o[name] == nil then fail("%s: %s: expected a value, got nil", who, name) end
  end
  if #o.tiers == 0 then fail("%s: tiers: expected at least one, got none", who) end
  local below = 1
  for i, tier in ipairs(o.tiers) do
    local name = ("tiers[%d]."):format(i)
    expect(who, name .. "latency", tier.latency, "a finite number >= 0")
    expect(who, name .. "bandwidth", tier.bandwidth, "a number > 0")
    expect(who, name .. "shared", tier.shared, "a boolean or nil")
    if i < #o.tiers then
      expect(who, name .. "size", tier.size, "an integer >= 2")
      if tier.size % below ~= 0 or tier.size == below then
        fail("%s: %ssize: expected a multiple of %d, the tier below, got %d", who, name, below, tier.size)
      end
      below = tier.size
    end
  end
  return setmetatable(o, Cluster)
end

-- Which tier joins two devices.
local function tier_of(self, a, b)
  for i, tier in ipairs(self.tiers) do
    if i == #self.tiers or a // tier.size == b // tier.size then return i end
  end
end

local function check_members(self, who, members)
  if getmetatable(self) ~= Cluster then fail("%s: expected a cluster, got %s", who, arguments.describe(self)) end
  expect(who, "members", members, "a list of integers >= 0")
  if #members == 0 then fail("%s: members: expected at least one, got none", who) end
end

--- The slowest link of a ring of devices, at a time when all devices are in rings of this shape.
---@param members integer[]  ranks, from 0
---@return { latency: number, bandwidth: number }
function Cluster:link(members)
  check_members(self, "CostCluster:link", members)
  local worst = 1
  for i, a in ipairs(members) do worst = math.max(worst, tier_of(self, a, members[i % #members + 1])) end
  local tier, unit = self.tiers[worst], worst > 1 and self.tiers[worst - 1].size or 1
  if not tier.shared then return { latency = tier.latency, bandwidth = tier.bandwidth } end
  local inside = 0
  for _, a in ipairs(members) do if a // unit == members[1] // unit then inside = inside + 1 end end
  return { latency = tier.latency, bandwidth = tier.bandwidth * inside / unit }
end

--- Seconds of a collective over devices.
---@param kind string
---@param members integer[]  ranks, from 0
---@param bytes number
---@return number
function Cluster:seconds(kind, members, bytes)
  check_members(self, "CostCluster:seconds", members)
  return M.seconds(kind, #members, bytes, self:link(members))
end

--- Seconds of `count` matrix products [m, k] by [k, n]: of tiles that are dealt out to the device's processors in
-- rounds, or of the bytes that it reads and writes, in elements of two bytes.
---@param m integer
---@param n integer
---@param k integer
---@param count? integer
---@return number
function Cluster:product(m, n, k, count)
  local who = "CostCluster:product"
  if getmetatable(self) ~= Cluster then fail("%s: expected a cluster, got %s", who, arguments.describe(self)) end
  expect(who, "m", m, "a finite number > 0")
  expect(who, "n", n, "a finite number > 0")
  expect(who, "k", k, "a finite number > 0")
  expect(who, "count", count, "a finite number > 0 or nil")
  count = count or 1
  local tile = self.tile
  local tiles = math.ceil(m / tile) * math.ceil(n / tile) * count
  local rounds = math.ceil(tiles / self.units)
  local computing = 2.0 * k * tile * tile * rounds * self.units / (self.flops * self.efficiency)
  return math.max(computing, 2.0 * count * (m * k + k * n + m * n) / self.bandwidth) + self.launch
end

-- ---- transformers ----

--- A decoder's sizes, and what follows from them.
---@class CostTransformer
---@field layers integer
---@field hidden integer
---@field heads integer
---@field key_value_heads integer
---@field inner integer       width of the feed-forward network
---@field gated boolean       whether that has three matrices
---@field vocabulary integer
---@field length integer      tokens of a sequence
---@field tied boolean        whether the head is the embedding
local Transformer = {}
Transformer.__index = Transformer
Transformer.__name = "CostTransformer"

--- A decoder of a GPT's or a Llama's shape. options: layers, hidden, heads; key_value_heads (heads), inner (4 times
-- hidden), gated (false), vocabulary (50304), length (2048), tied (true).
---@param options table
---@return CostTransformer
function M.transformer(options)
  local who, none, count = "dist.costs.transformer", arguments.none, "an integer in [1, 1073741824]"
  local o = arguments.read(who, options, { layers = none, hidden = none, heads = none, key_value_heads = none,
    inner = none, gated = false, vocabulary = 50304, length = 2048, tied = true },
    { layers = count, hidden = count, heads = count, key_value_heads = count, inner = count, gated = "a boolean",
      vocabulary = count, length = count, tied = "a boolean" })
  for _, name in ipairs { "layers", "hidden", "heads" } do
    if o[name] == nil then fail("%s: %s: expected an integer, got nil", who, name) end
  end
  o.key_value_heads, o.inner = o.key_value_heads or o.heads, o.inner or 4 * o.hidden
  if o.hidden % o.heads ~= 0 or o.heads % o.key_value_heads ~= 0 then
    fail("%s: heads: expected a divisor of %d and a multiple of %d key-value heads, got %d", who, o.hidden,
      o.key_value_heads, o.heads)
  end
  return setmetatable(o, Transformer)
end

--- Raises unless a value is a cluster.
---@param who string
---@param cluster any
function M.expect_cluster(who, cluster)
  expect("dist.costs.expect_cluster", "who", who, "a string")
  if getmetatable(cluster) ~= Cluster then
    fail("%s: cluster: expected one of dist.costs.cluster, got %s", who, arguments.describe(cluster))
  end
end

--- Raises unless a value is a transformer.
---@param who string
---@param model any
function M.expect(who, model)
  expect("dist.costs.expect", "who", who, "a string")
  if getmetatable(model) ~= Transformer then
    fail("%s: model: expected one of dist.costs.transformer, got %s", who, arguments.describe(model))
  end
end

-- Elements of a layer's matrices.
local function matrices(self)
  local h = self.hidden
  local keys = h // self.heads * self.key_value_heads
  return 2 * h * h + 2 * h * keys + (self.gated and 3 or 2) * h * self.inner
end

--- Parameters of a layer: matrices, their biases where the network is not gated, two norms.
---@return integer
function Transformer:layer_parameters()
  M.expect("CostTransformer:layer_parameters", self)
  local h = self.hidden
  if self.gated then return matrices(self) + 2 * h end
  local keys = h // self.heads * self.key_value_heads
  return matrices(self) + (h + 2 * keys) + h + self.inner + h + 4 * h
end

--- Parameters of the embedding, and of a head of its own.
---@return integer
function Transformer:embedding_parameters()
  M.expect("CostTransformer:embedding_parameters", self)
  return self.vocabulary * self.hidden * (self.tied and 1 or 2)
end

--- Parameters of all layers and embeddings.
---@return integer
function Transformer:parameters()
  M.expect("CostTransformer:parameters", self)
  return self.layers * self:layer_parameters() + self:embedding_parameters()
end

--- Operations of matrix products in a training step, forwards and backwards, as Narayanan et al. count them: scores of
-- attention are whole, without the half that a causal mask saves.
---@param sequences integer
---@param recompute? boolean  layers run forwards twice (false)
---@return number
function Transformer:flops(sequences, recompute)
  local who = "CostTransformer:flops"
  M.expect(who, self)
  expect(who, "sequences", sequences, "a finite number >= 0")
  expect(who, "recompute", recompute, "a boolean or nil")
  local tokens = sequences * self.length
  local layer = 2.0 * matrices(self) + 4.0 * self.length * self.hidden
  return tokens * ((recompute and 4 or 3) * self.layers * layer + 6.0 * self.hidden * self.vocabulary)
end

--- Bytes of a layer's activations that wait for its backward pass, of elements of two bytes: Korthikanti et al.,
-- equations 1 to 3; with fused attention without the scores.
---@param sequences integer  of a micro-batch
---@param options? { tensor?: integer, recompute?: boolean, fused?: boolean }  tensor: ranks that share the layer (1);
-- recompute: what goes in alone is kept (false); fused: no scores are kept (false)
---@return number
function Transformer:activations(sequences, options)
  local who = "CostTransformer:activations"
  M.expect(who, self)
  expect(who, "sequences", sequences, "a finite number >= 0")
  local o = arguments.read(who, options, { tensor = 1, recompute = false, fused = false },
    { tensor = "an integer >= 1", recompute = "a boolean", fused = "a boolean" })
  local tokens, h = sequences * self.length, self.hidden
  if o.recompute then return 2.0 * tokens * h end
  local wide = (self.gated and 3 or 2) * 2.0 * self.inner / h -- of a GPT 16
  local scores = o.fused and 0 or 5.0 * self.heads * self.length / h
  return tokens * h * (10 + (8 + wide + scores) / o.tensor)
end

return M
