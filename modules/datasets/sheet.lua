--- The look of a data set: some of its items with what they are called, as one picture.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local random = require "tycho.datasets.random"

local M = {}

local none = arguments.none
local kinds = { path = "a string", split = "a string", count = "an integer >= 1", columns = "an integer >= 1",
  seed = "an integer" }
local cell = 128 -- pixels of a cell, about: small pictures are enlarged by a whole number
local letter = 6 -- pixels of a character
local rows = 4 -- of text, at most
local paper = 224 -- grey behind what is transparent

-- A picture as f32 [3, h, w] from 0 to 255: u8 of 1, 3 or 4 channels, or floats from -1 to 1.
local function opaque(image)
  local x = image:to { device = "cpu", dtype = "f32" }
  if image.dtype ~= "u8" then x = ((x + 1) * 127.5):clamp(0, 255) end
  if x.shape[1] == 4 then
    local alpha = x:narrow(0, 3, 1) / 255
    x = x:narrow(0, 0, 3) * alpha + (1 - alpha) * paper
  end
  return x:expand(3, x.shape[2], x.shape[3])
end

-- Fitted into a square of `side`, with paper around it.
local function fit(x, side)
  local h, w = x.shape[2], x.shape[3]
  local longest = math.max(h, w)
  if longest > side then
    h, w = math.max(1, h * side // longest), math.max(1, w * side // longest)
    x = x:unsqueeze(0):adaptive_avg_pool2d { h, w }:squeeze(0)
  end
  local left, top = (side - w) // 2, (side - h) // 2
  return ty.pad(x, { left, side - w - left, top, side - h - top }, "constant", paper)
end

-- Whether pictures are strips, of frames beside each other, that are all of a size.
local function are_strips(pictures)
  local h, w = pictures[1].shape[2], pictures[1].shape[3]
  for _, picture in ipairs(pictures) do
    if picture.shape[2] ~= h or picture.shape[3] ~= w then return false end
  end
  return w >= 3 * h
end

-- The beginning of a text, as much as there is place for on `rows` lines, in letters that the plots have.
local function short(text, width)
  text = tostring(text):gsub("[\xe2][\x80][\x98\x99]", "'"):gsub("[\xe2][\x80][\x9c\x9d]", '"')
    :gsub("[\xc2-\xf4][\x80-\xbf]+", "?"):gsub("[^\x20-\x7e]", " ")
  local most, lines = width // letter, { "" }
  for word in text:gmatch "%S+" do
    local line = lines[#lines]
    local longer = line == "" and word or line .. " " .. word
    if #longer <= most then
      lines[#lines] = longer
    elseif line == "" or #lines == rows then -- cut off
      lines[#lines] = longer:sub(1, most - 2) .. ".."
      break
    else
      lines[#lines + 1] = #word > most and word:sub(1, most - 2) .. ".." or word
    end
  end
  return table.concat(lines, "\n")
end

--- Draws items of a set, see datasets.show. set: its module, with load(options) and perhaps cell(item), which gives an
-- item's picture and text; without it these are its image and its name, label or caption.
---@param set table
---@param name string
---@param options? table
---@return string path
function M.write(set, name, options)
  local o = arguments.read("datasets.show", options, { path = name .. ".png", split = none, count = 64, columns = none,
    seed = 0 }, kinds)
  if not o.path:match "%.png$" then
    arguments.fail("datasets.show: path: expected the ending .png, got \"%s\"", o.path)
  end
  local items = set.load { split = o.split }
  local order = {}
  for i = 0, #items - 1 do order[#order + 1] = i end
  random.new(o.seed, "show", 0):shuffle(order)
  local some = table.move(order, 1, math.min(o.count, #order), 1, {})
  table.sort(some)
  local pictures, texts, largest = {}, {}, 1
  for k, i in ipairs(some) do
    local item = items:get(i)
    local image, text = item.image, item.name or item.label or item.caption
    if set.cell then image, text = set.cell(item) end
    if ty.is_tensor(text) then text = text:item() end
    pictures[k], texts[k] = opaque(image), text or ""
    largest = math.max(largest, pictures[k].shape[2], pictures[k].shape[3])
  end
  local scale, columns
  if are_strips(pictures) then
    scale, columns = math.max(1, cell // (2 * pictures[1].shape[2])), o.columns or 2
  else
    local side = math.min(largest, cell)
    columns = o.columns
    scale = math.max(1, cell // side)
    for k, picture in ipairs(pictures) do pictures[k] = fit(picture, side) end
  end
  for k, picture in ipairs(pictures) do texts[k] = short(texts[k], picture.shape[3] * scale) end
  ty.plot.grid(ty.stack(pictures, 0):round():to "u8", { columns = columns, scale = scale, gap = 4, labels = texts })
    :save(o.path)
  return o.path
end

return M
