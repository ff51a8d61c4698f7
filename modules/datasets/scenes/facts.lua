--- What a drawn scene shows: boxes, visible shares, places and relations, read from what draw_sprites counted.
local geometry = require "tycho.datasets.scenes.geometry"
local held_out = require "tycho.datasets.scenes.held_out"

local M = {}

--- Adds to each object of a scene its box { left, top, right, bottom } in pixels (beyond the last; all of it, seen or
-- not), visible share and place. boxes and overlap: of the scene, flat, as draw_sprites gives them for `k` rows.
---@return number visible the least share
function M.read(scene, boxes, overlap, k, from, size)
  local least = 1
  for j, object in ipairs(scene.objects) do
    local b, area = (from * k + j - 1) * 5, overlap[(from * k + j - 1) * k + j]
    object.box = { boxes[b + 1], boxes[b + 2], boxes[b + 3], boxes[b + 4] }
    object.visible = area > 0 and boxes[b + 5] / area or 0
    object.place = geometry.place(boxes[b + 1], boxes[b + 2], boxes[b + 3], boxes[b + 4], size)
    if object.visible < least then least = object.visible end
  end
  -- Relations of every pair, the later one (nearer to the viewer) second.
  local relations, n = {}, 0
  local objects = scene.objects
  for j = 2, #objects do
    for i = 1, j - 1 do
      local direction = geometry.direction(objects[i].box, objects[j].box, size)
      if direction then
        n = n + 1
        relations[n] = { a = i, relation = direction, b = j }
      end
      local row = (from * k + i - 1) * k
      if geometry.is_in_front(overlap[row + j], overlap[row + i]) then
        n = n + 1
        relations[n] = { a = j, relation = "in front of", b = i }
      end
    end
  end
  scene.relations = relations
  return least
end

--- Whether a scene shows a combination that only held_out_combinations shows.
function M.has_held_out(scene)
  for _, object in ipairs(scene.objects) do
    if held_out.colour(object.object, object.colour) then return true end
  end
  for _, r in ipairs(scene.relations) do
    if held_out.relation(scene.objects[r.a].object, r.relation, scene.objects[r.b].object) then return true end
  end
  return false
end

return M
