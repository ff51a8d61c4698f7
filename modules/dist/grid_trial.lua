--- What recipes about grids of ranks measure: a workload's model with layers that ranks share, in stages, on parts of
-- the data, all at once.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local functional = require "tycho.dist.functional"
local gradients = require "tycho.dist.gradients"
local make_grid = require "tycho.dist.grid"
local pipelines = require "tycho.dist.pipeline"
local ranks_of = require "tycho.dist.ranks"
local schedules = require "tycho.dist.schedule"
local surgery = require "tycho.nn.surgery"
local workload = require "tycho.dist.workload"

local M = {}

-- ---- layers that ranks share ----

-- Attention with some of the heads, or a feed-forward network with some of the inner values, whose sum over the ranks
-- is that of the whole.
local Shared = ty.nn.module "Shared"

function Shared:init(group, inner)
  rawset(self, "group", group)
  self.inner = inner
end

function Shared:forward(x, ...)
  return functional.summed(self.group, self.inner(functional.copied(self.group, x), ...))
end

local function take_part(who, layer, dim, parts, place)
  local n = layer.weight.shape[dim + 1]
  if n % parts ~= 0 then arguments.fail("%s: tensor: expected a divisor of %d, got %d", who, n, parts) end
  local part = layer.weight:detach():narrow(dim, n // parts * place, n // parts):clone()
  surgery.exchange(layer, "weight", part:contiguous():requires_grad_())
end

local function check_group(who, group)
  if getmetatable(group) ~= require "tycho.dist.group" then
    arguments.fail("%s: group: expected a group, got %s", who, arguments.describe(group))
  end
end

--- Divides the attention and the feed-forward network of a decoder's layer over a group, in place. Shoeybi et al. 2019,
-- "Megatron-LM". Its norms are whole everywhere.
---@param layer Module  with self_attn and mlp as a Llama's
---@param group RankGroup  whose sums it has
---@param parts? integer   in which matrices are cut (as many as the group has ranks)
---@param place? integer   the rank's own part, from 0 (its rank)
function M.divide_layer(layer, group, parts, place)
  local who = "dist.grid_trial.divide_layer"
  arguments.expect(who, "layer", layer, "a module")
  check_group(who, group)
  parts, place = parts or group.size, place or group.rank
  arguments.expect(who, "parts", parts, "an integer >= 1")
  arguments.expect(who, "place", place, "an integer >= 0")
  if parts == 1 then return end
  local attention, mlp = layer.self_attn, layer.mlp
  if not arguments.is_module(attention) or not attention.q_proj or not mlp or not mlp.gate_proj then
    arguments.fail("%s: layer: expected one of a Llama, got %s", who, arguments.describe(layer))
  end
  for _, name in ipairs { "heads", "kv_heads" } do
    if attention[name] % parts ~= 0 then
      arguments.fail("%s: layer: expected a multiple of %d %s, got %d", who, parts, name, attention[name])
    end
    attention[name] = attention[name] // parts
  end
  for _, name in ipairs { "q_proj", "k_proj", "v_proj" } do take_part(who, attention[name], 0, parts, place) end
  take_part(who, attention.o_proj, 1, parts, place)
  take_part(who, mlp.gate_proj, 0, parts, place)
  take_part(who, mlp.up_proj, 0, parts, place)
  take_part(who, mlp.down_proj, 1, parts, place)
  layer.self_attn, layer.mlp = Shared(group, attention), Shared(group, mlp)
end

--- Divides all layers of a Llama over a group, in place. The embedding and the norms are whole everywhere.
---@param model LanguageModel
---@param group RankGroup
function M.divide(model, group)
  local who = "dist.grid_trial.divide"
  arguments.expect(who, "model", model, "a module")
  check_group(who, group)
  for _, layer in ipairs(model.model.layers) do M.divide_layer(layer, group) end
end

-- ---- training ----

local function loss_of(logits, targets)
  return ty.nn.cross_entropy(logits:flatten(0, 1), targets:flatten())
end

local function train(group, work, o)
  local grid = make_grid(group, { tensor = o.tensor, pipeline = o.pipeline, data = o.data })
  local pipeline
  do -- the rank keeps its own layers alone
    local model = workload.model(work, o.seed)
    M.divide(model, grid.tensor)
    pipeline = pipelines.new(grid.pipeline, pipelines.layers(model), { loss = loss_of, recompute = o.recompute,
      share = o.share and grid.tensor or nil, costs = o.costs,
      schedule = schedules[o.schedule](o.pipeline, o.micro_batches, o.chunks) })
  end
  local parameters = pipeline:parameters()
  local optimizer, buckets = ty.optim.AdamW(parameters, { lr = o.lr }), gradients.buckets(parameters)
  local out = { losses = {}, parameters = 0 }
  for _, p in ipairs(parameters) do out.parameters = out.parameters + p:nbytes() end
  local share, began = o.rows // o.data, group:clock()
  local function batch(rows)
    return rows:narrow(1, 0, work.length):contiguous(), rows:narrow(1, 1, work.length):contiguous()
  end
  for step = 1, o.steps do
    optimizer:zero_grad()
    local loss = pipeline:step(batch(workload.rows(work, o.seed, step, grid.at.data * share, share)))
    buckets:mean_gradients(grid.data)
    optimizer:step()
    out.losses[step] = grid.data:all_reduce(ty.tensor({ loss }, { dtype = "f64" }), "mean"):item()
  end
  out.seconds = group:clock() - began
  local count = work.held_out.shape[1] // o.micro_batches * o.micro_batches
  out.held_out = pipeline:evaluate(batch(work.held_out:narrow(0, 0, count)))
  out.sent = { tensor = grid.tensor:traffic().bytes, pipeline = grid.pipeline:traffic().bytes,
    data = grid.data:traffic().bytes }
  return out
end

--- Trains a workload's model on tensor * pipeline * data ranks. options: tensor, pipeline, data (1 each), schedule
-- ("one_f_one_b", or "gpipe", "interleaved"), micro_batches (4: of each part of the data), chunks (1), rows (16: of a
-- step, of all ranks), steps (20), lr (3e-3), recompute (false), share (false: true for ranks that share layers to
-- send a part of the activations each), costs (of the layers), seed (0).
---@param work RankWorkload
---@param options? table
---@return { losses: number[], held_out: number, parameters: integer, seconds: number,
---  sent: { tensor: integer, pipeline: integer, data: integer } }  the loss of each step and over the held-out rows;
-- bytes of a rank's parameters, at most; bytes that all ranks sent in each kind of group
function M.run(work, options)
  local who = "dist.grid_trial.run"
  arguments.expect(who, "work", work, "a table")
  local count = "an integer in [1, 1024]"
  local o = arguments.read(who, options, { tensor = 1, pipeline = 1, data = 1, schedule = "one_f_one_b",
    micro_batches = 4, chunks = 1, rows = 16, steps = 20, lr = 3e-3, recompute = false, share = false,
    costs = arguments.none, seed = 0 },
    { tensor = count, pipeline = count, data = count, schedule = '"gpipe" or "one_f_one_b" or "interleaved"',
      micro_batches = "an integer >= 1", chunks = "an integer >= 1", rows = "an integer >= 1",
      steps = "an integer >= 1", lr = "a number > 0", recompute = "a boolean", share = "a boolean",
      costs = "a list of numbers", seed = "an integer" })
  if o.rows % (o.data * o.micro_batches) ~= 0 then
    arguments.fail("%s: rows: expected a multiple of %d, a row for each micro-batch of each part of the data, got %d",
      who, o.data * o.micro_batches, o.rows)
  end
  local got = ranks_of.run(o.tensor * o.pipeline * o.data, train, { seed = o.seed }, work, o)
  local out = { losses = got[1].losses, held_out = got[1].held_out, parameters = 0, seconds = 0,
    sent = { tensor = 0, pipeline = 0, data = 0 } }
  for _, r in ipairs(got) do
    out.parameters, out.seconds = math.max(out.parameters, r.parameters), math.max(out.seconds, r.seconds)
    for kind, n in pairs(r.sent) do out.sent[kind] = out.sent[kind] + n end
  end
  return out
end

return M
