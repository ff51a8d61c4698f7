--- Functions of a place, as pictures, signed distances and densities are, learnt in tables: a multi-resolution hash
-- grid with a small network behind it, fused into ty.hash_field. Müller et al. 2022, "Instant Neural Graphics
-- Primitives with a Multiresolution Hash Encoding".
--
--     local field = models.HashField { inputs = 2, outputs = 3, finest = 512 }
--     local colours = field(places)                       -- [n, 2] in [0, 1] to [n, 3]
local ty = require "tycho"
local arguments = require "tycho.arguments"

local nn = ty.nn

---@class HashField: Module
local HashField = nn.module "HashField"

local defaults = { inputs = 2, outputs = 3, levels = 16, features = 2, entries = 1 << 14, coarsest = 16, finest = 512,
  width = 64, layers = 1 }
local kinds = { inputs = "2 or 3", outputs = "an integer >= 1", levels = "an integer >= 1",
  features = "an integer >= 1", entries = "an integer >= 2", coarsest = "an integer >= 1", finest = "an integer >= 1",
  width = "an integer >= 1", layers = "an integer >= 0" }

--- Cells a side of each level, from `coarsest` to `finest` in a geometric series.
---@param levels integer
---@param coarsest integer
---@param finest integer
---@return integer[]
function HashField.resolutions(levels, coarsest, finest)
  for name, value in pairs { levels = levels, coarsest = coarsest, finest = finest } do
    arguments.expect("HashField.resolutions", name, value, "an integer >= 1")
  end
  if finest < coarsest then
    arguments.fail("HashField: finest: expected at least coarsest, %d, got %d", coarsest, finest)
  end
  local list, growth = {}, levels > 1 and (finest / coarsest) ^ (1 / (levels - 1)) or 1
  for level = 1, levels do list[level] = math.floor(coarsest * growth ^ (level - 1) + 1e-6) end
  return list
end

-- Uniform, so that units keep the size of what they take.
local function weights(scale, ...) return nn.Parameter((ty.rand(...) * 2 - 1) * scale) end

--- options: inputs (2: of a place, or 3), outputs (3), levels (16), features (2: of a level), entries (16384: rows of
-- a level's table, a power of two, which corners share by a hash where there are more), coarsest (16) and finest (512:
-- cells a side of the first level and of the last), width (64) and layers (1: between the first one and the last).
---@param options? table
function HashField:init(options)
  local o = arguments.read("HashField", options, defaults, kinds)
  self.config, self.resolution = o, HashField.resolutions(o.levels, o.coarsest, o.finest)
  local rows = 0
  for _, r in ipairs(self.resolution) do
    rows = rows + math.tointeger(math.min((r + 1.0) ^ o.inputs, o.entries))
  end
  local all = o.levels * o.features
  self.table = weights(1e-4, rows, o.features)
  self.first = weights(math.sqrt(6 / all), o.width, all)
  self.hidden = o.layers > 0 and weights(math.sqrt(6 / o.width), o.layers, o.width, o.width) or nil
  self.last = weights(math.sqrt(6 / (o.width + o.outputs)), o.outputs, o.width)
end

local function flat(self, who, x)
  arguments.expect(who, "x", x, "a tensor")
  if x.ndim < 1 or x.shape[x.ndim] ~= self.config.inputs then
    arguments.fail("%s: x: expected [..., %d], got %s", who, self.config.inputs, arguments.describe(x))
  end
  return x:reshape(-1, self.config.inputs)
end

local function like(x, y)
  local shape = table.move(x.shape, 1, x.ndim, 1, {})
  shape[x.ndim] = y.shape[2]
  return y:reshape(shape)
end

--- Places [..., inputs] in [0, 1] to [..., outputs].
---@param x Tensor
---@return Tensor
function HashField:forward(x)
  local places = flat(self, "HashField", x)
  return like(x, ty.hash_field(places, self.table, self.first, self.last, self.resolution, self.config.entries,
    self.hidden))
end

--- What the tables alone say of places [..., inputs]: [..., levels * features].
---@param x Tensor
---@return Tensor
function HashField:encode(x)
  return like(x, ty.hash_grid(flat(self, "HashField:encode", x), self.table, self.resolution, self.config.entries))
end

return HashField
