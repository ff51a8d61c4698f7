--- The models that ship, as folders: what tycho.zoo finds and reads.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local hub = require "tycho.hub"
local shipped = require "tycho.shipped"
local default_device = require("tycho.nn.options").device

local M = {}

--- Names of the models that ship, sorted.
---@return string[]
function M.names() return shipped.names "zoo" end

local verified = {} -- folders whose files were compared with their checksums, once in a process

local function folder_of(who, name)
  arguments.expect(who, "name", name, "a string")
  local plain = name:find "^[%w_-]+$"
  local folder, roots = nil, nil
  if plain then folder, roots = shipped.find("zoo", name) end
  if not folder then
    local names = M.names()
    if #names == 0 then
      arguments.fail("%s: there are no models that ship in %s; TYCHO_ZOO can name the folder zoo/ of a source tree",
        who, table.concat(roots or {}, ", "))
    end
    arguments.fail("%s: no model '%s' ships; there are %s%s", who, name, table.concat(names, ", "),
      ty.core.nearest(name, {}, names))
  end
  if not verified[folder] then
    shipped.verify(who, folder, { required = true })
    verified[folder] = true
  end
  return folder
end

--- The folder of a model, after its files were compared with their checksums.
---@param name string
---@return string path
function M.path(name) return folder_of("zoo.path", name) end

--- Eight hexadecimal digits that are others when the files of a model are: for the names of what recipes keep that was
-- made with it, so that nothing is read that was made with an earlier one.
---@param name string
---@return string
function M.version(name)
  return ("%08x"):format(ty.io.crc32(folder_of("zoo.version", name) .. "/checksums.json"))
end

--- A trained model, in evaluation mode; of a folder with several (model_index.json) the pipeline, as hub.pipeline has
-- it. options: those of hub.load, or of hub.pipeline; dtype is f32 unless it says otherwise, since files are in half
-- precision, and device that of new modules (nn.with_defaults).
---@param name string
---@param options? table
---@return Module|Pipeline model
function M.load(name, options)
  local folder = folder_of("zoo.load", name)
  local given = { dtype = "f32", device = default_device() }
  arguments.expect("zoo.load", "options", options, "a table or nil")
  for key, value in pairs(options or {}) do given[key] = value end
  if ty.io.exists(folder .. "/model_index.json") then return hub.pipeline(folder, given) end
  return hub.load(folder, given)
end

--- The tokenizer of a model; nil for one that reads no text.
---@param name string
---@return Tokenizer?
function M.tokenizer(name) return hub.tokenizer(folder_of("zoo.tokenizer", name)) end

--- What there is to know of a model: its folder, the text of its page, the bytes that it takes, and its record.
---@param name string
---@return {path: string, page: string, bytes: integer, record?: table}
function M.info(name)
  local folder = folder_of("zoo.info", name)
  return { path = folder, page = ty.io.read(folder .. "/README.md"), bytes = shipped.size(folder),
    record = require("tycho.recipe.records").read(folder .. "/../..", "zoo/" .. name) }
end

return M
