--- Training steps that others have measured on clusters of GPUs, as data for cost models: tables of plans and of what
-- each took.
--
-- selene: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
-- table 1 (operations a second of a GPU); micro-batches and chunks are those of the authors' script run_table_1.sh.
-- jean_zay: the BigScience workshop's log of trials before it trained BLOOM, train/tr11-176B-ml/chronicles-prequel.md
-- in bigscience-workshop/bigscience, February 2022: rows from the 21st on whose models are said in full, those that ran
-- out of memory among them, without the trials of other numbers of heads than 64, of which two days' of 96 are here.
-- frontier: Dash et al. 2023, "Optimizing Distributed Training on Frontier for Large Language Models": throughput of
-- the abstract; plans of the authors' launch scripts (sajal-vt/Megatron-DeepSpeed-ORNL), batch of the largest model
-- and replicas of the paper's text.
local costs = require "tycho.dist.costs"

local M = {}

-- A100s with 80 GB: 312 Tflop/s, 2 TB/s, 108 processors. Selene's nodes have 8 of them over NVSwitch, which sums reach
-- 230 of the 300 GB/s of, and 8 links of 200 Gb/s.
local function a100(tiers, launch)
  return costs.cluster { flops = 312e12, memory = 80e9, bandwidth = 2.0e12, units = 108, tile = 128, launch = launch,
    tiers = tiers }
end

local node = { size = 8, latency = 5e-6, bandwidth = 230e9 }

--- Clusters by name: selene, jean_zay and frontier.
M.clusters = {
  selene = a100({ node, { latency = 1e-5, bandwidth = 200e9, shared = true } }, 5e-6),
  -- 4 links of 100 Gb/s a node. CUDA_LAUNCH_BLOCKING was set: every kernel was waited for.
  jean_zay = a100({ node, { latency = 1e-5, bandwidth = 50e9, shared = true } }, 2e-5),
  -- Halves of an MI250X, 191.5 Tflop/s and 1.6 TB/s each: 200 GB/s to the other half, 50 to the rest of the node, and
  -- 4 links of 200 Gb/s a node.
  frontier = costs.cluster { flops = 191.5e12, memory = 64e9, bandwidth = 1.6e12, units = 110, tile = 128,
    launch = 1e-5, tiers = { { size = 2, latency = 1e-5, bandwidth = 150e9 }, { size = 8, latency = 1e-5,
      bandwidth = 37e9 }, { latency = 2e-5, bandwidth = 100e9, shared = true } } },
}

-- layers, hidden, heads, tensor, pipeline, data, micro, sequences, chunks, Tflop/s
local selene = {
  { 24, 2304, 24, 1, 1, 32, 16, 512, 1, 137 }, { 30, 3072, 32, 2, 1, 32, 16, 512, 1, 138 },
  { 36, 4096, 32, 4, 1, 32, 16, 512, 1, 142 }, { 40, 6144, 48, 8, 1, 32, 8, 1024, 1, 135 },
  { 48, 8192, 64, 8, 2, 32, 4, 1536, 1, 138 }, { 60, 10240, 80, 8, 4, 32, 2, 1792, 3, 140 },
  { 80, 12288, 96, 8, 8, 24, 2, 2304, 2, 148 }, { 96, 16384, 128, 8, 16, 15, 1, 2160, 2, 155 },
  { 105, 20480, 128, 8, 35, 9, 1, 2520, 3, 163 }, { 128, 25600, 160, 8, 64, 6, 1, 3072, 1, 163 },
}

-- day, layers, hidden, heads, then plans: data, tensor, pipeline, micro, sequences, seconds (0: out of memory), GB or
-- nil. balance: of stages; gradients in single precision from the 28th on.
local jean_zay = {
  { 21, 72, 14336, 64, { 4, 8, 12, 1, 2048, 143.31, 29 }, { 4, 8, 12, 2, 2048, 134.02, 37 },
    { 4, 8, 12, 4, 2048, 123.69, 49 }, { 4, 8, 12, 8, 2048, 129.26, 69 }, { 8, 8, 6, 1, 2048, 139.82, 38 },
    { 8, 8, 6, 2, 2048, 131.02, 44 }, { 8, 8, 6, 4, 2048, 121.48, 56 } },
  { 21, 84, 13824, 64, { 4, 8, 12, 2, 2048, 143.89, 39 }, { 4, 8, 12, 4, 2048, 133.12, 52 },
    { 8, 8, 6, 2, 2048, 141.41, 65 }, { 8, 8, 6, 4, 2048, 130.31, 56 } },
  { 23, 96, 12288, 64, { 8, 8, 6, 2, 2048, 136.73 }, { 8, 8, 6, 4, 2048, 122.96 } },
  { 23, 84, 13312, 64, { 4, 8, 12, 4, 2048, 125.52 }, { 8, 8, 6, 2, 2048, 135.55 }, { 8, 8, 6, 4, 2048, 122.93 } },
  { 23, 78, 13824, 64, { 8, 8, 6, 4, 2048, 121.28 } },
  { 23, 72, 14336, 64, { 4, 8, 12, 4, 2048, 123.79 }, { 8, 8, 6, 4, 2048, 120.85 } },
  { 25, 72, 14336, 64, { 8, 8, 6, 4, 1568, 113.01, 56 }, { 8, 8, 6, 4, 2048, 114.11, 55 },
    { 8, 8, 6, 6, 2016, 123.57, 66 }, { 4, 8, 12, 4, 1568, 92.75 }, { 4, 8, 12, 4, 2048, 117.07, 49 },
    { 4, 8, 12, 2, 1568, 99.93 }, { 4, 8, 12, 2, 2048, 128.82 }, { 6, 8, 8, 4, 2016, 113.16, 52 },
    { 12, 8, 4, 2, 2016, 125.52, 53 }, { 12, 8, 4, 4, 2016, 114.81, 59 }, { 24, 8, 2, 1, 2016, 145.45, 65 },
    { 24, 8, 2, 2, 2016, 136.13, 76 }, { 48, 8, 1, 1, 2016, 0 }, { 8, 4, 12, 4, 2048, 111.89, 60 },
    { 8, 4, 12, 2, 2048, 110.48, 44 }, { 8, 4, 12, 2, 2048, 113.54, 38 }, { 16, 4, 6, 4, 2048, 117.11, 75 },
    { 16, 4, 6, 2, 2048, 111.71, 57 }, { 16, 2, 12, 2, 2048, 112.50, 63 }, { 32, 2, 6, 2, 2048, 0 },
    { 32, 2, 6, 1, 2048, 0 }, { 8, 2, 24, 1, 2048, 119.53, 44 }, { 8, 2, 24, 2, 2048, 122.75, 53 },
    { 4, 4, 24, 1, 2048, 130.60 } },
  { 26, 78, 13824, 64, { 8, 4, 12, 1, 2048, 148.24 }, { 8, 4, 12, 2, 2048, 103.51, 48 },
    { 8, 4, 12, 4, 2048, 106.72 } },
  { 26, 72, 14336, 64, { 8, 4, 12, 2, 2048, 110.42 }, { 8, 8, 6, 4, 2048, 113.95 } },
  { 26, 84, 13312, 64, { 8, 4, 12, 2, 2048, 103.82 }, { 8, 4, 12, 4, 2048, 113.21 }, { 8, 8, 6, 2, 2048, 129.61 } },
  { 26, 78, 13824, 96, { 8, 4, 12, 2, 512, 35.77 }, { 8, 4, 12, 2, 1024, 59.65 }, { 8, 4, 12, 2, 1536, 83.11 },
    { 8, 4, 12, 2, 2048, 107.12, 48 }, { 8, 4, 12, 4, 2048, 110.31 }, { 8, 8, 6, 4, 2048, 118.12 } },
  { 27, 78, 13824, 96, { 8, 8, 6, 2, 2048, 133.57 }, { 8, 8, 6, 4, 2048, 118.24, 59 },
    { 16, 4, 6, 4, 2048, 115.55, 75 } },
  { 28, 100, 12288, 64, balance = "embeddings", { 16, 4, 6, 2, 2048, 0 }, { 16, 4, 6, 1, 2048, 0 },
    { 8, 8, 6, 2, 2048, 139.72, 61 }, { 8, 8, 6, 4, 2048, 120.96, 72 } },
  { 28, 82, 13312, 64, balance = "embeddings", { 4, 8, 12, 4, 2048, 111.79, 52 }, { 8, 4, 12, 2, 2048, 104.45, 63 },
    { 8, 4, 12, 4, 2048, 104.82, 74 } },
  { 28, 70, 14336, 64, balance = "embeddings", { 4, 8, 12, 2, 2048, 121.63, 40 }, { 8, 4, 12, 2, 2048, 102.03, 59 },
    { 8, 4, 12, 4, 2048, 102.27, 73 } },
}

---@class PublishedStep
---@field model CostTransformer
---@field plan ParallelPlan
---@field flops number|nil   operations a second of each device, as the source counts them; nil: out of memory
---@field bytes number|nil   of the fullest device
---@field group string       what was the same: model and day
---@field day integer|nil

--- The rows of selene's table.
---@return PublishedStep[]
function M.selene()
  local list = {}
  for i, r in ipairs(selene) do
    list[i] = { model = costs.transformer { layers = r[1], hidden = r[2], heads = r[3], vocabulary = 51200 },
      plan = { tensor = r[4], pipeline = r[5], data = r[6], micro = r[7], sequences = r[8], chunks = r[9], zero = 0,
        gradient_bytes = 4 }, flops = 1e12 * r[10], group = "selene" }
  end
  return list
end

--- The trials on Jean Zay.
---@return PublishedStep[]
function M.jean_zay()
  local list = {}
  for _, block in ipairs(jean_zay) do
    local day, layers, hidden, heads = table.unpack(block)
    local model = costs.transformer { layers = layers, hidden = hidden, heads = heads, vocabulary = 250880 }
    for i = 5, #block do
      local d, t, p, micro, sequences, seconds, gigabytes = table.unpack(block[i])
      local flops = seconds > 0 and model:flops(sequences, true) / seconds / (d * t * p) or nil
      list[#list + 1] = { model = model, day = day, flops = flops, bytes = gigabytes and 1e9 * gigabytes,
        group = ("%d layers of %d, %d heads, day %d"):format(layers, hidden, heads, day),
        plan = { tensor = t, pipeline = p, data = d, micro = micro, sequences = sequences, balance = block.balance,
          gradient_bytes = day >= 28 and 4 or 2, reserve = 2e9 } }
    end
  end
  return list
end

--- Frontier's three recipes, which the paper recommends.
---@return PublishedStep[]
function M.frontier()
  local function row(layers, hidden, heads, plan, share)
    plan.fused, plan.zero = true, 1
    return { model = costs.transformer { layers = layers, hidden = hidden, heads = heads, vocabulary = 51200 },
      plan = plan, flops = share * M.clusters.frontier.flops, group = "frontier" }
  end
  return {
    row(48, 6144, 48, { tensor = 1, pipeline = 8, data = 2, micro = 1, sequences = 640 }, 0.3838),
    row(96, 12288, 96, { tensor = 4, pipeline = 16, data = 16, micro = 1, sequences = 640 * 16 }, 0.3614),
    row(128, 25600, 128, { tensor = 8, pipeline = 64, data = 6, micro = 1, sequences = 1600 * 6 }, 0.3196),
  }
end

return M
