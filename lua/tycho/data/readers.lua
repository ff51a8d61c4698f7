--- Datasets from files: tables of numbers, NumPy arrays, folders of images.
local ty = require "tycho"
local datasets = require "tycho.data.dataset"
local read = require("tycho.nn.options").read

local M = {}

--- A CSV file of numbers (plain or .gz) as a TensorDataset: the column `label` (a position from 0 or a header name)
-- goes to the field `label`, the others to `x`. options: header (true), label, dtype ("f32").
function M.csv(path, options)
  local o = read("data.csv", options, { header = true, label = require("tycho.nn.options").none, dtype = "f32" })
  local x, names = ty.io.load_csv(path, { header = o.header, dtype = o.dtype })
  if o.label == nil then return datasets.TensorDataset { x = x }, names end
  local label = o.label
  if type(label) == "string" then
    local at
    for i, name in ipairs(names or {}) do if name == label then at = i - 1 end end
    if not at then error(("data.csv: %s has no column '%s'"):format(path, label), 2) end
    label = at
  end
  local columns = x.shape[2]
  local rest = {}
  for i = 0, columns - 1 do if i ~= label then rest[#rest + 1] = i end end
  return datasets.TensorDataset {
    x = x:index_select(1, ty.tensor(rest, { dtype = "i64" })),
    label = x:select(1, label):to "i64",
  }, names
end

--- The arrays of an .npz file by name, each with the same first size.
function M.npz(path) return datasets.TensorDataset(ty.io.load_npz(path)) end

--- An .npy file: one field `x`.
function M.npy(path) return datasets.TensorDataset { x = ty.io.load_npy(path) } end

local image_names = { png = true, jpg = true, jpeg = true }

--- A folder with one folder of images per class: items { image = u8 [c, h, w], label = position of the class in sorted
-- order, path = file }. options: transform(image) on each image. Returns the dataset and the list of class names.
function M.image_folder(root, options)
  local o = read("data.image_folder", options, { transform = require("tycho.nn.options").none })
  local files, labels, classes = {}, {}, {}
  for _, class in ipairs(ty.io.listdir(root)) do
    local folder = root .. "/" .. class
    local info = ty.io.stat(folder)
    if info and info.kind == "directory" then
      classes[#classes + 1] = class
      for _, name in ipairs(ty.io.listdir(folder)) do
        if image_names[(name:match "%.([^.]+)$" or ""):lower()] then
          files[#files + 1], labels[#labels + 1] = folder .. "/" .. name, #classes - 1
        end
      end
    end
  end
  if #files == 0 then error(("data.image_folder: %s has no folders with PNG or JPEG images"):format(root), 2) end
  local transform = o.transform
  return datasets.from_function(#files, function(i)
    local image = require("tycho").io.load_image(files[i + 1])
    return { image = transform and transform(image) or image, label = labels[i + 1], path = files[i + 1] }
  end), classes
end

-- A file of the data that ships with the project. Seen from this file the folder datasets/ is at the root of the source
-- tree, in PREFIX/share/tycho of an installed one, or in the library's folder of a LuaRocks tree; TYCHO_DATA overrides.
local function shipped(name)
  local here = debug.getinfo(1, "S").source:match "^@(.*)[/\\][^/\\]*$" or "."
  local roots = { here .. "/../../../datasets", here .. "/../../../../tycho/datasets", here .. "/../datasets" }
  local own = os.getenv "TYCHO_DATA"
  if own then roots = { own } end
  for _, root in ipairs(roots) do
    local path = root .. "/" .. name
    if ty.io.exists(path) then return path end
  end
  error(("the data set %s was not found in %s; TYCHO_DATA can name the folder")
    :format(name, table.concat(roots, ", ")), 0)
end
M.shipped = shipped

--- The UCI handwritten digits (datasets/digits): { image = f32 [1797, 1, 8, 8] from -1 (paper) to 1 (ink), label = i64
-- [1797] } as a TensorDataset. options: split = { 0.8, 0.2 } and seed give one dataset per part.
function M.digits(options)
  local o = read("data.digits", options, { split = require("tycho.nn.options").none, seed = 0 })
  local arrays = ty.io.load_npz(shipped "digits/digits.npz")
  local all = datasets.TensorDataset {
    image = (arrays.images:to "f32" / 8 - 1):unsqueeze(1),
    label = arrays.labels:to "i64",
  }
  if o.split then return datasets.split(all, o.split, { seed = o.seed }) end
  return all
end

--- The text of Genesis, Exodus and Leviticus in the King James Version (datasets/kjv): 494,446 bytes of ASCII, a verse
-- on each line, chapters apart by an empty line.
---@return string
function M.kjv() return ty.io.read(shipped "kjv/genesis_to_leviticus.txt") end

return M
