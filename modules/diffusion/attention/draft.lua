--- DraftAttention (Shen et al. 2025, "DraftAttention: Fast Video Diffusion via Low-Resolution Attention Guidance"): a
-- map of attention between the means of cells says which cells are to see each other at full resolution. Tokens are
-- ordered cell by cell, so that what is kept is blocks, and ordered back afterwards.
--
--     draft = softmax(q' k'^T / sqrt(d)), q' and k' the means over cells; of a head's whole map the largest entries are
--     kept, and with each cell itself (a row of the map may have none)
local ty = require "tycho"
local arguments = require "tycho.arguments"
local layers = require "tycho.diffusion.attention.layers"
local cells_of = require "tycho.diffusion.attention.cells"

local expect, fail = arguments.expect, arguments.fail
local WHO = "attention.draft"

--- Draft-guided attention of a network.
---@class DraftAttention
---@field sparsity number  share of the pairs of cells that are left out
local Draft = {}
Draft.__index = Draft
Draft.__name = "DraftAttention"

-- The means over cells of x [b, h, t, d] that is ordered by them.
local function means(x, cells) return x:reshape(x.shape[1], x.shape[2], cells.count, cells.size, -1):mean(3) end

--- The draft: attention between the means of cells, [b, h, cells, cells], of q and k [b, h, t, d] by cells.
---@param q Tensor
---@param k Tensor
---@param cells Cells
---@return Tensor
local function draft_map(q, k, cells)
  local who = "attention.draft_map"
  cells_of.fits(who, cells, { q = q or false, k = k or false })
  return (means(q, cells):matmul(means(k, cells):transpose(-2, -1)) * q.shape[4] ^ -0.5):softmax(-1)
end

--- The lists of kept cells, i64 [b, h, cells, most], -1 behind the last: of each head's map [b, h, cells, cells] the
-- largest (1 - sparsity) of all entries, and the diagonal.
---@param map Tensor
---@param sparsity number
---@return Tensor
local function kept_of(map, sparsity)
  local who = "attention.draft_blocks"
  expect(who, "map", map, "a tensor")
  expect(who, "sparsity", sparsity, "a number in [0, 1]")
  if map.ndim ~= 4 or map.shape[3] ~= map.shape[4] then
    fail("%s: map: expected [b, h, cells, cells], got %s", who, arguments.describe(map))
  end
  local b, h, n = map.shape[1], map.shape[2], map.shape[3]
  local kept = math.max(1, math.floor((1 - sparsity) * n * n + 0.5))
  local least = map:reshape(b, h, n * n):sort(-1, true):select(-1, kept - 1):reshape(b, h, 1, 1)
  local own = ty.eye(n, { device = map.device }):gt(0)
  local keep = map:ge(least):logical_or(own)
  local counts = keep:to("i64"):sum(-1, true)
  local most = counts:amax():item()
  local order = keep:to("u8"):argsort(-1, true):narrow(-1, 0, most)
  return ty.where(ty.arange(most, { device = map.device }):lt(counts), order, -1)
end

--- Attention of q, k, v [b, h, t, d] whose tokens lie in the order of the map: ordered by cells, sparse as the draft
-- says, ordered back. blocks: the lists of kept cells, where something else than the draft decides.
---@param q Tensor
---@param k Tensor
---@param v Tensor
---@param cells Cells
---@param sparsity number
---@param blocks? Tensor
---@return Tensor y
---@return Tensor lse
local function attend(q, k, v, cells, sparsity, blocks)
  local who = "attention.draft_attention"
  cells_of.fits(who, cells, { q = q or false, k = k or false, v = v or false })
  expect(who, "sparsity", sparsity, "a number in [0, 1]")
  q, k, v = cells:gather(q), cells:gather(k), cells:gather(v)
  blocks = blocks or kept_of(draft_map(q, k, cells), sparsity)
  local y, lse = ty.block_sparse_attention(q, k, v, blocks, cells.size, cells.size)
  return cells:restore(y), lse:index_select(2, cells.inverse:to { device = lse.device })
end

function Draft:_compute(_, q, k, v, text)
  local y, lse
  if self.step and self.step <= self.warmup then
    if not text then return ty.scaled_dot_product_attention(q, k, v) end
    y, lse = layers.dense(q, k, v)
  else
    y, lse = attend(q, k, v, self.cells, self.sparsity, self.choose and self.choose(q, k, self.cells))
  end
  return text and (layers.join { { y = y, lse = lse }, text }) or y
end

--- A call of the network: dense in the first steps.
function Draft:call(run, next, request)
  expect("DraftAttention:call", "run", run, "a table")
  expect("DraftAttention:call", "next", next, "a function")
  expect("DraftAttention:call", "request", request, "a table")
  self.step = run.step
  local ok, y = pcall(next, request)
  self.step = nil
  if not ok then error(y, 0) end
  return y
end

--- The network as it was.
function Draft:remove()
  if self.replaced then self.replaced:remove() end
  self.replaced = nil
end

local kinds = { rows = "an integer >= 1", columns = "an integer >= 1", frames = "an integer >= 1",
  cell = "a pair of integers", sparsity = "a number in [0, 1]", warmup = "an integer >= 0", choose = "a function" }

--- Draft-guided attention in a network with self-attention over a grid of tokens. options: rows, columns, frames (1),
-- cell ({ 4, 4 }: of tokens, { height, width }), sparsity (0.9), warmup (0: first steps that are dense, where this is a
-- part of a sampler), choose (a function of q, k by heads and the cells that gives lists of kept cells in the place of
-- the draft). Until remove() the network's attention is this.
---@param model Module
---@param options table
---@return DraftAttention
local function new(model, options)
  expect(WHO, "model", model, "a module")
  local none = arguments.none
  local o = arguments.read(WHO, options, { rows = none, columns = none, frames = 1, cell = { 4, 4 }, sparsity = 0.9,
    warmup = 0, choose = none }, kinds)
  local self = setmetatable({ sparsity = o.sparsity, warmup = o.warmup, choose = o.choose }, Draft)
  self.cells = cells_of.cells { rows = o.rows, columns = o.columns, frames = o.frames, cell = o.cell }
  self.replaced = layers.replace(model, function(...) return self:_compute(...) end)
  return self
end

return { new = new, map = draft_map, blocks = kept_of, attend = attend }
