--- LoRA files for pipelines of diffusion: for the network that draws and for its text encoders, in the names of
-- diffusers, PEFT and kohya's scripts, several at once, each as strong as wanted, switched off, put into the weights
-- and taken out again.
--
--     local lora = require "tycho.diffusion".lora
--     lora.load(pipeline, "style.safetensors", { name = "style", strength = 0.8 })
--     lora.load(pipeline, "detail.safetensors", { name = "detail" })
--     lora.set(pipeline, { style = 0.5, detail = 1 })
--     lora.fuse(pipeline)              -- as fast as without; lora.unfuse gives the very weights back
--
-- The adapters are those of tycho.peft: what several files say of a layer becomes one adapter of the sum of their
-- ranks. Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models".
local ty = require "tycho"
local arguments = require "tycho.arguments"
local lora_names = require "tycho.diffusion.lora_names"
local adapter = require "tycho.peft.adapter"
local layers = require "tycho.peft.layers"
local merging = require "tycho.peft.merging"
local peft_names = require "tycho.peft.names"

local expect, fail = arguments.expect, arguments.fail
local surgery = ty.nn.surgery
local M = {}

-- By components: the list of what was loaded, each { name, strength, parts }, and whether it is fused.
local states = setmetatable({}, { __mode = "k" })

local function components_of(who, pipeline)
  expect(who, "pipeline", pipeline, "a table")
  local components = pipeline.components or type(pipeline.pipeline) == "table" and pipeline.pipeline.components
  if type(components) ~= "table" or not (components.unet or components.transformer) then
    fail("%s: pipeline: expected a pipeline or a painter with a unet or a transformer, got %s", who,
      arguments.describe(pipeline))
  end
  return components
end

local function state_of(components)
  states[components] = states[components] or { list = {}, fused = false }
  return states[components]
end

local function model_of(components, component)
  if component == "network" then return components.unet or components.transformer end
  local model = components[component]
  return arguments.is_module(model) and model or nil
end

-- ---- files ----

-- What is no LoRA of two factors, by a piece of its names.
local others = { { "hada_", "LoHa" }, { "lokr_", "LoKr" }, { "oft_", "OFT" }, { "dora_scale", "DoRA" },
  { "lora_magnitude_vector", "DoRA" }, { "lora_mid", "LoCon with a middle factor" }, { "%.diff$", "whole differences" },
  { "%.diff_b$", "whole differences" }, { "%.ia3_", "IA3" } }

local function refuse_others(state)
  local found = {}
  for key in pairs(state) do
    for _, other in ipairs(others) do
      if key:find(other[1]) then
        found[other[2]] = found[other[2]] or {}
        table.insert(found[other[2]], key)
        break
      end
    end
  end
  for kind, keys in pairs(found) do
    table.sort(keys)
    error(("expected LoRA, with two factors for each layer, got %s: %d tensors such as %s"):format(kind, #keys,
      keys[1]), 0)
  end
end

-- Older files of diffusers have the factors in the processors of attention; PEFT may name the adapter.
local function modern(key)
  key = key:gsub("%.processor%.to_out_lora%.", ".to_out.0.lora."):gsub("%.processor%.(to_%a)_lora%.", ".%1.lora.")
  return (key:gsub("%.lora_([AB])%.default%.weight$", ".lora_%1.weight"))
end

-- The settings of a folder's adapter_config.json, or of a file's metadata, by component: r, lora_alpha, patterns.
local function settings_of(config, metadata)
  if config then return { network = config, text_encoder = config } end
  local text = type(metadata) == "table" and metadata.lora_adapter_metadata
  local ok, flat = pcall(ty.io.json_decode, text or "{}")
  local result = {}
  for key, value in pairs(ok and type(flat) == "table" and flat or {}) do
    local component, name = tostring(key):match "^([%w_]+)%.(.*)$"
    component = (component == "unet" or component == "transformer") and "network" or component
    if component then
      result[component] = result[component] or {}
      result[component][name] = value
    end
  end
  return result
end

local function read(path)
  local info = ty.io.stat(path)
  if not info then error("is not there", 0) end
  local config
  if info.kind == "directory" then
    local folder = path
    local found
    for _, name in ipairs { "adapter_model.safetensors", "pytorch_lora_weights.safetensors", "adapter_model.bin" } do
      found = found or ty.io.stat(folder .. "/" .. name) and folder .. "/" .. name
    end
    path = found or error("has none of adapter_model.safetensors, pytorch_lora_weights.safetensors, adapter_model.bin",
      0)
    if ty.io.stat(folder .. "/adapter_config.json") then
      config = ty.io.load_json(folder .. "/adapter_config.json")
      if type(config) ~= "table" or config.peft_type ~= "LORA" then
        error(("peft_type: expected LORA, got %s"):format(tostring(type(config) == "table" and config.peft_type)), 0)
      end
    end
  end
  local state, metadata = ty.io.load(path)
  if type(state) ~= "table" then error("expected tensors by name, got " .. arguments.describe(state), 0) end
  return state, settings_of(config, metadata)
end

-- alpha / rank where the file has no alpha beside the factors.
local function default_scale(settings, name, rank)
  if not settings or settings.lora_alpha == nil then return 1 end
  local alpha = adapter.by_name("lora.load", "alpha_pattern", settings.alpha_pattern ~= ty.io.null
    and settings.alpha_pattern or nil, name) or settings.lora_alpha
  if type(alpha) ~= "number" then error(("lora_alpha: expected a number, got %s"):format(tostring(alpha)), 0) end
  return adapter.scale(alpha, rank, settings.use_rslora == true)
end

-- The rows of B for the i-th of several layers that one stands for.
local function rows_of(b, place, modules, i)
  if place.swap then
    local half = b.shape[1] // 2
    return ty.concat({ b:narrow(0, half, half), b:narrow(0, 0, half) }, 0)
  end
  if #place.names == 1 then return b end
  local begin, size = 0, nil
  for k = 1, i do
    begin = begin + (size or 0)
    size = select(2, surgery.sizes(modules[place.names[k]]))
  end
  if begin + size > b.shape[1] then return nil end
  return b:narrow(0, begin, size)
end

-- A factor as a matrix: of convolutions, A has a kernel.
local function matrix(t) return t.ndim > 2 and t:flatten(1) or t end

-- Sorts a file's tensors: parts[component][layer] = { a, b, scale }; and the list of what does not fit.
local function sort(components, state, settings)
  local entries, problems, finders, parts, total = {}, {}, {}, {}, 0
  local order = {}
  for key, tensor in pairs(state) do
    if ty.is_tensor(tensor) then
      local path, part = peft_names.split(modern(key))
      total = total + 1
      if not part then
        problems[#problems + 1] = key
      else
        if not entries[path] then
          entries[path] = { keys = {} }
          order[#order + 1] = path
        end
        entries[path][part] = tensor
        table.insert(entries[path].keys, key)
      end
    end
  end
  table.sort(order)
  for _, path in ipairs(order) do
    local entry = entries[path]
    local component, rest = lora_names.component(path)
    local model = model_of(components, component)
    local place, modules
    if model then
      finders[component] = finders[component] or { lora_names.finder(model) }
      place, modules = finders[component][1](rest), finders[component][2]
    end
    local fits = place and entry.a and entry.b
    local a, b = fits and matrix(entry.a), fits and matrix(entry.b)
    local rank = fits and a.shape[1]
    fits = fits and a.ndim == 2 and b.ndim == 2 and b.shape[2] == rank and rank > 0
    local found = {}
    for i, name in ipairs(fits and place.names or {}) do
      local module = modules[name]
      local kind = layers.kind(module)
      local own = (kind == "linear" or kind == "conv") and rows_of(b, place, modules, i)
      local inputs, outputs
      if own then inputs, outputs = surgery.sizes(module) end
      fits = fits and own and a.shape[2] == inputs and own.shape[1] == outputs
      found[i] = { name = name, a = a, b = own }
    end
    if not fits then
      table.move(entry.keys, 1, #entry.keys, #problems + 1, problems)
    else
      local scale = entry.alpha and entry.alpha:item() / rank or default_scale(settings[component], rest, rank)
      parts[component] = parts[component] or {}
      for _, each in ipairs(found) do
        parts[component][each.name] = { a = each.a:to "f32", b = each.b:to "f32", scale = scale }
      end
    end
  end
  return parts, problems, total
end

-- ---- adapters ----

local function strength_of(entry, component, name)
  local strength = entry.strength
  if type(strength) ~= "table" then return strength end
  return strength[name] or strength[component] or 1
end

-- Gives a model one adapter that says what all files say of it together; none where there is nothing to say.
local function attach(model, component, state, name)
  if rawget(model, "_adapter") then adapter.remove(model) end
  local by_layer, any = {}, false
  for _, entry in ipairs(state.list) do
    local strength = strength_of(entry, component, name)
    for layer, part in pairs(strength ~= 0 and entry.parts[component] or {}) do
      by_layer[layer] = by_layer[layer] or { a = {}, b = {} }
      table.insert(by_layer[layer].a, part.a)
      table.insert(by_layer[layer].b, part.b * (part.scale * strength))
      any = true
    end
  end
  if not any then return end
  local all, modules = surgery.modules(model)
  local record = adapter.begin("diffusion.lora", model, { rank = 1, alpha = 1, dropout = 0, rslora = false,
    dora = false, bias = "none" })
  ty.no_grad(function()
    for _, layer in ipairs(all) do
      local parts = by_layer[layer]
      if parts then
        local module = modules[layer]
        local a, b = ty.concat(parts.a, 0), ty.concat(parts.b, 1)
        local rank = a.shape[1]
        adapter.add_layer(record, layer, module, { rank = rank, alpha = rank, scale = 1, dropout = 0, dora = false,
          dtype = "f32" })
        module.lora_A.weight:copy_(a:reshape(module.lora_A.weight.shape):to { device = module.weight.device })
        module.lora_B.weight:copy_(b:reshape(module.lora_B.weight.shape):to { device = module.weight.device })
      end
    end
  end)
  for _, p in ipairs(adapter.parameters(model)) do p:requires_grad_(false) end
  ty.core.program.renew()
end

-- The components that any file changes, each with its model and its name in the pipeline.
local function changed(components, state)
  local names, result = {}, {}
  for _, entry in ipairs(state.list) do
    for component in pairs(entry.parts) do names[component] = true end
  end
  for component in pairs(names) do
    local own = component == "network" and (components.unet and "unet" or "transformer") or component
    result[#result + 1] = { component = component, model = model_of(components, component), name = own }
  end
  table.sort(result, function(x, y) return x.component < y.component end)
  return result
end

local function attach_all(components, state, besides)
  for _, c in ipairs(changed(components, besides and { list = { besides, table.unpack(state.list) } } or state)) do
    attach(c.model, c.component, state, c.name)
  end
end

local function check_strength(who, what, strength)
  if type(strength) ~= "table" then return expect(who, what, strength, "a finite number or a table") end
  for name, value in pairs(strength) do
    expect(who, ("%s.%s"):format(what, tostring(name)), value, "a finite number")
  end
  return strength
end

local function not_fused(who, state)
  if state.fused then fail("%s: pipeline: expected one whose LoRAs are not fused, got a fused one", who) end
end

--- Gives a pipeline (or a painter) what a LoRA file says: a .safetensors or PyTorch file in the names of diffusers,
-- PEFT or kohya's scripts, or a folder of PEFT or diffusers. Every tensor has to find its layer and fit it, or nothing
-- is changed. options: name (the file's name without its ending), strength (1; or a table by component: unet,
-- transformer, text_encoder, text_encoder_2). Returns a report: name, layers (by component, how many).
---@param pipeline Pipeline|TextToImage
---@param path string
---@param options? { name?: string, strength?: number|table<string, number> }
---@return { name: string, layers: table<string, integer> }
function M.load(pipeline, path, options)
  local who = "lora.load"
  local components = components_of(who, pipeline)
  expect(who, "path", path, "a string")
  local o = arguments.read(who, options, { name = arguments.none, strength = 1 }, { name = "a string",
    strength = "a finite number or a table" })
  check_strength(who, "strength", o.strength)
  local state = state_of(components)
  not_fused(who, state)
  local name = o.name or path:match "([^/]*)/*$":gsub("%.%w+$", "")
  for _, entry in ipairs(state.list) do
    if entry.name == name then fail("%s: name: expected one that is not loaded, got '%s'", who, name) end
  end
  for _, component in ipairs { "network", "text_encoder", "text_encoder_2", "text_encoder_3" } do
    local model = model_of(components, component)
    if #state.list == 0 and model and rawget(model, "_adapter") then
      fail("%s: pipeline: expected networks without an adapter, got one of tycho.peft on the %s", who, component)
    end
  end
  local ok, parts, problems, total = pcall(function()
    local tensors, settings = read(path)
    refuse_others(tensors)
    local result, bad, count = sort(components, tensors, settings)
    if count == 0 then error("holds no tensors", 0) end
    return result, bad, count
  end)
  if not ok then arguments.raise(parts, ("%s: %s: "):format(who, path)) end
  if #problems > 0 then
    table.sort(problems)
    fail("%s: %s: expected a LoRA for this pipeline, got one of which %d of %d tensors find no layer that they fit: "
      .. "%s%s", who, path, #problems, total, table.concat(problems, ", ", 1, math.min(5, #problems)),
      #problems > 5 and ", ..." or "")
  end
  state.list[#state.list + 1] = { name = name, strength = o.strength, parts = ty.keep(parts) }
  attach_all(components, state)
  local report = { name = name, layers = {} }
  for component, list in pairs(parts) do
    local count = 0
    for _ in pairs(list) do count = count + 1 end
    report.layers[component == "network" and (components.unet and "unet" or "transformer") or component] = count
  end
  return report
end

--- Sets how strong each file is, by name; those that are not named are switched off.
---@param pipeline Pipeline|TextToImage
---@param strengths table<string, number|table>
function M.set(pipeline, strengths)
  local who = "lora.set"
  local components = components_of(who, pipeline)
  expect(who, "strengths", strengths, "a table")
  local state = state_of(components)
  not_fused(who, state)
  local known = {}
  for _, entry in ipairs(state.list) do known[entry.name] = entry end
  for name, strength in pairs(strengths) do
    if not known[name] then fail("%s: strengths: expected names that were loaded, got '%s'", who, tostring(name)) end
    check_strength(who, "strengths." .. name, strength)
  end
  for _, entry in ipairs(state.list) do entry.strength = strengths[entry.name] or 0 end
  attach_all(components, state)
end

--- How strong each file is, by name.
---@param pipeline Pipeline|TextToImage
---@return table<string, number|table>
function M.strengths(pipeline)
  local result = {}
  for _, entry in ipairs(state_of(components_of("lora.strengths", pipeline)).list) do
    result[entry.name] = entry.strength
  end
  return result
end

--- Takes a file out again; all of them without a name.
---@param pipeline Pipeline|TextToImage
---@param name? string
function M.remove(pipeline, name)
  local who = "lora.remove"
  local components = components_of(who, pipeline)
  expect(who, "name", name, "a string or nil")
  local state = state_of(components)
  not_fused(who, state)
  local kept, found = {}, name == nil
  local all = { parts = {} }
  for _, entry in ipairs(state.list) do
    for component in pairs(entry.parts) do all.parts[component] = {} end
    if name and entry.name ~= name then kept[#kept + 1] = entry else found = true end
  end
  if not found then fail("%s: name: expected one that was loaded, got '%s'", who, name) end
  state.list = kept
  attach_all(components, state, all)
end

-- The models with an adapter of ours.
local function adapted(components, state)
  local list = {}
  for _, c in ipairs(changed(components, state)) do
    if rawget(c.model, "_adapter") then list[#list + 1] = c.model end
  end
  return list
end

--- Puts all files, as strong as they are, into the weights: sums are taken in f64 and rounded once.
---@param pipeline Pipeline|TextToImage
function M.fuse(pipeline)
  local components = components_of("lora.fuse", pipeline)
  local state = state_of(components)
  not_fused("lora.fuse", state)
  for _, model in ipairs(adapted(components, state)) do merging.merge(model) end
  state.fused = true
end

--- Takes them out of the weights, which become exactly what they were.
---@param pipeline Pipeline|TextToImage
function M.unfuse(pipeline)
  local components = components_of("lora.unfuse", pipeline)
  local state = state_of(components)
  if not state.fused then fail "lora.unfuse: pipeline: expected one whose LoRAs are fused, got one without" end
  for _, model in ipairs(adapted(components, state)) do merging.unmerge(model) end
  state.fused = false
end

--- Calls fn(...) with the pipeline as it was before any file, fused or not; returns what fn returns.
---@param pipeline Pipeline|TextToImage
---@param fn function
function M.without(pipeline, fn, ...)
  local components = components_of("lora.without", pipeline)
  expect("lora.without", "fn", fn, "a function")
  local call = fn
  for _, model in ipairs(adapted(components, state_of(components))) do
    local inner = call
    call = function(...) return adapter.disable(model, inner, ...) end
  end
  return call(...)
end

return M
