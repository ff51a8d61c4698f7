--- Material made by a teacher, once for each base and seed: trajectories, pairs of noise and sample. It lies in a file
-- with what it was made of and what it cost, so that every method that uses it is charged the same, made or read.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local expect, fail = arguments.expect, arguments.fail
local WHO = "distill.store"

--- What a teacher made, kept in a file, with what it cost: see distill.store.
---@class MaterialStore
---@field tensors table<string, Tensor>  by name; the first dimension is that of items
---@field count integer        items
---@field evaluations integer  samples that went through the teacher to make them
---@field seconds number       that making them took
---@field made boolean         whether it was made now; false: read
---@field path string
local Store = {}
Store.__index = Store
Store.__name = "MaterialStore"

-- What is said of the material, in a fixed order: part of the file's name and of the file.
local function words(about)
  local list = {}
  for key, value in pairs(about) do
    local kind = type(value)
    if type(key) ~= "string" or kind ~= "string" and kind ~= "number" and kind ~= "boolean" then
      fail("%s: about: expected strings, numbers and booleans by name, got %s", WHO, arguments.describe(value))
    end
    list[#list + 1] = ("%s=%s"):format(key, tostring(value))
  end
  if #list == 0 then fail("%s: about: expected what the material is made of, got an empty table", WHO) end
  table.sort(list)
  return table.concat(list, ",")
end

local function check(tensors)
  expect(WHO, "make()", tensors, "a table")
  local count
  for name, tensor in pairs(tensors) do
    expect(WHO, ("make().%s"):format(tostring(name)), tensor, "a tensor")
    if tensor.ndim == 0 or count and tensor.shape[1] ~= count then
      fail("%s: make().%s: expected %s items, got %s", WHO, name, count or "a tensor of", arguments.describe(tensor))
    end
    count = tensor.shape[1]
  end
  return count or fail("%s: make(): expected at least one tensor, got none", WHO)
end

--- The material in a folder that is about `about` (base, seed, count, steps ...: strings, numbers, booleans); made by
-- make() where there is none: tensors by name, [items, ...] each, and how many samples went through the teacher.
---@param folder string
---@param about table<string, string|number|boolean>
---@param make fun(): table<string, Tensor>, integer
---@return MaterialStore
local function open(folder, about, make)
  expect(WHO, "folder", folder, "a string")
  expect(WHO, "about", about, "a table")
  expect(WHO, "make", make, "a function")
  local text = words(about)
  local path = ("%s/%s.safetensors"):format(folder, text:gsub("[^%w=,.-]", "_"))
  local self = setmetatable({ path = path, made = not ty.io.exists(path) }, Store)
  if self.made then
    local began = ty.system.clock()
    local tensors, evaluations = make()
    self.count = check(tensors)
    self.evaluations = expect(WHO, "make()'s evaluations", evaluations, "an integer >= 0")
    self.seconds = ty.system.clock() - began
    self.tensors = {}
    for name, tensor in pairs(tensors) do self.tensors[name] = ty.keep(tensor:detach():to { device = "cpu" }) end
    ty.io.mkdir(folder)
    ty.io.save_safetensors(path, self.tensors, { about = text, evaluations = ("%d"):format(evaluations),
      seconds = ("%.17g"):format(self.seconds) })
    return self
  end
  local tensors, metadata = ty.io.load_safetensors(path)
  if metadata.about ~= text then
    fail("%s: %s: expected material about '%s', got '%s'", WHO, path, text, tostring(metadata.about))
  end
  self.tensors, self.count = tensors, check(tensors)
  self.evaluations = math.tointeger(tonumber(metadata.evaluations))
    or fail("%s: %s: expected the number of evaluations in its metadata, got none", WHO, path)
  self.seconds = tonumber(metadata.seconds) or 0.0
  return self
end

--- Batches of the material without an end, in an order drawn from the seed: tables of tensors by name. options: batch
-- (64; all items where there are fewer), seed (0), device ("cpu").
---@param options? { batch?: integer, seed?: integer, device?: string }
---@return DataLoader
function Store:loader(options)
  local o = arguments.read("MaterialStore:loader", options, { batch = 64, seed = 0, device = "cpu" },
    { batch = "an integer >= 1", seed = "an integer" })
  return ty.data.DataLoader(ty.data.TensorDataset(self.tensors), { batch_size = math.min(o.batch, self.count),
    shuffle = true, seed = o.seed, drop_last = true, device = o.device })
end

return open
