--- Handwritten digits, 8 x 8, for what has to be fast. Its page, datasets/digits/README.md, says where they are from.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local M = {}

--- datasets.load("digits", options): { image = f32 [1, 8, 8] from -1 (paper) to 1 (ink), label = i64 [] }, the same
-- splits as ty.data.digits { split = { 0.8, 0.2 }, seed = 0 }. options: split ("training"; "held_out", "all").
---@param options? {split: string}
function M.load(options)
  local o = arguments.read("datasets.digits", options, { split = "training" },
    { split = '"training" or "held_out" or "all"' })
  if o.split == "all" then return ty.data.digits() end
  local training, held_out = ty.data.digits { split = { 0.8, 0.2 }, seed = 0 }
  return o.split == "training" and training or held_out
end

--- Digits on a larger page: each of a split drawn `copies` times, as large as chance has it and anywhere. Returns a
-- data set of { image = f32 [1, size, size], label }, from -1 (paper) to 1 (ink), in the order of the split. options:
-- split ("training"), size (12: of the page), least (7) and most (10: sides that a digit has there), copies (8), seed
-- (0), first (0) and count (all: so many digits of the split after the first ones).
---@param options? table
---@return TensorDataset
function M.moved(options)
  local who = "datasets.digits.moved"
  local side = "an integer >= 1"
  local o = arguments.read(who, options, { split = "training", size = 12, least = 7, most = 10, copies = 8, seed = 0,
    first = 0, count = arguments.none }, { split = '"training" or "held_out" or "all"', size = side, least = side,
    most = side, copies = side, seed = "an integer", first = "an integer >= 0", count = side })
  if o.least > o.most or o.most > o.size then
    arguments.fail("%s: most: expected one of %d to %d, got %d", who, o.least, o.size, o.most)
  end
  local set = M.load { split = o.split }
  local count = o.count or #set - o.first
  if count < 1 or o.first + count > #set then
    arguments.fail("%s: count: expected digits of the %d that there are, got %d from %d on", who, #set, count, o.first)
  end
  local all = set:batch(ty.arange(o.first, o.first + count))
  local n = count * o.copies
  local image, label = all.image:repeat_interleave(o.copies, 0), all.label:repeat_interleave(o.copies, 0)
  local draws = ty.seeded_noise(ty.empty(3, n), o.seed, "uniform")
  local side_of = (draws[0] * (o.most - o.least + 1)):floor():clamp(0, o.most - o.least):to "i64" + o.least
  local page = ty.full({ n, 1, o.size, o.size }, -1)
  ty.no_grad(function()
    for s = o.least, o.most do
      local of = side_of:eq(s):nonzero():squeeze(1)
      local free = o.size - s
      local drawn = of:numel() > 0 and image:index_select(0, of):interpolate({ s, s }, nil, "bilinear")
      for y = 0, drawn and free or -1 do
        for x = 0, free do
          local here = ((draws[1]:index_select(0, of) * (free + 1)):floor():clamp(0, free):eq(y))
            :logical_and((draws[2]:index_select(0, of) * (free + 1)):floor():clamp(0, free):eq(x)):nonzero():squeeze(1)
          if here:numel() > 0 then
            local placed = ty.pad(drawn:index_select(0, here) + 1, { x, free - x, y, free - y }) - 1
            page = page:index_copy(0, of:index_select(0, here), placed)
          end
        end
      end
    end
  end)
  return ty.data.TensorDataset { image = page, label = label }
end

--- The ink of an item in black on white, and its label: what datasets.show draws.
function M.cell(item)
  arguments.expect("datasets.digits.cell", "item", item, "a table")
  arguments.expect("datasets.digits.cell", "item.image", item.image, "a tensor")
  return -item.image, item.label
end

return M
