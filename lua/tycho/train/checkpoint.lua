--- Checkpoints of a whole training run in one folder, written so that a kill at any moment leaves the old or the new
-- one.
--
--   <path>/NAME.safetensors   the weights of each module, with the names of its state_dict()
--   <path>/state.safetensors  all other tensors: moments of optimizers, and so on
--   <path>/state.json         numbers, texts and the generator's state
--   <path>/checksums.json     the CRC-32 of each of these files, which loading compares first
--
-- A new checkpoint is written to <path>.partial; then <path> becomes <path>.previous, .partial becomes <path>, and
-- .previous is removed. Loading takes <path>, or <path>.previous when a kill fell between the two renames.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local folders = require "tycho.folders"
local shipped = require "tycho.shipped"
local expect = arguments.expect

local M = {}
local format_version = 1

-- ---- values to JSON and back: exact, with tensors taken out ----

local function encode_number(value)
  if math.type(value) == "integer" then
    if value > -(1 << 53) and value < (1 << 53) then return value end
    return { ["$integer"] = tostring(value) }
  end
  if value ~= value then return { ["$float"] = "nan" } end
  if value == math.huge or value == -math.huge then return { ["$float"] = value > 0 and "inf" or "-inf" } end
  return { ["$float"] = ("%.17g"):format(value) }
end

local encode

local function encode_table(value, path, tensors)
  local count, whole = 0, true
  for key in pairs(value) do
    count = count + 1
    whole = whole and type(key) == "string" and key:sub(1, 1) ~= "$"
  end
  if whole and count > 0 then
    local result = {}
    for key, v in pairs(value) do result[key] = encode(v, path .. "." .. key, tensors) end
    return result
  end
  local list = {}
  if count == #value then
    for i, v in ipairs(value) do list[i] = encode(v, path .. "." .. (i - 1), tensors) end
    return { ["$list"] = list }
  end
  for key, v in pairs(value) do
    local key_type = type(key)
    if key_type ~= "string" and key_type ~= "number" and key_type ~= "boolean" then
      error(("checkpoint: %s has a %s as a key, which cannot be saved"):format(path, key_type), 0)
    end
    list[#list + 1] = { encode(key, path, tensors), encode(v, path .. "." .. tostring(key), tensors) }
  end
  return { ["$map"] = list }
end

function encode(value, path, tensors)
  local kind = type(value)
  if ty.is_tensor(value) then
    tensors[path] = value.requires_grad and value:detach() or value -- what is away stays away until it is written
    return { ["$tensor"] = path }
  elseif kind == "number" then
    return encode_number(value)
  elseif kind == "string" then
    if utf8.len(value) and not value:find "[%c]" then return value end
    return { ["$bytes"] = (value:gsub(".", function(c) return ("%02x"):format(c:byte()) end)) }
  elseif kind == "boolean" then
    return value
  elseif kind == "table" then
    return encode_table(value, path, tensors)
  end
  error(("checkpoint: %s is a %s, which cannot be saved"):format(path, kind), 0)
end

local function decode(value, tensors)
  if type(value) ~= "table" then return value end
  if value["$tensor"] then
    local t = tensors[value["$tensor"]]
    if not t then error(("checkpoint: state.safetensors lacks '%s'"):format(value["$tensor"]), 0) end
    return t
  elseif value["$integer"] then
    return math.tointeger(tonumber(value["$integer"]))
  elseif value["$float"] then
    local special = { nan = 0 / 0, inf = math.huge, ["-inf"] = -math.huge }
    return special[value["$float"]] or tonumber(value["$float"]) + 0.0
  elseif value["$bytes"] then
    return (value["$bytes"]:gsub("%x%x", function(hex) return string.char(tonumber(hex, 16)) end))
  elseif value["$list"] then
    local list = {}
    for i, v in ipairs(value["$list"]) do list[i] = decode(v, tensors) end
    return list
  elseif value["$map"] then
    local map = {}
    for _, pair in ipairs(value["$map"]) do map[decode(pair[1], tensors)] = decode(pair[2], tensors) end
    return map
  end
  local result = {}
  for key, v in pairs(value) do result[key] = decode(v, tensors) end
  return result
end

-- ---- the folder ----

local is_module = function(value) return require("tycho.nn").is_module(value) end

-- As Module:state_dict(), but the tensors themselves: an op would bring back at once all that is away on a tier.
local function weights_of(module)
  local state = {}
  require("tycho.nn.module").walk_state(module, function(kind, name, tensor, owner, key)
    if kind == "parameter" or owner._buffers[key] then state[name] = tensor end
  end)
  return state
end

--- Saves modules, things with state_dict() (optimizers, schedulers, averages, loaders) and plain values by name, and
-- the state of the default generator.
---@param path string  the folder
---@param parts table<string, any>
function M.save(path, parts)
  expect("train.save_checkpoint", "path", path, "a string")
  expect("train.save_checkpoint", "parts", parts, "a table")
  local partial = folders.begin(path)
  local tensors, values, sums = {}, {}, {}
  local function save_tensors(name, state)
    sums[name] = ty.io.save_safetensors(partial .. "/" .. name, state, nil, { crc32 = true })
  end
  for name, part in pairs(parts) do
    if type(name) ~= "string" or not name:match "^[%w_]+$" or name == "state" then
      arguments.fail("checkpoint: '%s' is no name for a part: letters, digits and _ only, and not 'state'",
        tostring(name))
    end
    if is_module(part) then
      save_tensors(name .. ".safetensors", weights_of(part))
    elseif type(part) == "table" and part.state_dict then
      if rawget(part, "__index") == part then
        arguments.fail("train.save_checkpoint: %s: expected an object, got %s", name, arguments.describe(part))
      end
      values[name] = encode(part:state_dict(), name, tensors)
    else
      values[name] = encode(part, name, tensors)
    end
  end
  local rng = encode(ty.rng_state(), "rng", tensors)
  save_tensors("state.safetensors", tensors)
  ty.io.save_json(partial .. "/state.json", { version = format_version, values = values, rng = rng })
  shipped.write_checksums(partial, { sums = sums })
  folders.replace(path)
end

-- The folder that holds the newest complete checkpoint of `path`, or nil.
local function find(path) return folders.find(path, "state.json") end

--- Whether there is a checkpoint at `path`.
---@param path string
function M.exists(path)
  expect("train.has_checkpoint", "path", path, "a string")
  return find(path) ~= nil
end

--- Removes the checkpoint at `path`, and what saving it may have left beside it; nothing where there is none.
---@param path string
function M.remove(path)
  expect("train.remove_checkpoint", "path", path, "a string")
  if ty.io.exists(path) and not find(path) then
    arguments.fail("train.remove_checkpoint: path: expected a checkpoint, got %s", arguments.describe(path))
  end
  for _, ending in ipairs { "", ".previous", ".partial" } do folders.remove(path .. ending) end
end

--- Loads into the given modules and objects (load_state_dict()), sets the default generator, and returns the plain
-- values by name. A part that the checkpoint lacks is an error, and so is a file that is not as it was written.
---@param path string
---@param parts table<string, any>
---@param options? {rng: boolean}  rng = false leaves the generator alone
---@return table<string, any> values
function M.load(path, parts, options)
  expect("train.load_checkpoint", "path", path, "a string")
  expect("train.load_checkpoint", "parts", parts, "a table or nil")
  local o = arguments.read("train.load_checkpoint", options, { rng = true })
  local folder = find(path)
  if not folder then arguments.fail("checkpoint: there is none at %s", path) end
  shipped.verify("checkpoint", folder)
  local state = ty.io.load_json(folder .. "/state.json", { values = math.maxinteger }) -- our own, and as it was written
  if state.version ~= format_version then
    arguments.fail("checkpoint: %s has format %s, this program reads %d", path, tostring(state.version), format_version)
  end
  local tensors = ty.io.load_safetensors(folder .. "/state.safetensors")
  local values = {}
  for name, value in pairs(state.values) do values[name] = decode(value, tensors) end
  for name, part in pairs(parts or {}) do
    if is_module(part) then
      part:load(("%s/%s.safetensors"):format(folder, name))
    elseif type(part) == "table" and part.load_state_dict then
      if values[name] == nil then arguments.fail("checkpoint: %s has no '%s'", path, name) end
      part:load_state_dict(values[name])
      values[name] = nil
    end
  end
  if o.rng then ty.rng_state(decode(state.rng, tensors)) end
  return values
end

--- What --resume means: loads the checkpoint as load() does and returns its values. Where there is none, a resume that
-- was asked for is an error, since starting over would pass for going on; with "auto", for jobs that are started again
-- until they are done, a line on standard error says that the run begins anew. nil then, and for false.
---@param path string
---@param parts table<string, any>
---@param resume boolean|"auto"
---@return table<string, any>? values
function M.resume(path, parts, resume)
  expect("train.resume_checkpoint", "path", path, "a string")
  expect("train.resume_checkpoint", "resume", resume, 'a boolean or "auto" or nil')
  if not resume then return nil end
  if not find(path) then
    if resume == true then
      arguments.refuse("nothing to resume: there is no checkpoint at %s; without resume the run starts anew", path)
    end
    io.stderr:write(("nothing to resume: there is no checkpoint at %s; the run starts anew\n"):format(path))
    return nil
  end
  return M.load(path, parts)
end

return M
