--- How complex a scene is, from what is known of it: a truth that raters of complexity can be measured by.
local arguments = require "tycho.arguments"

-- Of backgrounds, from 0 to 1: how much there is in them.
local backgrounds = { plain = 0, gradient = 0.2, stripes = 0.5, checks = 0.6, dots = 0.6, noise = 0.5, photo = 1 }

--- The complexity of scenes, from 0 (one object on a plain background) to 1: half of it how many objects there are, a
-- fifth how many kinds, a fifth the background, a tenth how much of the objects is hidden. The weights are this
-- project's own.
---@param scenes table[]  as the field `scene` has them
---@return number[] complexity
return function(scenes)
  local who = "scenes.complexity"
  arguments.expect(who, "scenes", scenes, "a list of tables")
  local result = {}
  for i, scene in ipairs(scenes) do
    arguments.expect(who, "a scene's objects", scene.objects, "a list of tables")
    arguments.expect(who, "a scene's background", scene.background, "a table")
    local kinds, different, least = {}, 0, 1
    for _, object in ipairs(scene.objects) do
      if not kinds[object.object] then different = different + 1 end
      kinds[object.object] = true
      least = math.min(least, object.visible or 1)
    end
    result[i] = 0.5 * (#scene.objects - 1) / 4 + 0.2 * (different - 1) / 4
      + 0.2 * (backgrounds[scene.background.kind] or 0) + 0.1 * (1 - least)
  end
  return result
end
