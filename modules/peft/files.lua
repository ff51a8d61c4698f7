--- Adapters in files: a folder with adapter_config.json and adapter_model.safetensors, as the Python library peft has
-- it; single files of diffusers and of kohya's scripts are read too.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local base = require "tycho.nn.module"
local adapter = require "tycho.peft.adapter"
local layers = require "tycho.peft.layers"
local names = require "tycho.peft.names"
local prompts = require "tycho.peft.prompts"
local ways = require "tycho.peft.ways"

local nn = ty.nn
local surgery = nn.surgery
local M = {}

-- The set of adapted modules as target_modules: the list that was given where it still says just that.
local function target_names(model, record, prefix)
  local adapted, full = {}, {}
  for i, layer in ipairs(record.layers) do adapted[layer.name], full[i] = true, prefix .. layer.name end
  if not record.targets then return full end
  local set = surgery.resolve(record.targets, (surgery.modules(model)))
  if not set then return full end
  for name in pairs(set) do if not adapted[name] then return full end end
  for name in pairs(adapted) do if not set[name] then return full end end
  return record.targets
end

-- Rank and alpha as files have them: PiSSA's matrices come with those that they began as.
local function shown_size(record, rank, alpha)
  if record.init ~= "pissa" then return rank, alpha end
  return 2 * rank, alpha * (record.rslora and math.sqrt(2) or 2)
end

-- The settings of a way in adapter_config.json.
local function own_settings(record, rank, alpha, transposed)
  local way = record.way
  if not way then
    return { peft_type = "LORA", r = rank, lora_alpha = alpha, lora_dropout = record.dropout,
      use_rslora = record.rslora, use_dora = record.dora, bias = record.bias, fan_in_fan_out = transposed,
      init_lora_weights = true }
  end
  local settings = { peft_type = way.type }
  if way == ways.ia3 then
    settings.feedforward_modules, settings.fan_in_fan_out = ty.io.array(record.feedforward or {}), transposed
    settings.rank_pattern, settings.alpha_pattern = false, false
    return settings
  end
  settings.r, settings.alpha = rank, alpha
  if way == ways.lokr then settings.decompose_factor, settings.decompose_both = record.factor, record.both end
  return settings
end

local function write(folder, config, state)
  ty.io.mkdir(folder)
  ty.io.save_safetensors(folder .. "/adapter_model.safetensors", state, { format = "pt" })
  ty.io.write_atomic(folder .. "/adapter_config.json", ty.io.json_encode(config, { indent = 2 }) .. "\n")
end

--- Writes the adapter to a folder that the Python library peft reads as well. options: base (name of the model that it
-- belongs to), prefix (what module names begin with in the Python model; by default the family's).
---@param model Module
---@param folder string
---@param options? {base?: string, prefix?: string}
---@return Module model
function M.save(model, folder, options)
  local who = "peft.save"
  local record = adapter.of(who, model)
  if not record.prompt then nn.for_caller(adapter.plain, who, record, true) end
  local o = nn.options(who, options, { base = nn.none, prefix = nn.none })
  if record.prompt then
    write(folder, prompts.published(model, record, o.base))
    return model
  end
  local prefix = o.prefix or model.published_prefix or ""
  local ranks, alphas, transposed = {}, {}, false
  local rank, alpha = shown_size(record, record.rank, record.alpha)
  for _, layer in ipairs(record.layers) do
    local own_rank, own_alpha = shown_size(record, layer.module._lora.rank, layer.module._lora.alpha)
    if own_rank ~= rank then ranks[prefix .. layer.name] = own_rank end
    if own_alpha ~= alpha then alphas[prefix .. layer.name] = own_alpha end
    transposed = transposed or layer.module.fan_in_fan_out or false
  end
  local config = { target_modules = target_names(model, record, prefix), inference_mode = true,
    rank_pattern = next(ranks) and ranks, alpha_pattern = next(alphas) and alphas, modules_to_save = record.save,
    base_model_name_or_path = o.base or record.base, task_type = record.task_type }
  for key, value in pairs(own_settings(record, rank, alpha, transposed)) do config[key] = value end
  -- Patterns that are false would be written: PEFT wants objects or nothing.
  for _, key in ipairs { "rank_pattern", "alpha_pattern" } do config[key] = config[key] or nil end
  write(folder, config, names.state(record, prefix))
  return model
end

-- Settings of adapter_config.json under which the tensors mean something else than here.
local other_meanings = { "layer_replication", "use_qalora", "lora_bias", "target_parameters", "trainable_token_indices",
  "alora_invocation_tokens", "velora_config", "monteclora_config", "arrow_config", "use_bdlora", "megatron_config" }
local base_changing = { pissa = true, olora = true, corda = true, loftq = true, lora_ga = true }

local function optional(value, default)
  if value == nil or value == ty.io.null then return default end
  return value
end

local function read_config(path)
  local c = ty.io.load_json(path)
  if type(c) ~= "table" or #c > 0 then error("adapter_config.json: expected an object", 0) end
  if prompts.kind_of(c) then return { prompt = c } end
  local way
  for _, one in ipairs { ways.loha, ways.lokr, ways.ia3 } do way = way or c.peft_type == one.type and one or nil end
  if c.peft_type ~= "LORA" and not way then
    error(("peft_type is %s; LORA, LOHA, LOKR, IA3, PROMPT_TUNING and PREFIX_TUNING are read"):format(
      tostring(c.peft_type)), 0)
  end
  for _, key in ipairs(other_meanings) do
    local value = optional(c[key], false)
    if value and not (type(value) == "table" and not next(value)) then error(key .. " is not supported", 0) end
  end
  local start = optional(c.init_lora_weights, true)
  if type(start) == "string" and base_changing[start:lower():match "^lora_ga" or start:lower():match "^%a+"] then
    error(("init_lora_weights '%s' goes with weights that were changed at the start; let PEFT convert it to plain LoRA")
      :format(start), 0)
  end
  local record = { way = way, rank = optional(c.r, 8), alpha = optional(way and c.alpha or c.lora_alpha, 8),
    dropout = optional(c.lora_dropout, 0), factor = optional(c.decompose_factor, -1),
    both = optional(c.decompose_both, false) == true, feedforward = optional(c.feedforward_modules),
    rslora = optional(c.use_rslora, false) == true, dora = optional(c.use_dora, false) == true,
    bias = optional(c.bias, "none"), alpha_pattern = optional(c.alpha_pattern), rank_pattern = optional(c.rank_pattern),
    base = optional(c.base_model_name_or_path), task_type = optional(c.task_type), save = optional(c.modules_to_save) }
  if type(record.save) ~= "table" or #record.save == 0 then record.save = nil end
  local targets = optional(c.target_modules)
  if type(targets) == "table" then record.targets = targets end
  record.whole = record.targets and optional(c.layers_to_transform) == nil and optional(c.exclude_modules) == nil
  adapter.check("adapter_config.json", record)
  return record
end

local function read(path)
  local info = ty.io.stat(path)
  if not info then error("is not there", 0) end
  if info.kind ~= "directory" then return ty.io.load(path), nil end
  if not ty.io.stat(path .. "/adapter_config.json") then error("has no adapter_config.json", 0) end
  local config = read_config(path .. "/adapter_config.json")
  for _, name in ipairs { "adapter_model.safetensors", "adapter_model.bin" } do
    if ty.io.stat(path .. "/" .. name) then return ty.io.load(path .. "/" .. name), config end
  end
  error("has neither adapter_model.safetensors nor adapter_model.bin", 0)
end

-- Sorts the tensors of a file by module: parts[name] = { a =, b =, magnitude =, alpha = }, whole[name] = tensor.
local function sort(model, state, problems)
  local all, modules = surgery.modules(model)
  local known = {}
  for name, p in model:named_parameters() do known[name] = p end
  local resolve = names.resolver(model, all)
  local function is_module(name) return modules[name] ~= nil end
  local function is_parameter(name) return known[name] ~= nil end
  local parts, whole = {}, {}
  for key, tensor in pairs(state) do
    local path, part = names.split(key)
    local name, why = resolve(path, part and is_module or is_parameter)
    local kind = name and part and layers.kind(modules[name])
    if not ty.is_tensor(tensor) then
      problems[#problems + 1] = key .. ": no tensor"
    elseif not name then
      problems[#problems + 1] = ("%s: %s"):format(key, why or "the model has no such module")
    elseif part and not kind then
      problems[#problems + 1] = ("%s: is for a %s; adapters go on Linear, Conv1D, Conv2d and Embedding"):format(key,
        getmetatable(modules[name]).__name)
    else
      local place, index = whole, name
      if part then
        parts[name] = parts[name] or {}
        place, index = parts[name], part
      end
      if place[index] then problems[#problems + 1] = key .. ": is there twice" end
      place[index] = tensor
    end
  end
  for name, tensor in pairs(whole) do
    if names.shape_text(tensor) ~= names.shape_text(known[name]) then
      problems[#problems + 1] = ("%s: the model has %s, the file %s"):format(name, names.shape_text(known[name]),
        names.shape_text(tensor))
    end
  end
  return parts, whole, all, modules
end

-- The way that a file without a config has, by the names of its tensors.
local function way_of(part)
  for _, way in ipairs { ways.loha, ways.lokr, ways.ia3 } do
    for _, name in ipairs(way.names) do if part[name] then return way end end
  end
end

-- What layers.attach needs of a module with tensors of another way than LoRA.
local function specify_way(way, name, module, part, config, o, prefix)
  local inputs, outputs = surgery.sizes(module)
  if not config then return nil, name .. ": is " .. way.name .. ", which takes adapter_config.json besides" end
  if layers.kind(module) ~= "linear" then return nil, ("%s: %s goes on linear layers"):format(name, way.name) end
  local who, full = "adapter_config.json", prefix .. name
  local rank = adapter.by_name(who, "rank_pattern", config.rank_pattern, full) or config.rank
  local alpha = o.alpha or adapter.by_name(who, "alpha_pattern", config.alpha_pattern, full) or config.alpha
  local spec = { rank = rank, alpha = alpha, scale = alpha / rank, dropout = 0, dtype = o.dtype, way = way,
    factor = config.factor, both = config.both }
  for _, wanted in ipairs(type(config.feedforward) == "table" and config.feedforward or {}) do
    spec.of_inputs = spec.of_inputs or surgery.ends_in(full, tostring(wanted))
  end
  local problem = ways.check(part, spec, inputs, outputs)
  if problem then return nil, ("%s: %s"):format(name, problem) end
  return spec
end

-- The adapter of one module checked: what its layers.attach needs.
local function specify(name, module, part, config, o, prefix)
  local way = config and config.way or way_of(part)
  if way then return specify_way(way, name, module, part, config, o, prefix) end
  local inputs, outputs = surgery.sizes(module)
  if not (part.a and part.b) then return nil, ("%s: only one of A and B is there"):format(name) end
  local given_a, given_b = part.a, part.b
  if layers.kind(module) == "conv" and part.a.ndim >= 3 and part.b.ndim >= 2 then
    part.a, part.b = part.a:flatten(1), part.b:flatten(1)
  end
  part.a, part.b = names.flat(part.a), names.flat(part.b)
  local rank = part.a.shape[1] or 0
  if #part.a.shape ~= 2 or #part.b.shape ~= 2 or part.a.shape[2] ~= inputs or part.b.shape[1] ~= outputs
      or part.b.shape[2] ~= rank or rank < 1 then
    return nil, ("%s: A and B: expected [rank, %d] and [%d, rank], got %s and %s"):format(name, inputs, outputs,
      names.shape_text(given_a), names.shape_text(given_b))
  end
  if not (part.a:is_floating_point() and part.b:is_floating_point()) then
    return nil, ("%s: A and B: expected floating point, got %s and %s"):format(name, part.a.dtype, part.b.dtype)
  end
  if part.magnitude then
    if part.magnitude:numel() ~= outputs or layers.kind(module) ~= "linear" then
      return nil, ("%s: the magnitudes: expected [%d], got %s"):format(name, outputs, names.shape_text(part.magnitude))
    end
  elseif config and config.dora then
    return nil, name .. ": use_dora is set, but there are no magnitudes"
  end
  if part.alpha and part.alpha:numel() ~= 1 then return nil, name .. ": alpha is not one number" end
  local alpha = o.alpha or part.alpha and part.alpha:item() or nil
  if config then
    local who, full = "adapter_config.json", prefix .. name
    alpha = alpha or adapter.by_name(who, "alpha_pattern", config.alpha_pattern, full) or config.alpha
    -- Ranks under regular expressions are those of the tensors.
    local read_it, wanted = pcall(adapter.by_name, who, "rank_pattern", config.rank_pattern, full)
    if read_it and (wanted or config.rank) ~= rank then
      return nil, ("%s: the rank is %d, and %s in adapter_config.json"):format(name, rank,
        tostring(wanted or config.rank))
    end
  end
  alpha = alpha or rank
  if type(alpha) ~= "number" then return nil, ("%s: alpha is %s, not a number"):format(name, tostring(alpha)) end
  return { rank = rank, alpha = alpha, scale = adapter.scale(alpha, rank, config and config.rslora),
    dropout = config and config.dropout or 0, dora = part.magnitude ~= nil, dtype = o.dtype }
end

local function fill(tensor, source) tensor:copy_(ty.reshape(source, tensor.shape)) end

-- Whether the module `name` has parameters in `whole`.
local function any_below(whole, name)
  for key in pairs(whole) do
    if key:sub(1, #name + 1) == name .. "." then return true end
  end
  return false
end

-- What a folder or a file has for a model, checked: config, parts and specs by name, whole, order and modules; or
-- config and state alone where it is trained vectors.
local function match(model, path, o)
  adapter.check_dtype("dtype", o.dtype)
  if o.alpha ~= nil and type(o.alpha) ~= "number" then error("alpha must be a number", 0) end
  local state, config = read(path)
  local problems, specs, order = {}, {}, {}
  if not nn.is_module(model) then error("model: expected a module, got " .. type(model), 0) end
  if rawget(model, "_adapter") then error("the model has an adapter already; peft.remove takes it away", 0) end
  if config and config.prompt then return { config = config, state = state } end
  local parts, whole, all, modules = sort(model, state, problems)
  local prefix = model.published_prefix or ""
  for _, name in ipairs(all) do
    if parts[name] then
      local spec, why = specify(name, modules[name], parts[name], config, o, prefix)
      specs[name], order[#order + 1] = spec, name
      problems[#problems + 1] = why
    end
  end
  if config and config.whole then
    local set, problem = surgery.resolve(config.targets, #prefix > 0 and adapter.published(all, prefix) or all)
    if not set then error("adapter_config.json: target_modules: " .. problem, 0) end
    for name in pairs(set) do
      name = name:sub(#prefix + 1)
      if not parts[name] then problems[#problems + 1] = name .. ": is among target_modules, but not in the file" end
    end
  end
  for _, wanted in ipairs(config and config.save or {}) do
    for _, name in ipairs(all) do
      if name ~= "" and surgery.ends_in(prefix .. name, tostring(wanted)) and not any_below(whole, name) then
        problems[#problems + 1] = name .. ": is among modules_to_save, but not in the file"
      end
    end
  end
  if #order == 0 and #problems == 0 then error("holds no adapter", 0) end
  if #problems > 0 then
    table.sort(problems)
    local more = #problems > 20 and ("\n  and %d more"):format(#problems - 20) or ""
    error("the adapter does not fit the model\n  " .. table.concat(problems, "\n  ", 1, math.min(20, #problems))
      .. more, 0)
  end
  return { config = config, parts = parts, specs = specs, whole = whole, order = order, modules = modules }
end

local function load(model, path, o)
  local found = match(model, path, o)
  local config, parts, specs, whole, order = found.config, found.parts, found.specs, found.whole, found.order
  if config and config.prompt then return prompts.load(model, config.prompt, found.state, o) end
  local modules = found.modules
  config = config or { rank = specs[order[1]].rank, alpha = specs[order[1]].alpha, dropout = 0, rslora = false,
    dora = specs[order[1]].dora, bias = "none" }
  local record = adapter.begin("peft.load", model, config)
  base.walk_state(model, function(_, name, _, owner, key)
    if whole[name] then adapter.add_saved(record, name, owner, key) end
  end)
  ty.no_grad(function()
    for _, saved in ipairs(record.saved) do fill(rawget(saved.owner, saved.key), whole[saved.name]) end
    for _, name in ipairs(order) do
      adapter.add_layer(record, name, modules[name], specs[name])
      local part = parts[name]
      for _, pair in ipairs(layers.parameters(modules[name])) do
        fill(pair[2], part[pair[1]] or pair[1]:find "_A" and part.a or pair[1]:find "_B" and part.b or part.magnitude)
      end
    end
  end)
  for _, saved in ipairs(record.saved) do
    -- PEFT may save the weight that an adapter stands on, of embeddings, which is not trained for that.
    saved.frozen = parts[saved.name:match "^(.*)%.weight$" or ""] ~= nil
    if saved.frozen then rawget(saved.owner, saved.key):requires_grad_(false) end
  end
  if not o.train then
    for _, p in ipairs(adapter.parameters(model)) do p:requires_grad_(false) end
  end
  ty.core.program.renew()
end

--- Gives a model the adapter of a folder (adapter_config.json and adapter_model.safetensors or .bin) or of a single
-- file in the names of PEFT, diffusers or kohya's scripts. Every tensor has to find its module and fit it. options:
-- train (false: the adapter is frozen), dtype ("f32", of the adapter), alpha (overrides what the file says; for a file
-- that says nothing the default is the rank). Returns the model.
---@param model Module
---@param path string
---@param options? {train?: boolean, dtype?: string, alpha?: number}
---@return Module model
function M.load(model, path, options)
  local o = nn.options("peft.load", options, { train = false, dtype = "f32", alpha = nn.none })
  local ok, message = pcall(load, model, path, o)
  if not ok then arguments.raise(message, ("peft.load: %s: "):format(tostring(path))) end
  return model
end

local function read_pairs(model, path)
  local found = match(model, path, { dtype = "f32" })
  local way = found.config and (found.config.prompt and "trained vectors" or found.config.way and found.config.way.name)
  if way then error("expected low-rank matrices alone, got " .. way, 0) end
  if next(found.whole) then
    error("expected low-rank matrices alone, got the parameter " .. next(found.whole) .. " besides", 0)
  end
  local list = {}
  for i, name in ipairs(found.order) do
    local spec, part = found.specs[name], found.parts[name]
    if spec.way or spec.dora or layers.kind(found.modules[name]) ~= "linear" then
      error(("%s: expected plain LoRA on linear layers, got %s"):format(name, spec.way and spec.way.name
        or spec.dora and "DoRA" or "a layer of another kind"), 0)
    end
    list[i] = { name = name, a = part.a, b = part.b, scale = spec.scale }
  end
  return list
end

--- What peft.load would give a model, without giving it: for each module { name, a [rank, inputs], b [outputs, rank],
-- scale }, in the model's order. Plain LoRA on linear layers alone.
---@param model Module
---@param path string
---@return {name: string, a: Tensor, b: Tensor, scale: number}[]
function M.read(model, path)
  arguments.expect("peft.read", "model", model, "a module")
  arguments.expect("peft.read", "path", path, "a string")
  local ok, list = pcall(read_pairs, model, path)
  if not ok then arguments.raise(list, ("peft.read: %s: "):format(path)) end
  return list
end

return M
