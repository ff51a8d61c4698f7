--- Items of volumes as studies that networks learn from: many at once, cropped to what findings are in, with their
-- codes, the kinds that each slice shows, a projection from the front, and reports in small letters.
--
--     local set = datasets.volumes.studies { split = "training", count = 500 }
--     set.volumes, set.codes, set.reports       -- f32 [500, 1, 32, 20, 28], f32 [500, 14], a list
local ty = require "tycho"
local arguments = require "tycho.arguments"
local findings = require "tycho.datasets.volumes.findings"

local M = {}

--- What a study has a code for, as { kind, organ }: the findings that training meets.
M.codes = {}
for _, kind in ipairs(findings.kinds) do
  for _, organ in ipairs(findings.where[kind].seen) do M.codes[#M.codes + 1] = { kind, organ } end
end

local code_of, kind_of = {}, {}
for i, code in ipairs(M.codes) do code_of[code[1] .. " in " .. code[2]] = i end
for i, kind in ipairs(findings.kinds) do kind_of[kind] = i end

local function zeros(count)
  local row = {}
  for k = 1, count do row[k] = 0 end
  return row
end

-- Where a map of findings [d, h, w] shows each kind, f32 [kinds, d, w]: 1 where a line from front to back meets it.
local function kinds_from_front(marks, list)
  local maps = {}
  for k = 1, #findings.kinds do maps[k] = ty.zeros(marks.shape[1], marks.shape[3]) end
  for number, f in ipairs(list) do
    local k = kind_of[f.kind]
    maps[k] = maps[k] + marks:eq(number):any(1):to "f32"
  end
  return ty.stack(maps, 0):clamp(0, 1)
end

--- Studies first to first + count - 1 of a split. options: load (datasets.load "volumes", which needs it), split
-- ("training"), seed (0), first (0), count (100), size (32 voxels a side), findings ({ 0, 3 }), volumes (true), frontal
-- (false), marked (false), slices (false). Returns a table with
--   volumes   f32 [n, 1, d, h, w], water 1, air -1: the rows and columns, 5/8 and 7/8 of all, that organs are in
--   frontal   f32 [n, 1, d, size]: mean attenuation along the lines from front to back, scaled to about -1 to 1
--   marked    f32 [n, kinds, d, size]: 1 where a line from front to back meets a finding of the kind
--   slices    f32 [n, d, kinds]: the kinds of findings that a slice shows
--   codes     f32 [n, codes], by M.codes, and kinds f32 [n, kinds]
--   reports   texts in small letters, and findings, what they say
---@param options table
---@return table
function M.read(options)
  local who = "datasets.volumes.studies"
  local o = arguments.read(who, options, { load = arguments.none, split = "training", seed = 0, first = 0, count = 100,
    size = 32, findings = { 0, 3 }, volumes = true, frontal = false, marked = false, slices = false }, {
    load = "a function",
    split = "a string", seed = "an integer", first = "an integer >= 0", count = "an integer >= 1",
    size = "32 or 64 or 128", findings = "a pair of integers" })
  local fields = { "report", "findings" }
  if o.volumes or o.frontal then fields[#fields + 1] = "volume" end
  if o.slices or o.marked then fields[#fields + 1] = "marks" end
  local set = o.load { split = o.split, seed = o.seed, size = o.size, findings = o.findings, fields = fields }
  local unit = o.size // 32
  local parts = { volumes = {}, frontal = {}, marked = {}, slices = {} }
  local codes, kinds, result = {}, {}, { reports = {}, findings = {} }
  for start = 0, o.count - 1, 25 do
    ty.scope(function()
      local batch = set:batch(ty.arange(o.first + start, o.first + math.min(o.count, start + 25)))
      if o.volumes then
        local x = batch.volume:narrow(3, 6 * unit, 20 * unit):narrow(4, 2 * unit, 28 * unit)
        table.insert(parts.volumes, ty.keep(x * 2 - 1))
      end
      if o.frontal then table.insert(parts.frontal, ty.keep(batch.volume:mean(3) * 5 - 1.5)) end
      for i, list in ipairs(batch.findings) do
        local own, there = zeros(#M.codes), zeros(#findings.kinds)
        for _, f in ipairs(list) do
          local code = code_of[f.kind .. " in " .. f.organ]
          if code then own[code] = 1 end
          there[kind_of[f.kind]] = 1
        end
        table.insert(codes, own)
        table.insert(kinds, there)
        table.insert(result.reports, (batch.report[i]:lower()))
        table.insert(result.findings, list)
        local map = batch.marks and kinds_from_front(batch.marks:select(0, i - 1), list)
        if o.marked then table.insert(parts.marked, ty.keep(map)) end
        if o.slices then table.insert(parts.slices, ty.keep(map:amax(2):transpose(0, 1):contiguous())) end
      end
    end)
  end
  result.codes, result.kinds = ty.tensor(codes, { dtype = "f32" }), ty.tensor(kinds, { dtype = "f32" })
  if o.volumes then result.volumes = ty.concat(parts.volumes, 0) end
  if o.frontal then result.frontal = ty.concat(parts.frontal, 0) end
  if o.marked then result.marked = ty.stack(parts.marked, 0) end
  if o.slices then result.slices = ty.stack(parts.slices, 0) end
  return result
end

return M
