--- Pipelines as diffusers publishes them: a folder with model_index.json, which names the components, and a folder for
-- each of them.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local loader = require "tycho.hub.load"

local M = {}

---@class Pipeline
---@field class string                   of diffusers, such as StableDiffusionPipeline
---@field components table<string, any>  networks, tokenizers, and of the scheduler its config (with _class_name)
---@field classes table<string, string>  the components' classes in the index
---@field options table<string, any>     what else the index says
---@field left_out table<string, string> the components that were not read, and why

local function fail(text, ...) error("hub.pipeline: " .. text:format(...), 0) end

-- Numbers that Python writes and JSON does not have, as the largest ones.
local infinite = { ["Infinity"] = "1.7976931348623157e308", ["-Infinity"] = "-1.7976931348623157e308", NaN = "null" }

local function read_object(path)
  local file = io.open(path, "rb") or fail("%s: cannot be read", path)
  local text = file:read "a"
  file:close()
  text = (text or ""):gsub('("%s*:%s*)(%-?[IN]%a+)(%s*[,}])', function(before, word, after)
    return infinite[word] and before .. infinite[word] .. after
  end)
  local ok, value = pcall(ty.io.json_decode, text)
  if not ok then fail("%s: %s", path, (tostring(value):gsub("^json_decode: ", ""))) end
  if type(value) ~= "table" or #value > 0 then fail("%s: expected an object, got a list or a plain value", path) end
  return value
end

-- The components of an index, name -> class, and its other entries.
local function read_index(path)
  local file = path .. "/model_index.json"
  if not ty.io.stat(file) then fail("%s has no model_index.json", path) end
  local index, classes, options = read_object(file), {}, {}
  for name, value in pairs(index) do
    if type(value) == "table" then
      if name:find "[/\\]" or name:sub(1, 1) == "." or #value ~= 2 then
        fail("%s: '%s': expected the library and the class of a component, got something else", file, name)
      end
      -- Two nulls: the pipeline may have it and has none.
      if value[2] ~= ty.io.null then classes[name] = tostring(value[2]) end
    elseif name:sub(1, 1) ~= "_" then
      options[name] = value
    end
  end
  return classes, options, type(index._class_name) == "string" and index._class_name or "DiffusionPipeline"
end

-- What a folder holds, by its files; nil and why where that is not read.
local function read_component(folder, class, options)
  if ty.io.exists(folder .. "/scheduler_config.json") then
    local config = read_object(folder .. "/scheduler_config.json")
    config._class_name = config._class_name or class
    return config
  end
  if ty.io.exists(folder .. "/config.json") then
    local config = read_object(folder .. "/config.json")
    if not require("tycho.models.families").find(config) then
      return nil, ("a %s, which is no network of tycho.models"):format(class)
    end
    return loader.load(folder, options)
  end
  local tokenizer = loader.tokenizer(folder)
  if tokenizer then return tokenizer end
  return nil, ("a %s, which is not read"):format(class)
end

-- The pipeline of a checkpoint in one file. What it does not hold comes from the folder `rest`.
local function load_single(path, o, wanted)
  local single = require "tycho.hub.single"
  local ok, read = pcall(single.read, path, o.config)
  if not ok then fail("%s: %s", path, read) end
  local rest = o.rest and M.load(o.rest, { device = o.device, dtype = o.dtype, strict = o.strict, check = o.check,
    weights = o.weights })
  local pipeline = { class = rest and rest.class or single.classes[read.family], classes = {}, components = {},
    options = rest and rest.options or {}, left_out = {} }
  for name, value in pairs(rest and rest.components or {}) do
    pipeline.components[name], pipeline.classes[name] = value, rest.classes[name]
  end
  for name, part in pairs(read.parts) do
    if wanted and not wanted[name] then
      pipeline.left_out[name] = "not asked for"
    else
      pipeline.components[name] = loader.make(path .. ": " .. name, path .. ": " .. name, part.config, part.state, o,
        part.unknown)
      pipeline.classes[name] = pipeline.components[name].architecture
    end
  end
  if o.strict ~= false and #read.unknown > 0 then
    fail("%s: expected tensors of the networks, got %d others: %s", path, #read.unknown,
      table.concat(read.unknown, ", ", 1, math.min(5, #read.unknown)))
  end
  if not pipeline.components.scheduler then
    pipeline.components.scheduler = single.scheduler(read)
    pipeline.classes.scheduler = pipeline.components.scheduler._class_name
  end
  return pipeline
end

--- A pipeline of diffusers as a table of its components: networks in evaluation mode, tokenizers, the scheduler's
-- config. What is not read (pictures' preprocessing, networks that tycho.models does not have) is in left_out, with the
-- reason. options: components (the names wanted; all), and for the networks dtype, device, strict, check, weights as
-- hub.load() has them. path may be a checkpoint in one file as well, with the names of its authors: options are then
-- also rest (a pipeline's folder, for tokenizers and whatever else the file does not hold) and config (by component,
-- keys that are not to be inferred).
---@param path string
---@param options? table
---@return Pipeline
function M.load(path, options)
  arguments.expect("hub.pipeline", "path", path, "a string")
  local o = arguments.read("hub.pipeline", options, { components = arguments.none, dtype = arguments.none,
    device = "cpu", strict = true, check = false, weights = true, rest = arguments.none, config = arguments.none },
    { components = "a list of strings", dtype = "a string", rest = "a string", config = "a table" })
  loader.check_device("hub.pipeline", o.device)
  local info = ty.io.stat(path)
  local alone = info and info.kind ~= "directory"
  if not info then arguments.fail("hub.pipeline: path: expected a folder or a checkpoint, got %s", path) end
  for _, key in ipairs { "rest", "config" } do
    if o[key] and not alone then
      arguments.fail("hub.pipeline: %s: expected nil for a folder, got %s", key, arguments.describe(o[key]))
    end
  end
  local wanted
  for _, name in ipairs(o.components or {}) do
    wanted = wanted or {}
    wanted[name] = true
  end
  o.components = nil
  return ty.nn.for_caller(function()
    if alone then return load_single(path, o, wanted) end
    o.rest, o.config = nil, nil
    local classes, rest, class = read_index(path)
    local pipeline = { class = class, classes = classes, components = {}, options = rest, left_out = {} }
    for name in pairs(wanted or {}) do
      if not classes[name] then fail("components: expected names of %s/model_index.json, got '%s'", path, name) end
    end
    local names = {}
    for name in pairs(classes) do names[#names + 1] = name end
    table.sort(names)
    for _, name in ipairs(names) do
      local folder = path .. "/" .. name
      if wanted and not wanted[name] then
        pipeline.left_out[name] = "not asked for"
      elseif not ty.io.stat(folder) then
        fail("%s is not there: a %s of model_index.json", folder, classes[name])
      else
        pipeline.components[name], pipeline.left_out[name] = read_component(folder, classes[name], o)
      end
    end
    return pipeline
  end)
end

-- The library and the class of a component for the index, and a function that writes its folder. class: of a tokenizer.
local function describe(name, component, class)
  if arguments.is_module(component) and component.published_files then
    local config = component:published_config()
    local own = config._class_name or type(config.architectures) == "table" and config.architectures[1]
    return config._class_name and "diffusers" or "transformers", own, function(folder) component:save(folder) end
  elseif type(component) == "table" and component._class_name then
    return "diffusers", component._class_name, function(folder)
      ty.io.mkdir(folder)
      ty.io.save_json(folder .. "/scheduler_config.json", component)
    end
  elseif type(component) == "userdata" and pcall(function() return component.encode and component.save end) then
    return "transformers", class or "PreTrainedTokenizerFast", function(folder)
      ty.io.mkdir(folder)
      component:save(folder)
    end
  end
  return arguments.fail("hub.save_pipeline: pipeline.components.%s: expected a network, a tokenizer or the config of a "
    .. "scheduler with its _class_name, got %s", name, arguments.describe(component))
end

--- Writes a pipeline as diffusers reads it: model_index.json and the folders of its components. pipeline: { class,
-- components } and perhaps options and classes (of tokenizers), as hub.pipeline() gives them.
---@param path string
---@param pipeline Pipeline
function M.save(path, pipeline)
  local who = "hub.save_pipeline"
  arguments.expect(who, "path", path, "a string")
  arguments.expect(who, "pipeline", pipeline, "a table")
  arguments.expect(who, "pipeline.class", pipeline.class, "a string")
  arguments.expect(who, "pipeline.components", pipeline.components, "a table")
  for _, key in ipairs { "options", "classes" } do
    arguments.expect(who, "pipeline." .. key, pipeline[key], "a table or nil")
  end
  local index, writers = { _class_name = pipeline.class }, {}
  for name, value in pairs(pipeline.options or {}) do index[name] = value end
  for name, component in pairs(pipeline.components) do
    if type(name) ~= "string" or not name:find "^[%w_]+$" then
      arguments.fail("%s: pipeline.components: expected names of folders, got %s", who, arguments.describe(name))
    end
    local library, class, write = describe(name, component, pipeline.classes and pipeline.classes[name])
    index[name], writers[name] = { library, class }, write
  end
  ty.io.mkdir(path)
  for name, write in pairs(writers) do write(path .. "/" .. name) end
  ty.io.save_json(path .. "/model_index.json", index)
end

return M
