--- What all networks with published files share: the names of their tensors in the files, and being written as a folder
-- that the library they come from reads as well.
local ty = require "tycho"

local nn = ty.nn

--- A module with the config of a published model, kept as it was read.
---@class Published: Module
---@field config table     the keys of config.json, as tycho.models.config read them
local Published = nn.module "Published"

--- Names of a file that hold no weights, as patterns.
Published.ignored = {}

--- Names that belong to the heads of other classes: loading leaves them out and says so in its report, unless the
-- config asks for a class that is not known.
Published.other_heads = {}

--- Prefixes of published names that ours lack.
Published.prefixes = {}

--- The file of a folder that has the weights.
Published.weights_file = "model.safetensors"

--- The model of a config.json that was read. state: the tensors that it will get, where there are some.
---@param config table
---@param state? table<string, Tensor>
function Published.from_config(class, config, state) return class(config) end

--- Renames one published name to ours, or returns nil for a name to skip.
function Published:rename(name) return name end

--- The tensors of the folder, by their names there.
---@return table<string, Tensor>
function Published:published_state() return self:state_dict() end

--- The keys of config.json: those that were read, and what else the file had that they were read from.
---@return table
function Published:published_config()
  local config = {}
  for key, value in pairs(self.config) do
    if key ~= "given" and key ~= "unknown" then config[key] = value end
  end
  for key, value in pairs(self.config.given or {}) do
    if config[key] == nil then config[key] = value end
  end
  return config
end

--- The JSON files of the folder, by name.
---@return table<string, table>
function Published:published_files() return { ["config.json"] = self:published_config() } end

--- Writes the folder: the weights in safetensors, then config.json and what belongs to it. A path that ends in
-- .safetensors gets the weights alone, with `metadata`.
---@param path string
---@param metadata? table<string, string>
function Published:save(path, metadata)
  require("tycho.arguments").expect("Module:save", "path", path, "a string")
  if path:find "%.safetensors$" then return nn.Module.save(self, path, metadata) end
  local files = self:published_files()
  local function write(name)
    ty.io.write_atomic(path .. "/" .. name, ty.io.json_encode(files[name], { indent = 2 }) .. "\n")
  end
  ty.io.mkdir(path)
  ty.io.save_safetensors(path .. "/" .. self.weights_file, self:published_state(), { format = "pt" })
  for name in pairs(files) do
    if name ~= "config.json" then write(name) end
  end
  write "config.json" -- the last: without it the folder is none
  return self
end

return Published
