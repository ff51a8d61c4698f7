--- Reading models as they are published by transformers and diffusers: a folder with config.json and weights in
-- safetensors (whole, or in shards with an index) or PyTorch's zip files. The weights are mapped, not copied: a model
-- is there at once and its pages come as they are used. Nothing of a checkpoint is ever run.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local base = require "tycho.nn.module"

local M = {}

local function family_of(config, path)
  local families = require "tycho.models.families"
  local class, unknown = families.find(config)
  if class then return { class, unknown } end
  local key = config._class_name ~= nil and "_class_name" or "model_type"
  local names = {}
  for name in pairs(key == "model_type" and families.by_model_type or families.by_class_name) do
    names[#names + 1] = name
  end
  table.sort(names)
  error(("%s: %s '%s' is not known; there are %s"):format(path, key, tostring(config[key]),
    table.concat(names, ", ")), 0)
end

-- Python writes infinities into JSON, which has none: those outside of strings become what transformers writes for them
-- now, { "__float__": "Infinity" }.
local function with_infinities(text)
  local parts, from = {}, 1
  while true do
    local quote = text:find('"', from, true)
    parts[#parts + 1] = text:sub(from, (quote or 0) - 1):gsub("%-?Infinity", '{"__float__":"%0"}')
    if not quote then break end
    local last = quote + 1
    repeat
      last = text:find('["\\]', last)
      local escaped = last and text:sub(last, last) == "\\"
      if escaped then last = last + 2 end
    until not escaped
    parts[#parts + 1] = text:sub(quote, last or #text)
    if not last then break end
    from = last + 1
  end
  return table.concat(parts)
end

local function read_json(path)
  local text = ty.io.read(path)
  local value = text:find("Infinity", 1, true) and ty.io.json_decode(with_infinities(text)) or ty.io.load_json(path)
  if type(value) ~= "table" or #value > 0 then error(path .. ": expected an object, got a list or a plain value", 0) end
  return value
end

--- The tensors of all shards that an index names.
local function read_shards(folder, index_path)
  local index = read_json(index_path)
  if type(index.weight_map) ~= "table" then error(index_path .. ": no weight_map", 0) end
  local shards, state = {}, {}
  for name, file in pairs(index.weight_map) do
    if type(file) ~= "string" or file:find "[/\\]" or file:sub(1, 1) == "." then
      error(("%s: '%s' is in %s, which is no file name"):format(index_path, name, tostring(file)), 0)
    end
    if not shards[file] then
      if not ty.io.stat(folder .. "/" .. file) then
        error(("%s: shard %s is not there"):format(index_path, file), 0)
      end
      shards[file] = ty.io.load(folder .. "/" .. file)
    end
    state[name] = shards[file][name]
    if not state[name] then
      error(("%s: '%s' is not in shard %s, where the index says"):format(index_path, name, file), 0)
    end
  end
  return state
end

-- The files of weights that a folder may have, as transformers and diffusers name them; the first one counts.
local weight_files = { "model.safetensors", "model.safetensors.index.json", "diffusion_pytorch_model.safetensors",
  "diffusion_pytorch_model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
  "diffusion_pytorch_model.bin", "diffusion_pytorch_model.bin.index.json", "diffusion_pytorch_model.fp16.safetensors",
  "diffusion_pytorch_model.safetensors.index.fp16.json" }

--- The tensors of a folder or file by name, mapped: of model.safetensors or diffusion_pytorch_model.safetensors, their
-- indices, their like in PyTorch's format (.bin); or of the file that `path` names.
---@param path string
---@return table<string, Tensor> state
function M.weights(path)
  local info = ty.io.stat(path)
  if not info then error(("hub.load: %s is not there"):format(path), 0) end
  if info.kind ~= "directory" then
    if path:find "%.index%.json$" then return read_shards(path:match "^(.*)/[^/]*$" or ".", path) end
    return (ty.io.load(path))
  end
  for _, name in ipairs(weight_files) do
    local file = path .. "/" .. name
    if ty.io.stat(file) then
      if name:find "json$" then return read_shards(path, file) end
      return (ty.io.load(file))
    end
  end
  error(("hub.load: %s has none of model.safetensors, diffusion_pytorch_model.safetensors and their like"):format(path),
    0)
end

-- Names that differ only in their prefix make one line: "model.layers.N.mlp" with a count and the first names.
local function grouped(names)
  local groups, order = {}, {}
  table.sort(names)
  for _, name in ipairs(names) do
    local key = ("." .. name):gsub("%.%d+", ".N"):sub(2):match "^(.*)%.[^.]+$" or ""
    if not groups[key] then
      groups[key] = {}
      order[#order + 1] = key
    end
    table.insert(groups[key], name)
  end
  local lines = {}
  for i, key in ipairs(order) do
    if i > 20 then
      lines[#lines + 1] = ("    and %d more groups"):format(#order - 20)
      break
    end
    local list = groups[key]
    local first = table.concat(list, ", ", 1, math.min(3, #list))
    lines[#lines + 1] = #list == 1 and "    " .. first
      or ("    %s (%d): %s%s"):format(key, #list, first, #list > 3 and ", ..." or "")
  end
  return table.concat(lines, "\n")
end

local function report_text(report)
  local parts = {}
  for _, kind in ipairs { "missing", "unexpected", "misshapen", "not_finite" } do
    local names = report[kind]
    if #names > 0 then
      parts[#parts + 1] = ("  %s (%d):\n%s"):format(kind == "not_finite" and "with NaN or infinity" or kind, #names,
        kind == "misshapen" and "    " .. table.concat(names, "\n    ", 1, math.min(20, #names)) or grouped(names))
    end
  end
  return table.concat(parts, "\n")
end

local function shape_text(t) return "[" .. table.concat(t.shape, ", ") .. "]" end

local function listed(name, patterns)
  for _, pattern in ipairs(patterns or {}) do
    if name:find(pattern) then return true end
  end
  return false
end

-- Our names for those of the file: prefixes of other packagings taken off, single names by the family. What belongs to
-- heads that the model does not have is noted in the report; where the config asks for an unknown class it stays.
local function renamed(model, state, report)
  local ours, known, result, from = {}, model:state_dict(), {}, {}
  for name in pairs(known) do ours[name] = true end
  for name, tensor in pairs(state) do
    local new = name
    for _, prefix in ipairs(model.prefixes) do
      if not ours[new] and new:sub(1, #prefix) == prefix then new = new:sub(#prefix + 1) end
    end
    for _, prefix in ipairs(model.missing_prefixes or {}) do
      local longer = not ours[new] and prefix .. new
      if longer and not ours[longer] then longer = model:rename(longer) end
      if longer and ours[longer] then new = longer end
    end
    if not ours[new] then new = model:rename(new) end
    local other = new and not ours[new]
    if other and not report.unknown and listed(name, model.other_heads) then
      table.insert(report.left_out, name)
    elseif new and not (other and (listed(name, model.ignored) or listed(name, model.ignored_too))) then
      if result[new] then
        local pair = { from[new], name }
        table.sort(pair)
        error(("%s and %s are both %s"):format(pair[1], pair[2], new), 0)
      end
      result[new], from[new] = tensor, name
    end
  end
  return result
end

--- Puts tensors into a model by name. Where dtype and device are those of the file the model then stands on the file's
-- mapped pages. options: strict (true: anything missing, unexpected or misshapen is an error), dtype, device, check
-- (false; true: NaN and infinities are an error, which reads all of the file), unknown (the architecture that the
-- config asks for, where the model is not of it), unexpected (names that count as unexpected besides).
---@return table report  lists missing, unexpected, misshapen, not_finite, left_out (heads of other classes); unknown
function M.assign(model, state, options)
  options = arguments.read("hub.assign", options, { strict = true, dtype = arguments.none, device = arguments.none,
    check = false, unknown = arguments.none, unexpected = arguments.none }, { dtype = "a string", device = "a string",
    unknown = "a string", unexpected = "a list of strings" })
  arguments.expect("hub.assign", "model", model, "a module")
  arguments.expect("hub.assign", "state", state, "a table")
  if not model.prefixes then
    arguments.fail("hub.assign: model: expected a network of tycho.models, got %s", arguments.describe(model))
  end
  local report = { missing = {}, unexpected = {}, misshapen = {}, not_finite = {}, left_out = {},
    unknown = options.unknown }
  state = renamed(model, state, report)
  table.sort(report.left_out)
  local seen, changes, restored = {}, {}, {}
  base.walk_state(model, function(kind, name, tensor, owner, key)
    if kind == "buffer" and not owner._buffers[key] then
      if tensor.device == "meta" then restored[#restored + 1] = { owner = owner, key = key } end
      return
    end
    seen[name] = true
    local source = state[name]
    if not source then
      table.insert(report.missing, name)
    elseif shape_text(source) ~= shape_text(tensor) then
      table.insert(report.misshapen,
        ("%s: the model has %s, the file %s"):format(name, shape_text(tensor), shape_text(source)))
    else
      if options.check and source:is_floating_point() and not source:isfinite():all():item() then
        table.insert(report.not_finite, name)
      end
      changes[#changes + 1] = { owner = owner, key = key, source = source, trained = tensor.requires_grad }
    end
  end)
  for name in pairs(state) do
    if not seen[name] then table.insert(report.unexpected, name) end
  end
  for _, name in ipairs(options.unexpected or {}) do table.insert(report.unexpected, name) end
  table.sort(report.unexpected)
  local bad = #report.not_finite
  if options.strict ~= false then bad = bad + #report.missing + #report.unexpected + #report.misshapen end
  if bad > 0 then
    local why = report.unknown and (": the config's architecture is %s, which is not known; the model is a %s"):format(
      report.unknown, getmetatable(model).__name) or ""
    error(("the weights do not fit the model%s\n%s"):format(why, report_text(report)), 0)
  end
  for _, change in ipairs(changes) do
    local t = change.source
    if options.dtype and t:is_floating_point() then t = t:to(options.dtype) end
    if options.device and options.device ~= "cpu" then t = t:to { device = options.device } end
    if change.trained and t:is_floating_point() then t = t:detach():requires_grad_() end
    rawset(change.owner, change.key, ty.keep(t))
  end
  for _, buffer in ipairs(restored) do -- what a module makes of its options alone
    rawset(buffer.owner, buffer.key, ty.keep(buffer.owner:restore(buffer.key, options.device or "cpu")))
  end
  ty.core.program.renew()
  return report
end

-- What a GGUF file holds: config, state, interleaved (the order of queries and keys), dtype.
local function read_gguf(path)
  local gguf = require "tycho.hub.gguf"
  local tensors, metadata = ty.io.load(path)
  local packed = { config = gguf.config(metadata, tensors), dtype = gguf.dtype(tensors) }
  packed.state, packed.interleaved = gguf.state(tensors, metadata, packed.config)
  return packed
end

-- Errors of reading `what`, named by it.
local function guard(what, fn, ...)
  local ok, result = pcall(fn, ...)
  if not ok then arguments.raise((tostring(result):gsub("^hub.load: ", "")), ("hub.load: %s: "):format(what)) end
  return result
end

--- Raises where a model cannot go to a device, before a byte of it is read. who: the function that asks.
---@param who string
---@param device string
function M.check_device(who, device)
  arguments.expect(who, "device", device, "a string")
  local available, why = ty.device_available(device)
  if not available and device ~= "meta" then arguments.fail("%s: %s", who, why) end
end

--- The tokenizer of a published model: of its folder, or of a GGUF file; nil when there is none.
---@param path string
---@return Tokenizer?
function M.tokenizer(path)
  arguments.expect("hub.tokenizer", "path", path, "a string")
  if path:find "%.gguf$" then
    local _, metadata = ty.io.load(path)
    return require("tycho.hub.gguf").tokenizer(metadata)
  end
  local info = ty.io.stat(path)
  local folder = info and info.kind == "directory" and path or path:match "^(.*)/[^/]*$" or "."
  local there = ty.io.stat(folder .. "/tokenizer.json")
    or ty.io.stat(folder .. "/vocab.json") and ty.io.stat(folder .. "/merges.txt")
  return there and ty.tokenizer.load(folder) or nil
end

--- The network of a config with a state (nil: as the family initialises it), in evaluation mode. where: what errors
-- name the config by; path: what the weights come from. o: dtype, device, strict, check. unexpected: names of tensors
-- that nobody knew what to do with before.
---@param where string
---@param path string
---@param config table
---@param state? table<string, Tensor>
---@param o table
---@param unexpected? string[]
---@return Module
function M.make(where, path, config, state, o, unexpected)
  local class, unknown = table.unpack(guard(where, family_of, config, "config.json"), 1, 2)
  config.model_type = config.model_type or class.model_type
  local model = guard(where, ty.nn.with_defaults, { device = state and "meta" or o.device,
    dtype = not state and o.dtype or nil }, function() return class:from_config(config, state) end)
  if state then
    model.report = guard(path, M.assign, model, state, { strict = o.strict, dtype = o.dtype, device = o.device,
      check = o.check, unknown = unknown, unexpected = unexpected })
  end
  return model:eval()
end

-- The network of a checkpoint in one file, by its component's name; the one that draws where none is asked for.
local function load_single(path, o)
  local single = require "tycho.hub.single"
  local c = o.config
  local given = c and (o.component and { [o.component] = c } or { unet = c, transformer = c, vae = c })
  local read = guard(path, single.read, path, given)
  local name = o.component
  for _, each in ipairs(single.networks) do
    if not name and read.parts[each] then name = each end
  end
  local part = read.parts[name]
  if not part then
    local names = {}
    for each in pairs(read.parts) do names[#names + 1] = each end
    table.sort(names)
    arguments.fail("hub.load: %s: component: expected one of %s, got %s", path, table.concat(names, ", "), name)
  end
  return M.make(path, path, part.config, part.state, o, part.unknown)
end

--- A published model: a folder with config.json, a weights file beside one, a GGUF file, an ONNX file, or a checkpoint
-- of Stable Diffusion or Flux in one file with the names of its authors (safetensors, .ckpt). options: dtype (default:
-- the file's), device, strict (true), check (false: NaN and infinities are not looked for), config (changes of
-- config.json's keys, or of those that were inferred), weights (false: as the family initialises them), component (of a
-- checkpoint in one file: "unet" or "transformer", which is what comes by default, "vae", "text_encoder" ...). The
-- model comes in evaluation mode; model.report says what did not fit where strict is false and which heads of the file
-- the model does not have (left_out), model.config.unknown which keys of the config were not understood.
--
-- An ONNX file, of opset 7 to 25, becomes a module whose parameters are its initializers of floats, under their names;
-- of the options it takes dtype and device. It is called with its inputs in their order, or in one table by name, and
-- gives its outputs; model.inputs and model.outputs are lists of { name, dtype, shape } where a shape has numbers,
-- names or false. In training mode dropout drops and batch normalisation takes the batch's statistics, elsewhere both
-- do what the file says.
---@param path string
---@param options? table
---@return LanguageModel|Module
function M.load(path, options)
  arguments.expect("hub.load", "path", path, "a string")
  local o = ty.nn.options("hub.load", options, { dtype = ty.nn.none, device = "cpu", strict = true, check = false,
    config = ty.nn.none, weights = true, component = ty.nn.none }, { dtype = "a string", config = "a table",
    component = "a string" })
  M.check_device("hub.load", o.device)
  local info = ty.io.stat(path)
  if not info then error(("hub.load: %s is not there"):format(path), 2) end
  if path:find "%.onnx$" then
    return guard(path, require("tycho.hub.onnx").load, path, { dtype = o.dtype, device = o.device })
  end
  local packed = path:find "%.gguf$" and guard(path, read_gguf, path)
  local folder = info.kind == "directory" and path or path:match "^(.*)/[^/]*$" or "."
  local config_path = folder .. "/config.json"
  if packed then config_path = path end
  if not packed and not ty.io.stat(config_path) then
    if info.kind ~= "directory" and not path:find "%.json$" then return load_single(path, o) end
    error(("hub.load: %s has no config.json"):format(folder), 2)
  end
  local config = packed and packed.config or guard(config_path, read_json, config_path)
  for key, value in pairs(o.config or {}) do config[key] = value end
  local state = o.weights and (packed and packed.state or guard(path, M.weights, path)) or nil
  if packed then o.dtype = o.dtype or packed.dtype end
  local model = M.make(config_path, path, config, state, o)
  if packed and state then model.interleaved = packed.interleaved or nil end
  local generation = folder .. "/generation_config.json"
  if not packed and ty.io.stat(generation) then model.generation_config = guard(generation, read_json, generation) end
  return model
end

return M
