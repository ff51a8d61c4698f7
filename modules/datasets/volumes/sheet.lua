--- The look of volumes: cuts with their reports.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local random = require "tycho.datasets.random"

local M = {}

local none = arguments.none
local side, letter = 128, 6 -- pixels of a cut; of a character

-- Colours of findings 1 to 3, and of the organs.
local marks = { { 255, 70, 60 }, { 60, 220, 90 }, { 90, 140, 255 } }

local function enlarge(x) -- u8 [1, h, w] to [3, side, side]
  local times = side // x.shape[3]
  return x:reshape(1, x.shape[2], 1, x.shape[3], 1):expand(3, x.shape[2], times, x.shape[3], times)
    :reshape(3, side, side)
end

-- A cut with its findings in colour, mixed half and half.
local function coloured(cut, marked)
  local result = cut:to "f32"
  for i, colour in ipairs(marks) do
    local mask = marked:eq(i):to "f32"
    local tint = ty.tensor(colour, { dtype = "f32" }):reshape(3, 1, 1)
    result = result * (1 - mask * 0.55) + tint * mask * 0.55
  end
  return result:round():to "u8"
end

local function strip(item)
  local n = item.image.shape[4]
  local image = (item.image:squeeze(0):to "f32" * 1.45):clamp(0, 255):to "u8" -- soft tissue is what findings are in
  local centre = { 0.5, 0.5, 0.5 }
  if item.findings[1] then centre = item.findings[1].centre end
  local at = {}
  for i = 1, 3 do at[i] = math.max(0, math.min(n - 1, math.floor(centre[i] * n))) end
  local cuts = {}
  for i, dim in ipairs { 0, 1, 2 } do
    local where = at[3 - dim]
    cuts[i] = enlarge(image:select(dim, where):unsqueeze(0))
    if i == 1 then cuts[4] = coloured(cuts[1], enlarge(item.marks:select(dim, where):unsqueeze(0))) end
  end
  return ty.concat(cuts, 2)
end

--- See datasets.volumes.show.
---@param set table
---@param options? table
---@return string path
function M.write(set, options)
  local o = arguments.read("datasets.show", options, { path = "volumes.png", split = none, count = 12, columns = 2,
    seed = 0, contrast = none, size = none }, { path = "a string", split = "a string", count = "an integer in [1, 256]",
    columns = "an integer in [1, 64]", seed = "an integer", contrast = "a string", size = "an integer" })
  if not o.path:match "%.png$" then
    arguments.fail("datasets.show: path: expected the ending .png, got \"%s\"", o.path)
  end
  local items = set.load { split = o.split, contrast = o.contrast, size = o.size,
    fields = { "image", "marks", "findings", "report" } }
  local r, pictures, texts = random.new(o.seed, "show", 0), {}, {}
  for k = 1, math.min(o.count, #items) do
    local item = items:get(r:integer(0, #items - 1))
    pictures[k] = strip(item)
    local most = 4 * side // letter
    texts[k] = #item.report > most and item.report:sub(1, most - 2) .. ".." or item.report
  end
  ty.plot.grid(ty.stack(pictures, 0), { columns = o.columns, gap = 4, labels = texts }):save(o.path)
  return o.path
end

return M
