--- Scenes become pictures: one call of draw_sprites for a batch, the facts that follow, and another draw of what turns
-- out unfit.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local facts = require "tycho.datasets.scenes.facts"
local layout = require "tycho.datasets.scenes.layout"
local rows = require "tycho.datasets.scenes.rows"

local M = {}

local function tensor_of(list, ...) return ty.tensor(list, { dtype = "i32" }):reshape(...) end

-- Photos onto the canvases that are to have them.
local function put_photos(set, scenes, canvas)
  local list, at, where = {}, 0, {}
  for i, scene in ipairs(scenes) do
    if scene.background.kind == "photo" then
      at = rows.photo(list, at, scene.background, set.side, set.photos.shape[3])
      where[#where + 1] = i - 1
    end
  end
  if #where == 0 then return end
  local blank = ty.zeros(#where, 3, set.side, set.side, { dtype = "u8" })
  local pictures = ty.draw_sprites(blank, set.photos, tensor_of(list, #where, 1, rows.sprite_fields))
  for r, i in ipairs(where) do canvas:select(0, i):copy_(pictures:select(0, r - 1)) end
end

-- Rows of the objects of scenes, `k` for each.
local function sprites_of(set, scenes, k)
  local list, at, texels = {}, 0, set.atlas.shape[3]
  for i = 1, #scenes do
    local objects = scenes[i].objects
    for j = 1, k do
      local o = objects[j]
      if o then
        at = rows.sprite(list, at, o.object, o.x, o.y, o.side, o.rotation, o.mirrored, o.colour, set.side, texels)
      else
        at = rows.nothing(list, at)
      end
    end
  end
  return tensor_of(list, #scenes, k, rows.sprite_fields)
end

--- The backgrounds of scenes, u8 [n, 3, side, side]. set: side and, where a background may be a photo, photos.
function M.backgrounds(set, scenes)
  local list, at = {}, 0
  for i = 1, #scenes do at = rows.background(list, at, scenes[i].background, set.side) end
  local canvas = ty.draw_background(tensor_of(list, #scenes, rows.background_fields), set.side, set.side)
  if set.photos then put_photos(set, scenes, canvas) end
  return canvas
end

local function draw(set, scenes, k)
  return ty.draw_sprites(M.backgrounds(set, scenes), set.atlas, sprites_of(set, scenes, k))
end

--- Masks of all of each object, seen or not, u8 [n, k, side, side]: each drawn alone.
function M.full_masks(set, scenes, k)
  local n, side = #scenes, set.side
  local blank = ty.zeros(n * k, 3, side, side, { dtype = "u8" })
  local list = sprites_of(set, scenes, k):reshape(n * k, 1, rows.sprite_fields)
  local _, owner = ty.draw_sprites(blank, set.atlas, list)
  return (owner + 1):to "u8":reshape(n, k, side, side)
end

local function is_fit(set, scene, boxes, overlap, k, at)
  if facts.read(scene, boxes, overlap, k, at, set.side) < set.visible then return false end
  local o = set.layout
  if o.any_combination then return not o.held_out or facts.has_held_out(scene) end
  return not facts.has_held_out(scene)
end

local function new_scene(set, generator)
  for _ = 1, 1000 do
    local scene = layout.draw(generator, set.layout)
    if scene then return scene end
  end
  arguments.fail("datasets.scenes: found no scene of these options in 1000 tries (%s)", tostring(set))
end

local tries = 200

--- Scenes from generators, one for each: the scenes with their facts; picture u8 [n, 3, side, side], owner i8 [n, side,
-- side] and boxes i32 [n, k, 5] as draw_sprites gives them.
function M.scenes(set, generators)
  local scenes, left, k = {}, {}, set.layout.high
  for i = 1, #generators do left[i] = i end
  local all
  for try = 1, tries do
    local these = {}
    for r, i in ipairs(left) do
      scenes[i] = new_scene(set, generators[i])
      these[r] = scenes[i]
    end
    local drawn = { draw(set, these, k) } -- picture, owner, boxes, overlap
    local boxes, overlap = drawn[3]:flatten():tolist(), drawn[4]:flatten():tolist()
    local again = {}
    for r, i in ipairs(left) do
      if not is_fit(set, scenes[i], boxes, overlap, k, r - 1) then again[#again + 1] = i end
    end
    if try == 1 then
      all = drawn
    else
      for r, i in ipairs(left) do
        for part = 1, 3 do all[part]:select(0, i - 1):copy_(drawn[part]:select(0, r - 1)) end
      end
    end
    if #again == 0 then return scenes, all[1], all[2], all[3] end
    left = again
  end
  arguments.fail("datasets.scenes: found no picture of these options that shows %s in %d tries (%s)",
    set.layout.held_out and "a held-out combination" or "all of its objects", tries, tostring(set))
end

return M
