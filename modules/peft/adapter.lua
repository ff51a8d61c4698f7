--- The adapter of a model: which modules it changes, what is trained, switching it off and taking it away.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local base = require "tycho.nn.module"
local layers = require "tycho.peft.layers"
local ways = require "tycho.peft.ways"

local nn = ty.nn
local surgery = nn.surgery
local expect = arguments.expect
local M = {}

-- The kinds of modules that a model has, for the same.
local function classes(names, modules)
  local list, known = {}, {}
  for _, name in ipairs(names) do
    local kind = getmetatable(modules[name]).__name
    if not known[kind] then list[#list + 1], known[kind] = kind, true end
  end
  return table.concat(list, ", ", 1, math.min(#list, 40))
end

--- Names as transformers has them.
function M.published(names, prefix)
  local list = {}
  for i, name in ipairs(names) do list[i] = prefix .. name end
  return list
end

local function listed(who, what, list, names, modules)
  local set, problem = surgery.resolve(list, names, modules)
  return set or error(("%s: %s: %s"):format(who, what, problem), 0)
end

-- The names of the modules to adapt, in the model's order.
local function chosen(who, model, targets)
  local names, modules = surgery.modules(model)
  local fits
  if type(targets) == "table" then
    local set = listed(who, "targets", targets, names, modules)
    fits = function(name) return set[name] end
  elseif targets == "all-linear" then
    fits = function(name, module) return layers.kind(module) == "linear" and module ~= rawget(model, "lm_head") end
  elseif type(targets) == "string" then
    fits = function(name, module) return layers.kind(module) and name:find("^" .. targets .. "$") end
  elseif type(targets) == "function" then
    fits = function(name, module) return layers.kind(module) and targets(name, module) end
  else
    error(("%s: targets must be a list of names, a pattern, 'all-linear' or a function, got %s"):format(who,
      type(targets)), 0)
  end
  local result = {}
  for _, name in ipairs(names) do
    if name ~= "" and fits(name, modules[name]) then
      if not layers.kind(modules[name]) then
        error(("%s: '%s' is %s; adapters go on Linear, Conv1D, Conv2d and Embedding"):format(who, name,
          getmetatable(modules[name]).__name), 0)
      end
      result[#result + 1] = name
    end
  end
  if #result == 0 then
    error(("%s: targets: nothing matches %s; adapters go on Linear, Conv1D, Conv2d and Embedding, and the model has %s")
      :format(who, type(targets) == "function" and "the function" or tostring(targets), classes(names, modules)), 0)
  end
  return result, modules, names
end

--- The modules that `targets` (as in peft.lora) stands for: a list of { name, module }, in the model's order.
---@return {name: string, module: Module}[]
function M.targets(who, model, targets)
  local names, modules = chosen(who, model, targets)
  local list = {}
  for i, name in ipairs(names) do list[i] = { name = name, module = modules[name] } end
  return list
end

--- The value that a table of names gives a module, or nil. A key is a name or the end of one.
function M.by_name(who, what, patterns, name)
  if patterns ~= nil and type(patterns) ~= "table" then
    error(("%s: %s must be a table by name, got %s"):format(who, what, type(patterns)), 0)
  end
  local value, from
  for key, candidate in pairs(patterns or {}) do
    if type(key) ~= "string" then error(("%s: %s must have names for keys"):format(who, what), 0) end
    local plain = key:gsub("\\%.", ".")
    if plain:sub(2):find "[%^%$%*%+%?%[%]%(%)|\\{}]" then
      error(("%s: %s: '%s' is a regular expression; only names and ends of names are read"):format(who, what, key), 0)
    end
    if surgery.ends_in(name, plain) then
      if from and value ~= candidate then
        error(("%s: %s: '%s' and '%s' both stand for %s"):format(who, what, from, key, name), 0)
      end
      value, from = candidate, key
    end
  end
  return value
end

--- Scale of B(A(x)). Kalajdzievski 2023, "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA", for rslora.
function M.scale(alpha, rank, rslora) return alpha / (rslora and math.sqrt(rank) or rank) end

--- The adapter that a model has; an error when it has none.
function M.of(who, model)
  expect(who, "model", model, "a module")
  return rawget(model, "_adapter")
    or arguments.fail("%s: the model has no adapter; peft.lora or peft.load gives it one", who)
end

--- Freezes a model and notes the adapter that is to come.
function M.begin(who, model, record)
  expect(who, "model", model, "a module")
  if rawget(model, "_adapter") then
    error(who .. ": the model has an adapter already; peft.remove takes it away", 0)
  end
  record.layers, record.saved, record.wanted = {}, {}, {}
  for _, p in ipairs(model:parameters()) do
    if p.requires_grad then record.wanted[#record.wanted + 1] = p end
  end
  model:requires_grad_(false)
  rawset(model, "_adapter", record)
  return record
end

--- Adapts the module `name`; spec as in layers.attach.
function M.add_layer(record, name, module, spec)
  layers.attach(module, spec)
  record.layers[#record.layers + 1] = { name = name, module = module }
end

--- Makes the parameter `name` part of the adapter: a copy that is trained and saved with it.
function M.add_saved(record, name, owner, key)
  local original = rawget(owner, key)
  rawset(owner, key, ty.keep(original:detach():clone():requires_grad_()))
  record.saved[#record.saved + 1] = { name = name, owner = owner, key = key, original = original }
end

local biases = { none = true, all = true, lora_only = true }

--- What an adapter takes.
---@class AdapterReport
---@field modules integer       that are adapted
---@field parameters integer    that are trained
---@field bytes integer         of these
---@field frozen integer        parameters that are not
---@field frozen_bytes integer
---@field share number          of the parameters that is trained

--- What a model's adapter takes, once it is there: modules that are adapted, parameters and bytes of what is trained,
-- frozen and frozen_bytes of all else, and the share of the parameters that is trained.
---@param model Module
---@return AdapterReport
function M.report(model)
  local record = M.of("peft.report", model)
  local report, trained = { modules = #record.layers, parameters = 0, bytes = 0, frozen = 0, frozen_bytes = 0 }, {}
  for _, p in ipairs(M.parameters(model)) do
    trained[p] = true
    report.parameters, report.bytes = report.parameters + p:numel(), report.bytes + p:nbytes()
  end
  for _, p in ipairs(model:parameters()) do
    if not trained[p] then
      report.frozen, report.frozen_bytes = report.frozen + p:numel(), report.frozen_bytes + p:nbytes()
    end
  end
  report.share = report.parameters / math.max(1, report.parameters + report.frozen)
  return report
end

-- Names of the parameters to train whole: visit(name, owner, key).
local function each_saved(model, modules_to_save, bias, adapted, visit)
  base.walk_state(model, function(kind, name, tensor, owner, key)
    if kind ~= "parameter" or not tensor:is_floating_point() then return end
    local path = name:match "^(.*)%.[^.]+$" or ""
    local inside = bias == "all" and name:find "bias" or bias == "lora_only" and adapted[path] and key == "bias"
    local up = path
    while not inside and up do
      inside = modules_to_save[up]
      up = up:match "^(.*)%.[^.]+$"
    end
    if inside then visit(name, owner, key) end
  end)
end

local function positive(who, what, value)
  if not (math.tointeger(value) and value > 0) then
    error(("%s: %s must be a positive integer, got %s"):format(who, what, tostring(value)), 0)
  end
  return math.tointeger(value)
end

local function number(who, what, value)
  if type(value) ~= "number" or value ~= value or math.abs(value) == math.huge then
    error(("%s: %s must be a number, got %s"):format(who, what, tostring(value)), 0)
  end
  return value
end

--- Raises unless an adapter can be of this dtype.
function M.check_dtype(who, dtype)
  for _, name in ipairs { "f32", "f64", "f16", "bf16" } do
    if dtype == name then return end
  end
  error(("%s: dtype must be f32, f64, f16 or bf16, got %s"):format(who, tostring(dtype)), 0)
end

--- Options that lora() and files share, checked.
function M.check(who, o)
  o.rank, o.alpha = positive(who, "rank", o.rank), number(who, "alpha", o.alpha)
  if not (number(who, "dropout", o.dropout) >= 0 and o.dropout < 1) then
    error(("%s: dropout must be within [0, 1), got %g"):format(who, o.dropout), 0)
  end
  if not biases[o.bias] then
    error(("%s: bias must be none, all or lora_only, got %s"):format(who, tostring(o.bias)), 0)
  end
end

local shared = { rank = 8, alpha = 8, targets = nn.none, rank_pattern = nn.none, alpha_pattern = nn.none,
  save = nn.none, dtype = "f32" }
local of_lora = { dropout = 0, rslora = false, dora = false, bias = "none", init = "default" }

-- Chosen modules are a list of names, a pattern or a function.
local kinds = { targets = "a string or a list of strings or a function", init = '"default" or "pissa"',
  factor = "an integer", feedforward = "a list of strings" }

-- What is asked of one layer; raises where it cannot be. strict: a rank above that of the weight is an error too, which
-- is no use to anybody, though files have it.
local function check_layer(who, name, module, spec, strict)
  local kind = layers.kind(module)
  local what = spec.dora and "dora" or spec.way and spec.way.name or spec.init == "pissa" and spec.init
  if what and kind ~= "linear" then
    error(("%s: '%s' is %s, which %s does not adapt"):format(who, name,
      kind == "conv" and "a convolution" or "an embedding", what), 0)
  end
  if spec.init == "pissa" then
    local inputs, outputs = surgery.sizes(module)
    if spec.dora then error(who .. ": init: pissa does not go with dora", 0) end
    if spec.rank > math.min(inputs, outputs) then
      error(("%s: rank: '%s' has %d singular values, and pissa is to take %d"):format(who, name,
        math.min(inputs, outputs), spec.rank), 0)
    end
  end
  if strict and kind == "linear" then
    local inputs, outputs = surgery.sizes(module)
    if spec.rank > math.min(inputs, outputs) then
      error(("%s: rank: expected at most %d, the smaller side of '%s' [%d, %d], got %d"):format(who,
        math.min(inputs, outputs), name, outputs, inputs, spec.rank), 0)
    end
  end
end

--- Checks the options of an adapter, of which `more` are others' or have other defaults; returns a function that gives
-- the model the adapter, and the options. way: of tycho.peft.ways, in the place of low-rank matrices;
-- strict: no rank may be larger than a linear layer's sides.
function M.prepare(who, model, options, more, way, strict)
  local known = {}
  for _, list in ipairs { shared, way and {} or of_lora, more } do
    for key, value in pairs(list) do known[key] = value end
  end
  local o = nn.options(who, options, known, kinds)
  if way then o.dropout, o.rslora, o.dora, o.bias, o.init = 0, false, false, "none", "default" end
  M.check(who, o)
  M.check_dtype(who, o.dtype)
  expect(who, "model", model, "a module")
  local names, modules, all = chosen(who, model, o.targets)
  local to_save = o.save and listed(who, "save", o.save, all, modules) or {}
  local specs, adapted = {}, {}
  for i, name in ipairs(names) do
    local published = (model.published_prefix or "") .. name
    local rank = positive(who, "rank_pattern", M.by_name(who, "rank_pattern", o.rank_pattern, published) or o.rank)
    local alpha = number(who, "alpha_pattern", M.by_name(who, "alpha_pattern", o.alpha_pattern, published) or o.alpha)
    if to_save[name] then error(("%s: '%s' is among targets and save"):format(who, name), 0) end
    specs[i] = { rank = rank, alpha = alpha, scale = M.scale(alpha, rank, o.rslora), dropout = o.dropout, dora = o.dora,
      dtype = o.dtype, init = o.init, way = way, factor = o.factor, both = o.both }
    for _, wanted in ipairs(way and o.feedforward or {}) do
      specs[i].of_inputs = specs[i].of_inputs or surgery.ends_in(published, wanted)
    end
    check_layer(who, name, modules[name], specs[i], strict)
    adapted[name] = true
  end
  if rawget(model, "_adapter") then
    error(who .. ": the model has an adapter already; peft.remove takes it away", 0)
  end
  return function()
    local record = M.begin(who, model, { rank = o.rank, alpha = o.alpha, dropout = o.dropout, rslora = o.rslora,
      dora = o.dora, bias = o.bias, save = o.save, targets = type(o.targets) == "table" and o.targets or nil,
      init = o.init, way = way, factor = o.factor, both = o.both, feedforward = o.feedforward })
    each_saved(model, to_save, o.bias, adapted, function(...) M.add_saved(record, ...) end)
    for i, name in ipairs(names) do M.add_layer(record, name, modules[name], specs[i]) end
    ty.core.program.renew()
  end, o
end

--- Gives a model low-rank adapters, which change nothing until they are trained, and freezes everything else. options:
-- targets (names or ends of names of modules, a Lua pattern for whole names, "all-linear", or a function of name and
-- module), rank (8), alpha (8; the adapter counts alpha / rank, with rslora alpha / sqrt(rank)), dropout (0, of its
-- input), rslora, dora, rank_pattern and alpha_pattern (values by name or end of name), save (names of modules that are
-- trained and saved whole), bias ("none", "all", "lora_only": biases that are trained), dtype ("f32", of the adapter),
-- init ("default": B begins with zeros; "pissa": A and B begin with the weight's largest singular values, which are
-- taken away from what the layer gives: Meng et al. 2024; files have it as plain LoRA of twice the rank).
-- Adapts Linear, GPT-2's Conv1D, Conv1d and Conv2d (in one group) and Embedding. Returns the model and a report (see
-- report(), as peft.loha and its like do); make the optimizer afterwards, of peft.parameters.
---@param model Module
---@param options table
---@return Module model
---@return AdapterReport report
function M.lora(model, options)
  return nn.for_caller(function()
    M.prepare("peft.lora", model, options, nil, nil, true)()
    return model, M.report(model)
  end)
end

-- What gives a model an adapter of another way.
local function giver(way, more)
  return function(model, options)
    return nn.for_caller(function()
      M.prepare("peft." .. way.name, model, options, more, way)()
      return model, M.report(model)
    end)
  end
end

--- Gives the linear layers of a model adapters (B1 A1) * (B2 A2), products element by element of two low-rank matrices,
-- whose rank may be as large as rank * rank. options: targets, rank (8), alpha (8), rank_pattern, alpha_pattern, save,
-- dtype, as of peft.lora. Hyeon-Woo et al. 2022, "FedPara". Returns the model and a report.
---@type fun(model: Module, options: table): Module, table
M.loha = giver(ways.loha, {})

--- Gives the linear layers of a model adapters that are Kronecker products, of a small matrix and a larger one that is
-- low-rank where the rank is less than half of its sides. options: as of peft.loha; factor (-1: sides are near each
-- other; a divisor of the layers' sides: that of the small matrix), both (false; true: the small one may be low-rank as
-- well). Yeh et al. 2023, "Navigating Text-To-Image Customization". Returns the model and a report.
---@type fun(model: Module, options: table): Module, table
M.lokr = giver(ways.lokr, { factor = -1, both = false })

--- Gives the linear layers of a model a factor for each output, or for each input where a name or the end of one is
-- among `feedforward` (those of the layers that lead out of the MLPs). options: targets, feedforward ({}), save, dtype.
-- Liu et al. 2022, "Few-Shot Parameter-Efficient Fine-Tuning is Better and Cheaper than In-Context Learning". Returns
-- the model and a report.
---@type fun(model: Module, options: table): Module, table
M.ia3 = giver(ways.ia3, { feedforward = {} })

--- What is trained: the parameters of the adapter, and those of `save` and `bias`.
---@param model Module
---@return Tensor[]
function M.parameters(model)
  local record, list = M.of("peft.parameters", model), {}
  for _, layer in ipairs(record.layers) do
    for _, pair in ipairs(layers.parameters(layer.module)) do list[#list + 1] = pair[2] end
  end
  for _, saved in ipairs(record.saved) do
    if not saved.frozen then list[#list + 1] = rawget(saved.owner, saved.key) end
  end
  local added = record.added and record.added.parameters(model) or {}
  table.move(added, 1, #added, #list + 1, list)
  return list
end

--- Raises where the adapter is more than low-rank matrices, for what cannot do with more; any: other ways will do.
function M.plain(who, record, any)
  if record.added or record.way and not any then
    error(("%s: expected an adapter of low-rank matrices alone, got %s"):format(who,
      record.kind or record.way.name), 0)
  end
end

--- A tensor where and in the dtype in which `like` is, which may have been moved since; its dtype was `before` then.
function M.moved(tensor, like, before)
  if like.dtype ~= (before or tensor.dtype) then tensor = tensor:to(like.dtype) end
  if tensor.device ~= like.device then tensor = tensor:to { device = like.device } end
  return tensor
end

-- Exchanges a tensor for another; returns the one that was there.
local function exchange(owner, key, tensor, dtype)
  local before = rawget(owner, key)
  rawset(owner, key, ty.keep(M.moved(tensor, before, dtype)))
  return before
end

--- Calls fn(...) with the model as it was without the adapter, merged or not; returns what fn returns.
---@param model Module
---@param fn function
function M.disable(model, fn, ...)
  local record, back = M.of("peft.disable", model), {}
  local function put(owner, key, ...) back[#back + 1] = { owner, key, exchange(owner, key, ...) } end
  for _, layer in ipairs(record.layers) do
    if layer.module._lora.merged == true then
      error("peft.disable: the model was merged with keep = false", 2)
    end
  end
  for _, layer in ipairs(record.layers) do
    local a = layer.module._lora
    if a.merged then put(layer.module, "weight", a.merged, a.merged_dtype) end
    a.off = true
  end
  for _, saved in ipairs(record.saved) do put(saved.owner, saved.key, saved.original) end
  if record.added then record.added.switch(true, model) end
  ty.core.program.renew()
  local result = table.pack(pcall(fn, ...))
  for _, layer in ipairs(record.layers) do layer.module._lora.off = nil end
  if record.added then record.added.switch(nil, model) end
  for i = #back, 1, -1 do rawset(table.unpack(back[i])) end
  ty.core.program.renew()
  if not result[1] then error(result[2], 0) end
  return table.unpack(result, 2, result.n)
end

--- Takes the adapter away: the model is what it was before peft.lora, or, where it was merged, one with the merged
-- weights and without the layers of the adapter. Returns the model.
---@param model Module
---@return Module model
function M.remove(model)
  local record = M.of("peft.remove", model)
  local merged = record.layers[1] and record.layers[1].module._lora.merged
  for _, layer in ipairs(record.layers) do layers.detach(layer.module) end
  if record.added then record.added.remove(model) end
  for _, saved in ipairs(record.saved) do
    if not merged then exchange(saved.owner, saved.key, saved.original) end
  end
  rawset(model, "_adapter", nil)
  for _, p in ipairs(record.wanted) do p:requires_grad_() end
  if merged then
    for _, p in ipairs(model:parameters()) do
      if p:is_floating_point() then p:requires_grad_(#record.wanted > 0) end
    end
  end
  ty.core.program.renew()
  return model
end

return M
