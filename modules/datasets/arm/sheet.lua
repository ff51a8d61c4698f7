--- The look of the arm: strips of episodes with their words; strips of a trial as rows of pictures.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local random = require "tycho.datasets.random"

local M = {}

local none = arguments.none
local least, letter = 96, 6 -- pixels of a picture, at least; of a character

--- See datasets.arm.show.
---@param set table
---@param options? table
---@return string path
function M.write(set, options)
  local o = arguments.read("datasets.show", options, { path = "arm.png", split = none, count = 10, columns = 8,
    seed = 0, size = 64 }, { path = "a string", split = "a string", count = "an integer in [1, 256]",
    columns = "an integer in [2, 64]", seed = "an integer", size = "an integer" })
  if not o.path:match "%.png$" then
    arguments.fail("datasets.show: path: expected the ending .png, got \"%s\"", o.path)
  end
  local items = set.load { split = o.split, size = o.size, fields = { "images", "task" } }
  local r, strips, texts = random.new(o.seed, "show", 0), {}, {}
  local first = r:integer(0, math.max(0, #items - o.count))
  for k = 1, math.min(o.count, #items) do -- neighbours: the kinds take turns
    local item = items:get(first + k - 1)
    local steps, some = item.images.shape[1], {}
    for c = 0, o.columns - 1 do some[c + 1] = item.images:select(0, (steps - 1) * c // (o.columns - 1)) end
    strips[k] = ty.concat(some, 2)
    local most = o.columns * math.max(o.size, least) // letter
    texts[k] = #item.task > most and item.task:sub(1, most - 2) .. ".." or item.task
  end
  ty.plot.grid(ty.stack(strips, 0), { columns = 1, scale = math.max(1, (least + o.size - 1) // o.size), gap = 4,
    labels = texts }):save(o.path)
  return o.path
end

--- See datasets.arm.film.
---@param strips Tensor[]
---@param columns? integer
---@return Tensor
function M.film(strips, columns)
  local who = "datasets.arm.film"
  arguments.expect(who, "strips", strips, "a list of tensors")
  columns = arguments.expect(who, "columns", columns, "an integer >= 1 or nil") or 8
  if #strips == 0 then arguments.fail("%s: strips: expected at least one, got none", who) end
  local list = {}
  for _, strip in ipairs(strips) do
    for k = 0, columns - 1 do
      list[#list + 1] = k < strip.shape[1] and strip:select(0, k) or ty.full_like(strip:select(0, 0), 255)
    end
  end
  return ty.stack(list, 0)
end

return M
