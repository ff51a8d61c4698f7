--- Volumes: a chest of simple shapes in 3-D, with findings, a short report, the map of its organs, and projections.
-- Item i depends on (seed, split, i) alone; without noise to the last byte. The page is datasets/volumes/README.md.
--
--     local set = datasets.load("volumes", { size = 64 })
--     local item = set:get(0)       -- { volume = f32 [1, 64, 64, 64], report = "A 12 mm nodule in the liver." }
--     local scan = datasets.volumes.project(item.volume, { views = 30, dose = 1e4 })   -- { sinogram, angles }
local ty = require "tycho"
local anatomy = require "tycho.datasets.volumes.anatomy"
local arguments = require "tycho.arguments"
local facts = require "tycho.datasets.volumes.facts"
local items = require "tycho.datasets.items"
local findings = require "tycho.datasets.volumes.findings"
local random = require "tycho.datasets.random"
local report = require "tycho.datasets.volumes.report"
local shapes = require "tycho.datasets.volumes.solids"
local studies = require "tycho.datasets.volumes.studies"

local M = {}

--- Millimetres of a side of every volume.
M.field = anatomy.field
--- What reports say, as facts, and how they differ: tycho.datasets.volumes.facts.
M.facts = facts
--- Names of the organs; the first is 1 in `organs`, 0 is outside of the body.
M.organs = anatomy.organs
--- Attenuation of water in 1/cm, at 60 keV (Hubbell and Seltzer 1995, NISTIR 5632): 1 of the unit that volumes have.
M.water = 0.2059

--- Chests in 3-D with findings and reports, drawn on demand, as a data set.
---@class Volumes
---@field size integer  items
---@field side integer  voxels of a side
local Volumes = ty.data.class "Volumes"

function Volumes:describe()
  return ("of %d^3, %s (%s, seed %d)"):format(self.side, self.contrast, self.split, self.seed)
end

local function generator(self, part, i) return random.new(self.seed, ("volumes %s %s"):format(part, self.split), i) end

-- ---- drawing ----

local shares = { 25, 40, 22, 13 } -- of no, one, two and three findings

local function pick_count(self, r)
  local low, high = self.least, self.most
  if self.split == "held_out_findings" then low = math.max(low, 1) end
  local sum = 0
  for n = low, high do sum = sum + shares[n + 1] end
  local at = r:integer(0, sum - 1)
  for n = low, high do
    at = at - shares[n + 1]
    if at < 0 then return n end
  end
end

local function draw_case(self, i)
  local body = anatomy.draw(generator(self, "body", i), self.contrast)
  local r = generator(self, "findings", i)
  local case = { body = body }
  case.findings = findings.draw(body, r, pick_count(self, r), self.split == "held_out_findings")
  case.report, case.denied = report.write(generator(self, "report", i), case.findings)
  return case
end

local function rasterize(self, b)
  if b.values then return end
  local cases = b.cases
  local most = 1
  for _, case in ipairs(cases) do most = math.max(most, #case.body.solids) end
  local list, at, voxel = {}, 0, anatomy.field / self.side
  for _, case in ipairs(cases) do
    for k = 1, most do
      local solid = case.body.solids[k]
      if solid then
        at = shapes.row(list, at, solid, voxel, self.side)
      else
        list[at + 1] = -1
        for j = 2, shapes.fields do list[at + j] = 0 end
        at = at + shapes.fields
      end
    end
  end
  local rows = ty.tensor(list, { dtype = "i32" }):reshape(#cases, most, shapes.fields)
  b.values, b.labels = ty.draw_solids(rows, self.side, self.side, self.side)
end

-- The receive field of a coil: brighter to one side, a smooth product over the volume, f32 [1, d, h, w].
local function bias_of(self, r)
  local side = self.side
  local x = (ty.arange(side, { dtype = "f32" }) * 2 + (1 - side)) / side
  local field = ty.ones(1, side, side, side)
  for d = 1, 3 do
    local shape = { 1, 1, 1, 1 }
    shape[d + 1] = side
    local a, b = r:number() * 2 - 1, r:number()
    field = field * (1 + self.bias * (a * x - b * x * x)):reshape(shape)
  end
  return field
end

local function volumes_of(self, b)
  if b.volume then return b.volume end
  rasterize(self, b)
  local volume = b.values:to "f32":unsqueeze(1) / 1000
  local parts = {}
  for k, i in ipairs(b.positions) do
    local r = generator(self, "noise", i)
    local v = volume:select(0, k - 1)
    if self.contrast == "mri" and self.bias > 0 then v = v * bias_of(self, r) end
    if self.noise > 0 then
      local one = ty.seeded_noise(v, r:bits()) * self.noise
      if self.contrast == "mri" then -- the size of a complex signal: Rice's distribution
        local other = ty.seeded_noise(v, r:bits()) * self.noise
        v = (ty.square(v + one) + ty.square(other)):sqrt()
      else
        v = v + one
      end
    end
    parts[k] = v
  end
  b.volume = ty.stack(parts, 0)
  return b.volume
end

local function each(b, key)
  local list = {}
  for k, case in ipairs(b.cases) do list[k] = case[key] end
  return list
end

-- What makes a field of a batch.
local makers = {
  volume = volumes_of,
  image = function(self, b) return (volumes_of(self, b) * 127.5):clamp(0, 255):round():to "u8" end,
  organs = function(self, b)
    rasterize(self, b)
    return b.labels % findings.step
  end,
  marks = function(self, b)
    rasterize(self, b)
    return b.labels // findings.step
  end,
  report = function(_, b) return each(b, "report") end,
  findings = function(_, b) return each(b, "findings") end,
  denied = function(_, b) return each(b, "denied") end,
}

local function batch_of(self, positions)
  local b, result = { positions = positions, cases = {} }, {}
  for k, i in ipairs(positions) do b.cases[k] = draw_case(self, i) end
  for _, field in ipairs(self.fields) do result[field] = makers[field](self, b) end
  return result
end

--- The items at `positions`, drawn by one call: volume f32 and image u8 [n, 1, d, h, w], organs and marks u8 [n, d, h,
-- w], report, findings and denied as lists.
---@param positions integer[]|Tensor
function Volumes:batch(positions)
  local list = items.positions("Volumes:batch", positions, self.size)
  if #list == 0 then arguments.fail("Volumes:batch: positions: expected at least one, got none") end
  return batch_of(self, list)
end

--- Item i: the fields of a batch without their first size.
---@param i integer
function Volumes:get(i)
  return items.first(batch_of(self, items.position("Volumes:get", i, self.size)))
end

-- ---- options ----

local none = arguments.none
local defaults = { split = "training", seed = 0, size = 64, length = none, contrast = "ct",
  fields = { "volume", "report", "findings", "denied" }, findings = { 0, 3 }, noise = none, bias = 0.25 }
local kinds = { split = "a string", seed = "an integer", size = "32 or 64 or 128", length = "an integer >= 0",
  contrast = '"ct" or "mri"', fields = "a list of strings", findings = "a pair of integers",
  noise = "a finite number >= 0", bias = "a number in [0, 0.4]" }

--- Items of an epoch of each split.
M.lengths = { training = 20000, validation = 1000, held_out_findings = 1000 }

--- datasets.load("volumes", options). options: split ("training", "validation", "held_out_findings"), seed (0), size
-- (64 voxels a side; 32, 128), length (items of an epoch), contrast ("ct": attenuation, water 1; "mri": brightness,
-- fat about 1), fields (of volume f32, image u8 with 2 as white, organs, marks: the number of a voxel's finding,
-- report, findings, denied: kinds that the report says are not there), findings ({ 0, 3 }: at least and at most),
-- noise (standard deviation: 0, of mri 0.02, where it is Rician), bias (0.25, of mri: how uneven the coil is).
---@param options? table
---@return Volumes
function M.load(options)
  local o = arguments.read("datasets.volumes", options, defaults, kinds)
  if not M.lengths[o.split] then
    arguments.fail("datasets.volumes: split: there is no \"%s\"%s", o.split, ty.core.nearest(o.split, M.lengths))
  end
  local low, high = o.findings[1], o.findings[2]
  if low < 0 or high > 3 or low > high or o.split == "held_out_findings" and high < 1 then
    arguments.fail("datasets.volumes: findings: expected { least, most } from %s to 3, got { %d, %d }",
      o.split == "held_out_findings" and "1" or "0", low, high)
  end
  for _, field in ipairs(o.fields) do
    if not makers[field] then
      arguments.fail("datasets.volumes: fields: there is no \"%s\"%s", field, ty.core.nearest(field, makers))
    end
  end
  return setmetatable({ size = o.length or M.lengths[o.split], side = o.size, seed = math.tointeger(o.seed),
    split = o.split, contrast = o.contrast, fields = o.fields, least = low, most = high, bias = o.bias,
    noise = o.noise or (o.contrast == "mri" and 0.02 or 0) }, Volumes)
end

--- Studies first to first + count - 1 of a split, drawn at once for networks to learn from: tycho.datasets.volumes.
-- studies.read() says what it takes and gives; `load` is that of this set.
---@param options? table
---@return table
function M.studies(options)
  local o = { load = M.load }
  arguments.expect("datasets.volumes.studies", "options", options, "a table or nil")
  for key, value in pairs(options or {}) do o[key] = value end
  return studies.read(o)
end

--- What studies have a code for, as a list of { kind, organ }.
M.codes = studies.codes

-- ---- projections ----

--- What a parallel-beam scanner measures of volumes [..., d, h, w] of attenuation (water 1), slice by slice:
-- { sinogram = f32 [..., d, views, detectors], line integrals, without unit; angles = f64 [views], in radians }.
-- Differentiable in the volume where there is no noise. options: views (180), arc (180 degrees, over which the views
-- are spread evenly), first (0 degrees), detectors (0: as many as cover the diagonal), dose (none: no noise; photons
-- for each detector in air: counts follow Poisson's distribution, one at least), seed (0, of the counts).
---@param volume Tensor
---@param options? {views: integer, arc: number, first: number, detectors: integer, dose: number, seed: integer}
---@return {sinogram: Tensor, angles: Tensor}
function M.project(volume, options)
  arguments.expect("datasets.volumes.project", "volume", volume, "a tensor")
  local o = arguments.read("datasets.volumes.project", options, { views = 180, arc = 180, first = 0, detectors = 0,
    dose = none, seed = 0 }, { views = "an integer >= 1", arc = "a number in (0, 360]", first = "a finite number",
    detectors = "an integer >= 0", dose = "a finite number >= 1", seed = "an integer" })
  local shape = volume.shape
  local n = #shape
  if n < 3 then
    arguments.fail("datasets.volumes.project: volume: expected [..., d, h, w], got %s", arguments.describe(volume))
  end
  local angles = ((ty.arange(o.views, { dtype = "f64" }) * (o.arc / o.views)) + o.first) * (math.pi / 180)
  angles = angles:to { device = volume.device }
  local slices = volume:reshape(-1, shape[n - 1], shape[n])
  local centimetres = anatomy.field / 10 / shape[n]
  local sinogram = ty.radon(slices, angles, o.detectors) * (M.water * centimetres)
  if o.dose then
    local counts = ty.seeded_noise((-sinogram:detach()):exp() * o.dose, math.tointeger(o.seed), "poisson")
    sinogram = math.log(o.dose) - counts:clamp(1):log()
  end
  local size = table.move(shape, 1, n - 2, 1, {})
  size[n - 1], size[n] = o.views, sinogram.shape[3]
  return { sinogram = sinogram:reshape(size), angles = angles }
end

--- Draws items of a set into a PNG file: cuts through the first finding, from below, from the front and from the side,
-- the first once more with its organs and findings in colour, and its report. datasets.show "volumes" calls it; further
-- options: contrast, size.
---@param options? table
---@return string path
function M.show(options) return require("tycho.datasets.volumes.sheet").write(M, options) end

return M
