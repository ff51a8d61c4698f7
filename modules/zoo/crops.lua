--- Windows around single objects of scenes: what a painter learns shapes from before it learns scenes. An object fills
-- a window, and a window takes a quarter of the work: so the network sees an object's pixels about ten times as often
-- in the same time. Windows are cut out of latents, whose places depend on few pixels around them.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local captions = require "tycho.datasets.scenes.captions"

local M = {}

local LENGTH = 12 -- tokens of a phrase

--- Tokens of what each object of scenes is called by itself, "a red apple", i64 [n, most, 12]; of objects that are not
-- there those of the first.
---@param painter TextToImage
---@param scenes table[]  as the field `scene` has them
---@param most integer
---@return Tensor
function M.phrases(painter, scenes, most)
  arguments.expect("crops.phrases", "scenes", scenes, "a list of tables")
  arguments.expect("crops.phrases", "most", most, "an integer >= 1")
  local list = {}
  for _, scene in ipairs(scenes) do
    for j = 1, most do
      local object = scene.objects[j] or scene.objects[1]
      list[#list + 1] = captions.phrase(1, nil, object.colour, object.object)
    end
  end
  return painter:tokens(list):narrow(1, 0, LENGTH):reshape(#scenes, most, LENGTH)
end

-- Positions of a window of side * side places in a map of `whole` * `whole`, i64 [n, side * side], by where its corner
-- is.
local function positions(y, x, side, whole)
  local device = y.device
  local at = ty.arange(side, { device = device })
  local window = (at:reshape(side, 1) * whole + at:reshape(1, side)):reshape(1, side * side)
  return window + (y * whole + x):reshape(-1, 1)
end

--- A window of half the side of each scene of a batch, around a place of one of its objects, drawn at random: the
-- fields of a batch of painter.fit, with the tokens of that object's phrase. batch: latents [n, c, h, h], shares
-- [n, cells, k + 1], numbers and colours [n, k + 1] as judge.tops() gives them, phrases [n, k, t].
---@param batch table
---@return table
function M.draw(batch)
  local latents, shares, phrases = batch.latents, batch.shares:to "f32", batch.phrases
  local n, channels, whole = latents.shape[1], latents.shape[2], latents.shape[3]
  local k, cells, device = phrases.shape[2], math.tointeger(shares.shape[2] ^ 0.5), latents.device
  local factor, side, small = whole // cells, whole // 2, cells // 2
  -- An object, alike among those that are seen, and a place of it.
  local area = shares:narrow(2, 0, k):sum(1)
  local chosen = area:gt(0):to("f32"):clamp(1e-6):multinomial(1)
  local own = shares:gather(2, chosen:reshape(n, 1, 1):expand(n, cells * cells, 1)):select(2, 0)
  local cell = own:clamp(1e-6):multinomial(1):select(1, 0)
  local function corner(at)
    return (at - small // 2 + ty.randint(-1, 2, { n }, { device = device })):clamp(0, cells - small)
  end
  local y, x = corner(cell:floor_divide(cells)), corner(cell % cells)
  local of_latents = positions(y * factor, x * factor, side, whole):reshape(n, 1, -1):expand(n, channels, side * side)
  local of_cells = positions(y, x, small, cells):reshape(n, -1, 1):expand(n, small * small, shares.shape[3])
  return { latents = latents:flatten(2):gather(2, of_latents):reshape(n, channels, side, side),
    shares = batch.shares:gather(1, of_cells), numbers = batch.numbers, colours = batch.colours,
    tokens = phrases:gather(1, chosen:reshape(n, 1, 1):expand(n, 1, phrases.shape[3])):select(1, 0) }
end

return M
