--- LoRAM: adapters trained on a pruned model, for the whole one. Zhang et al. 2025, "Train Small, Infer Large:
-- Memory-Efficient LoRA Training for Large Language Models".
--
--     local small, map = peft.loram.prune(model, { ratio = 0.5, data = batches })    -- heads and neurons, cut out
--     llm.train.fit(small, text, { steps = 100, lr = 1e-3 })                         -- alignment, once for all tasks
--     peft.lora(small, { rank = 8, targets = "all-linear" })                         -- or peft.qlora: QLoRAM
--     ...                                                                            -- training on the small model
--     peft.loram.recover(small, map, model)                                          -- the adapter, on the whole model
--     peft.merge(model)
--
-- The map is what both share: of each layer that was cut, the numbers of the rows and columns of its weight that the
-- small one has. Recovery puts the rows of B and the columns of A back into their places, with zeros at the others.
local ty = require "tycho"
local adapter = require "tycho.peft.adapter"
local arguments = require "tycho.arguments"
local layers = require "tycho.peft.layers"

local nn = ty.nn
local surgery = nn.surgery
local M = {}

local function linear(module, key)
  local child = rawget(module, key)
  return nn.is_module(child) and surgery.kind(child) == "linear" and child or nil
end

-- What can be cut out of a model in whole units: a list of { block (its module), path, units, rows, columns }, where
-- rows and columns are lists of { name, width }: layers whose rows, or columns, belong to the units, `width` to each.
local function groups_of(model)
  local list = {}
  local names, modules = surgery.modules(model)
  for _, path in ipairs(names) do
    local block = modules[path]
    local function each(keys)
      for _, key in ipairs(keys) do if not linear(block, key) then return false end end
      return true
    end
    if each { "gate_proj", "up_proj", "down_proj" } then
      list[#list + 1] = { block = block, path = path, units = select(2, surgery.sizes(block.gate_proj)),
        rows = { { "gate_proj", 1 }, { "up_proj", 1 } }, columns = { { "down_proj", 1 } } }
    elseif each { "q_proj", "k_proj", "v_proj", "o_proj" } and block.heads and block.kv_heads
      and not (block.whole_norms or false) then
      local _, outputs = surgery.sizes(block.k_proj)
      local width, shared = outputs // block.kv_heads, block.heads // block.kv_heads
      list[#list + 1] = { block = block, path = path, units = block.kv_heads, attention = true,
        rows = { { "q_proj", width * shared }, { "k_proj", width }, { "v_proj", width } },
        columns = { { "o_proj", width * shared } } }
    end
  end
  return list
end

-- How much each unit of a group matters, [units]: score(weight) gives one number for each weight, as rows.
local function importance(group, score)
  local sum
  for _, side in ipairs { "rows", "columns" } do
    for _, part in ipairs(group[side]) do
      local values = score(group.block[part[1]])
      if side == "columns" then values = values:transpose(0, 1) end
      local units = values:reshape(group.units, -1):sum(1)
      sum = sum and sum + units or units
    end
  end
  return sum
end

-- Scores of weights, by the method's name. First-order Taylor: what the loss would change by if the weight were zero,
-- as LLM-Pruner has it (Ma et al. 2023, equation 3, of each element).
local function scorer(who, model, o)
  if o.method == "magnitude" then return function(module) return surgery.rows(module):to("f64"):square() end end
  if o.method == "random" then
    return function(module) return ty.rand_like(surgery.rows(module):to "f64") end
  end
  if #o.data == 0 then error(who .. ": data: expected at least one batch for the method taylor, got none", 0) end
  local wanted = {}
  for _, p in ipairs(model:parameters()) do wanted[p] = p.requires_grad end
  model:requires_grad_(true)
  for _, batch in ipairs(o.data) do
    ty.scope(function()
      model:loss(batch.tokens, batch.targets, { cu_seqlens = batch.cu_seqlens, longest = batch.longest }):backward()
    end)
  end
  for p, before in pairs(wanted) do p:requires_grad_(before) end
  return function(module)
    return (surgery.rows(module) * surgery.rows(module, module.weight.grad)):to("f64"):abs()
  end
end

-- The numbers of the `keep` units that matter most, rising.
local function best(scores, keep)
  local list = select(2, scores:topk(keep)):tolist()
  table.sort(list)
  return list
end

-- The rows or columns of units of `width`, as an i64 tensor.
local function spread(units, width)
  local list = {}
  for _, unit in ipairs(units) do
    for k = 0, width - 1 do list[#list + 1] = unit * width + k end
  end
  return list
end

-- Cuts a linear layer down to some of its rows or columns.
local function cut(module, rows, columns)
  local weight = surgery.rows(module)
  local function picked(t, dim, list)
    return t:index_select(dim, ty.tensor(list, { dtype = "i64", device = t.device }))
  end
  local trained = module.weight.requires_grad
  if rows then weight = picked(weight, 0, rows) end
  if columns then weight = picked(weight, 1, columns) end
  if module.fan_in_fan_out then weight = weight:transpose(0, 1) end
  surgery.exchange(module, "weight", weight:contiguous():clone():requires_grad_(trained))
  if rows and module.bias then
    surgery.exchange(module, "bias", picked(module.bias:detach(), 0, rows):clone():requires_grad_(trained))
  end
  module.in_features, module.out_features = surgery.sizes(module)
end

local methods = { taylor = true, magnitude = true, random = true }

local function prune(model, options)
  local who = "peft.loram.prune"
  arguments.expect(who, "model", model, "a module")
  local o = arguments.read(who, options, { ratio = 0.5, method = "taylor", data = {}, skip = {}, multiple = 1 },
    { ratio = "a number in [0, 1)", method = "a string", data = "a list of tables", skip = "a list of strings",
      multiple = "an integer >= 1" })
  if not methods[o.method] then
    error(("%s: method: expected taylor, magnitude or random, got %s"):format(who, o.method), 0)
  end
  if rawget(model, "_adapter") then error(who .. ": model: expected one without an adapter, got one with it", 0) end
  local small, map = model:clone(), {}
  small:zero_grad()
  local groups = groups_of(small)
  if #groups == 0 then
    error(who .. ": model: expected blocks with gate_proj, up_proj and down_proj, or with q_proj, k_proj, v_proj and "
      .. "o_proj, got none", 0)
  end
  local score = scorer(who, small, o)
  local skipped = #o.skip > 0 and surgery.resolve(o.skip, surgery.modules(small)) or {}
  local plan = {}
  ty.no_grad(function()
    for i, group in ipairs(groups) do
      local step = group.attention and 1 or math.min(o.multiple, group.units)
      local keep = math.max(step, math.floor(group.units * (1 - o.ratio) / step + 0.5) * step)
      if skipped[group.path] or skipped[group.path:match "^(.*)%." or ""] then keep = group.units end
      plan[i] = best(importance(group, score), math.min(keep, group.units))
    end
    small:zero_grad()
    for i, group in ipairs(groups) do
      for _, side in ipairs { "rows", "columns" } do
        for _, part in ipairs(group[side]) do
          local list, module = spread(plan[i], part[2]), group.block[part[1]]
          local inputs, outputs = surgery.sizes(module)
          map[group.path .. "." .. part[1]] = { [side] = list, inputs = inputs, outputs = outputs }
          cut(module, side == "rows" and list or nil, side == "columns" and list or nil)
        end
      end
      if group.attention then
        group.block.heads = group.block.heads // group.block.kv_heads * #plan[i]
        group.block.kv_heads = #plan[i]
      end
    end
  end)
  ty.core.program.renew()
  return small, map
end

--- A smaller copy of a model, without some of the heads of its attention (with grouped queries, whole groups) and of
-- the neurons of its gated feed-forward networks: their rows and columns are cut out of the weights. options:
--   ratio     0.5: the share of the units of each block that goes; at least one stays
--   method    "taylor" (|weight x gradient| of the language loss, summed over a unit's weights), "magnitude", "random"
--   data      batches for the gradients, as Model:loss has them: { tokens, targets, cu_seqlens, longest }
--   skip      names or ends of names of blocks, or of layers around them, that stay whole
--   multiple  1: neurons are kept in multiples of it, for formats that have their codes in blocks
-- Returns the copy, and the map for recover(): by name of a layer { rows = or columns = the list of kept ones, from 0,
-- inputs, outputs }.
---@param model LanguageModel
---@param options? {ratio?: number, method?: string, data?: table[], skip?: string[], multiple?: integer}
---@return LanguageModel small
---@return table<string, {rows?: integer[], columns?: integer[], inputs: integer, outputs: integer}> map
function M.prune(model, options) return nn.for_caller(prune, model, options) end

-- A tensor with the given rows (dim 0) or columns (1) of another's, and zeros elsewhere; back: those rows or columns.
local function scattered(t, dim, list, count)
  local shape = t.shape
  shape[dim + 1] = count
  local where = ty.tensor(list, { dtype = "i64", device = t.device })
  return ty.zeros(shape, { dtype = t.dtype, device = t.device }):index_add(dim, where, t)
end

local function gathered(t, dim, list)
  return t:index_select(dim, ty.tensor(list, { dtype = "i64", device = t.device }))
end

-- Copies the adapter of one model onto another: sized(a, b, entry) gives A [rank, inputs] and B [outputs, rank] of the
-- other's layer.
local function transfer(who, from, map, to, sized)
  local record = adapter.of(who, from)
  adapter.plain(who, record)
  arguments.expect(who, "map", map, "a table")
  arguments.expect(who, "the other model", to, "a module")
  if #record.saved > 0 then error(who .. ": expected an adapter of matrices alone, got one with save or bias", 0) end
  if rawget(to, "_adapter") then
    error(who .. ": the other model has an adapter already; peft.remove takes it away", 0)
  end
  local _, modules = surgery.modules(to)
  local found = {}
  for i, layer in ipairs(record.layers) do
    local module, other = layer.module, modules[layer.name]
    if not other or layers.kind(module) ~= "linear" or layers.kind(other) ~= "linear" then
      error(("%s: %s: expected a linear layer of both models"):format(who, layer.name), 0)
    end
    if module.lora_magnitude_vector then error(("%s: %s: dora: expected none"):format(who, layer.name), 0) end
    local published = {}
    for _, pair in ipairs(layers.published(module)) do published[pair[1]] = pair[2]:detach() end
    local a, b = sized(published["lora_A.weight"], published["lora_B.weight"], map[layer.name] or {})
    local inputs, outputs = surgery.sizes(other)
    if a.shape[2] ~= inputs or b.shape[1] ~= outputs then
      error(("%s: %s: the map gives [%d, %d], the model has [%d, %d]"):format(who, layer.name, b.shape[1], a.shape[2],
        outputs, inputs), 0)
    end
    found[i] = { other, a, b }
  end
  local copy = {}
  for _, key in ipairs { "rank", "alpha", "dropout", "rslora", "dora", "bias", "targets" } do
    copy[key] = record[key]
  end
  local new = adapter.begin(who, to, copy)
  for i, layer in ipairs(record.layers) do
    local state, other = layer.module._lora, found[i][1]
    adapter.add_layer(new, layer.name, other, { rank = state.rank, alpha = state.alpha, scale = state.scale,
      dropout = state.dropout, dora = false, dtype = found[i][2].dtype })
    ty.no_grad(function()
      other.lora_A.weight:copy_(found[i][2])
      other.lora_B.weight:copy_(found[i][3])
    end)
  end
  ty.core.program.renew()
  return to
end

--- Gives the whole model the adapter that was trained on the pruned one. Returns the whole model.
---@param small Module of prune(), with an adapter
---@param map table    of prune()
---@param model Module the one that was pruned, without an adapter
---@return Module model
function M.recover(small, map, model)
  return nn.for_caller(transfer, "peft.loram.recover", small, map, model, function(a, b, entry)
    if entry.columns then a = scattered(a, 1, entry.columns, entry.inputs) end
    if entry.rows then b = scattered(b, 0, entry.rows, entry.outputs) end
    return a, b
  end)
end

--- The way back: gives the pruned model, which has no adapter, the kept parts of one of the whole model. Returns the
-- pruned model.
---@param model Module with an adapter
---@param map table
---@param small Module
---@return Module small
function M.restrict(model, map, small)
  return nn.for_caller(transfer, "peft.loram.restrict", model, map, small, function(a, b, entry)
    if entry.columns then a = gathered(a, 1, entry.columns) end
    if entry.rows then b = gathered(b, 0, entry.rows) end
    return a, b
  end)
end

return M
