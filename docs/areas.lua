-- The pages of the reference: which ops and which public names stand on which of them, and in which order.
--
-- What is new finds its place by itself: an op by its section of ops.def, a name by what it begins with, a class by the
-- folder of its file. What fits nowhere is an error of make_reference.lua.
local M = {}

---@class Area
---@field id string        the page is ID.html
---@field title string
---@field text string      what stands below the title; of a module also what the head of its file says
---@field module string|nil what to require
---@field ops string[]|nil  sections of ops.def, by what their titles begin with

---@type Area[]
M.list = {
  { id = "tensors", title = "Tensors and gradients", ops = { "making tensors", "copies and dtypes" },
    text = "Tensors, how they are made, gradients, scopes, recorded programs, functions that are made of a few ops." },
  { id = "ops-elementwise", title = "Elementwise ops", ops = { "elementwise", "special functions" } },
  { id = "ops-shapes", title = "Shapes and indices",
    ops = { "views", "indexing", "several index tensors", "one dimension resized", "pairs" } },
  { id = "ops-reductions", title = "Reductions, order, statistics",
    ops = { "reductions", "segments", "along one dimension", "what is where", "statistics", "metrics" } },
  { id = "ops-products", title = "Products and linear algebra",
    ops = { "products", "sparse matrices", "linear algebra", "block-quantized", "familiar ops" } },
  { id = "sparse", title = "sparse: matrices with few entries, graphs",
    text = "Matrices in two layouts, products with dense ones, and softmax over the entries of a row." },
  { id = "ops-networks", title = "Ops of networks", ops = { "softmax", "convol", "pools", "windows", "norms", "losses",
    "attention", "linear attention", "recurrent", "optimizer steps" } },
  { id = "ops-pictures", title = "Ops of pictures, volumes and signals", ops = { "images", "pictures", "fourier",
    "complex", "short-time", "projections" } },
  { id = "ops-more", title = "Further ops", ops = { "" } },
  { id = "random", title = "Random numbers",
    text = "One generator serves all devices. The same seed gives the same numbers, whatever the number of threads." },
  { id = "machine", title = "Memory, devices, machine" },
  { id = "io", title = "Files", text = "Reading and writing: `ty.load`, `ty.save` and ty.io. "
    .. "Files from outside are checked before they are used; what is wrong with one is an error that says so." },
  { id = "nn", title = "nn: modules, losses" },
  { id = "optim", title = "optim: optimizers, schedules" },
  { id = "data", title = "data: data sets, loaders, transforms, tokenizers" },
  { id = "train", title = "train: loops, checkpoints" },
  { id = "plot", title = "plot: lines, sheets of pictures" },
  { id = "profile", title = "profile, stats, energy, footprint" },
  { id = "recipe", title = "recipe: claims, measured" },
}

for _, area in ipairs(M.list) do area.text = area.text or "" end

-- Names of the table `ty` that do not stand with the tensors.
local machine = " threads set_threads cpu device_available ops nearest "
local random = " manual_seed rng_state normal randint_like "
local parts = { memory = "machine", cuda = "machine", system = "machine", probe = "machine", thread = "machine",
  CudaStream = "machine", CudaEvent = "machine", Tensor = "tensors", tokenizer = "data", Tokenizer = "data",
  stats = "profile", energy = "profile", footprint = "profile", EnergyMeter = "profile", EnergyReading = "profile",
  Footprint = "profile", Sparse = "sparse", TimeModel = "profile", load = "io", save = "io", checkpoint = "tensors" }

--- The areas with those of the modules.
---@param modules string[]
---@return Area[] list
---@return table<string, Area> by_id
function M.all(modules)
  local list, by_id = { table.unpack(M.list) }, {}
  for _, name in ipairs(modules) do
    list[#list + 1] = { id = name, title = "tycho." .. name, text = "", module = "tycho." .. name }
  end
  for _, area in ipairs(list) do by_id[area.id] = area end
  return list, by_id
end

--- The area of an op in a section of ops.def.
---@param op table
---@param section string its title
---@return string id
function M.of_op(op, section)
  if op.flags.RANDOM or op.name == "seeded_noise" then return "random" end
  for _, area in ipairs(M.list) do
    for _, beginning in ipairs(area.ops or {}) do
      if section:lower():sub(1, #beginning) == beginning then return area.id end
    end
  end
  return "ops-more"
end

--- The area of a public name.
---@param entry PublicName
---@param path string where it is defined, "" where that is not known
---@param by_id table<string, Area>
---@return string|nil id
function M.of_name(entry, path, by_id)
  local first = entry.name:match("^[^.:]+")
  if parts[first] then return parts[first] end
  if by_id[first] and (entry.module or entry.name:find("[.:]") or not entry.module) and first:find("^%l") then
    return first
  end
  if first:find("^%u") then -- a class without a place in a table
    local folder = path:match("modules/([%w_]+)/") or path:match("lua/tycho/([%w_]+)/")
    return by_id[folder or ""] and folder or parts[folder or ""]
  end
  if entry.module then return nil end
  local padded = " " .. entry.name .. " "
  return machine:find(padded, 1, true) and "machine" or random:find(padded, 1, true) and "random" or "tensors"
end

return M
