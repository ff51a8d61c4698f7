--- Datasets from files: tables of numbers, NumPy arrays, folders of images.
local ty = require "tycho"
local datasets = require "tycho.data.dataset"
local arguments = require "tycho.arguments"
local pictures = require "tycho.data.pictures"
local for_caller = require("tycho.nn.options").for_caller
local shipped = require "tycho.data.shipped"
local expect, none, read = arguments.expect, arguments.none, arguments.read

local M = {}

-- The position of a label column, from 0: of its name, or counted from the end when it is negative.
local function label_column(label, names, columns, path)
  if type(label) == "string" then
    for i, name in ipairs(names or {}) do if name == label then return i - 1 end end
    arguments.fail("data.csv: label: %s has no column '%s'", path, label)
  end
  local at = label < 0 and label + columns or label
  if at < 0 or at >= columns then
    arguments.fail("data.csv: label: expected a column from 0 to %d, got %d", columns - 1, label)
  end
  return math.tointeger(at)
end

-- Classes are whole numbers, exact in f64; anything else is a quantity.
local function is_whole(column)
  if column:numel() == 0 then return true end
  return column:eq(column:floor()):all():item() and column:abs():max():item() <= 2.0 ^ 53
end

local function as_label(column, dtype, otherwise)
  if dtype == nil then dtype = is_whole(column) and "i64" or otherwise end
  if not dtype:find "^b?f%d" and not is_whole(column) then
    arguments.fail("data.csv: label_dtype: expected a float dtype for a column with fractions, got \"%s\"", dtype)
  end
  return column:to(dtype)
end

local function csv(path, options)
  expect("data.csv", "path", path, "a string")
  local o = read("data.csv", options, { header = true, label = none, label_dtype = none, dtype = "f32",
    delimiter = none, skip = none, missing = none, max = none },
    { header = 'a boolean or "auto"', label = "an integer or a string", label_dtype = "a string",
      delimiter = "a string", skip = "an integer >= 0", missing = "a string", max = "an integer >= 0" })
  local labelled = o.label ~= nil
  -- f64 holds labels that f32 does not: identifiers above 2^24.
  local x, names = ty.io.load_csv(path, { header = o.header, dtype = labelled and "f64" or o.dtype,
    delimiter = o.delimiter, skip = o.skip, missing = o.missing, max = o.max })
  if not labelled then return datasets.TensorDataset { x = x }, names end
  local columns = x.shape[2]
  local label = label_column(o.label, names, columns, path)
  local rest = {}
  for i = 0, columns - 1 do if i ~= label then rest[#rest + 1] = i end end
  return datasets.TensorDataset {
    x = x:index_select(1, ty.tensor(rest, { dtype = "i64" })):to(o.dtype),
    label = as_label(x:select(1, label), o.label_dtype, o.dtype),
  }, names
end

--- A CSV file of numbers (plain or .gz) as a TensorDataset: the column `label` (a header name, or a position from 0,
-- negative from the end) goes to the field `label`, the others to `x`. Labels that are all whole numbers become i64,
-- as classes are wanted by losses; others, the targets of a regression, keep the dtype of x. options: header (true),
-- label, label_dtype ("i64", "f32" ... says it outright), dtype ("f32"), and delimiter, skip, missing and max of
-- io.load_csv. Returns the dataset and the names of all columns.
---@param path string
---@param options? table
function M.csv(path, options) return for_caller(csv, path, options) end

--- The arrays of an .npz file by name, each with the same first size. options: those of io.load_npz.
---@param path string
---@param options? table
function M.npz(path, options)
  expect("data.npz", "path", path, "a string")
  return datasets.TensorDataset((for_caller(ty.io.load_npz, path, options)))
end

--- An .npy file: one field `x`.
---@param path string
function M.npy(path)
  expect("data.npy", "path", path, "a string")
  return datasets.TensorDataset { x = for_caller(ty.io.load_npy, path) }
end

--- A folder with one folder of images per class: items { image = u8 [c, h, w], label = position of the class in sorted
-- order, path = file }. options: channels (0: those of each file; 3 makes all colours), size (a side or { height,
-- width }: every picture is decoded to it, JPEG files no larger than that takes), crop ("center": the largest part in
-- the middle with the proportions of the size; "random": a part drawn as transforms.random_resized_crop does, with
-- scale and ratio; "none": all of it), transform(image) on each image. Returns the dataset and the list of class
-- names.
---@param root string
---@param options? table
function M.image_folder(root, options)
  expect("data.image_folder", "root", root, "a string")
  local defaults, kinds = pictures.options { transform = none }
  kinds.transform = "a function"
  local o = read("data.image_folder", options, defaults, kinds)
  local files, labels, classes = {}, {}, {}
  for _, class in ipairs(ty.io.listdir(root)) do
    local folder = root .. "/" .. class
    local info = ty.io.stat(folder)
    if info and info.kind == "directory" then
      classes[#classes + 1] = class
      for _, name in ipairs(ty.io.listdir(folder)) do
        if pictures.endings[(name:match "%.([^.]+)$" or ""):lower()] then
          files[#files + 1], labels[#labels + 1] = folder .. "/" .. name, #classes - 1
        end
      end
    end
  end
  if #files == 0 then arguments.fail("data.image_folder: %s has no folders with PNG, JPEG or WebP images", root) end
  local function load(path)
    local ok, image = pcall(pictures.decode, ty.io.read(path), o)
    if not ok then arguments.raise(image, ("data.image_folder: %s: "):format(path)) end
    return image
  end
  local transform = o.transform
  return datasets.from_function(#files, function(i)
    local image = load(files[i + 1])
    return { image = transform and transform(image) or image, label = labels[i + 1], path = files[i + 1] }
  end), classes
end

M.shipped = shipped

--- The UCI handwritten digits (datasets/digits): { image = f32 [1797, 1, 8, 8] from -1 (paper) to 1 (ink), label = i64
-- [1797] } as a TensorDataset. options: split = { 0.8, 0.2 } and seed give one dataset per part.
function M.digits(options)
  local o = read("data.digits", options, { split = none, seed = 0 },
    { split = "a list of numbers >= 0", seed = "an integer" })
  local arrays = ty.io.load_npz(shipped "digits/digits.npz")
  local all = datasets.TensorDataset {
    image = (arrays.images:to "f32" / 8 - 1):unsqueeze(1),
    label = arrays.labels:to "i64",
  }
  if o.split then return datasets.split(all, o.split, { seed = o.seed }) end
  return all
end

--- The documents of a text, which empty lines end, each with the line ends of its own lines.
---@param text string
---@return string[]
function M.documents(text)
  expect("data.documents", "text", text, "a string")
  local list = {}
  for document in (text .. "\n\n"):gmatch "(.-\n)\n+" do list[#list + 1] = document end
  return list
end

--- The King James Version (datasets/kjv), ASCII: a verse on each line, chapters apart by an empty line and headed by
-- book and number. options: books (3: so many of its 66 books, from Genesis on; 3 are 494,446 bytes, 66 are 4,151,868).
---@param options? {books: integer}
---@return string
function M.kjv(options)
  local o = read("data.kjv", options, { books = 3 }, { books = "an integer in [1, 66]" })
  local text = ty.io.read(shipped "kjv/kjv.txt.gz")
  local at = 1
  for _ = 1, o.books do -- to the first chapter of the book after
    local blank = text:find("\n\n[^\n]+ 1\n", at)
    if not blank then return text end
    at = blank + 1
  end
  return text:sub(1, at - 1)
end

return M
