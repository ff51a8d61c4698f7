--- What the comparisons of this module learn: digits, and kinds of dyed things.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local datasets = require "tycho.datasets"

local M = {}

---@class LocalTask
---@field training { x: Tensor, label: Tensor }
---@field validation { x: Tensor, label: Tensor }  by which rates are chosen and training ends
---@field held_out { x: Tensor, label: Tensor }    which nothing is chosen by
---@field classes integer
---@field shape integer[]  of an input: channels, height, width

local function part(x, label, start, count)
  return { x = x:narrow(0, start, count), label = label:narrow(0, start, count) }
end

--- datasets.digits, [1, 8, 8] from 0 to 1: 1,149 to train on, the 288 others of its training split to choose by, and
-- its 360 of held_out.
---@param device? string
---@return LocalTask
function M.digits(device)
  arguments.expect("local.tasks.digits", "device", device, "a string or nil")
  local sets = {}
  for _, split in ipairs { "training", "held_out" } do
    local set = datasets.load("digits", { split = split })
    local batch = ty.data.batches(set, { batch_size = #set, device = device or "cpu" })[1]
    sets[split] = { batch.image / 2 + 0.5, batch.label }
  end
  local x, label = table.unpack(sets.training)
  return { training = part(x, label, 0, 1149), validation = part(x, label, 1149, #label - 1149),
    held_out = { x = sets.held_out[1], label = sets.held_out[2] }, classes = 10, shape = { 1, 8, 8 } }
end

local chunk = 500 -- pictures drawn at once

--- datasets.canvas: of which of twelve kinds a thing is, dyed and moved, on any ground in any style, from -1 to 1.
-- Those held out have colours and marks in which training never shows their kind. options: training (1500: pictures),
-- validation (1000), held_out (2000), side (16: pixels, of 32), device ("cpu").
---@param options? { training?: integer, validation?: integer, held_out?: integer, side?: integer, device?: string }
---@return LocalTask
function M.things(options)
  local o = arguments.read("local.tasks.things", options, { training = 1500, validation = 1000, held_out = 2000,
    side = 16, device = "cpu" }, { training = "an integer in [1, 50000]", validation = "an integer in [1, 10000]",
    held_out = "an integer in [1, 2000]", side = "8 or 16 or 32" })
  local function draw(split, start, count)
    local set, xs, labels = datasets.load("canvas", { split = split, dyed = 1, moved = true }), {}, {}
    for at = start, start + count - 1, chunk do
      local batch = set:batch(ty.arange(at, math.min(at + chunk, start + count)))
      xs[#xs + 1], labels[#labels + 1] = datasets.pixels(batch.image), batch.kind
    end
    local by = 32 // o.side
    local x = ty.concat(xs, 0):reshape { count, 3, o.side, by, o.side, by }:mean { 3, 5 }
    return { x = x:to(o.device), label = ty.concat(labels, 0):to(o.device) }
  end
  return { training = draw("training", 0, o.training), validation = draw("training", 50000, o.validation),
    held_out = draw("held_out", 0, o.held_out), classes = datasets.canvas.known, shape = { 3, o.side, o.side } }
end

return M
