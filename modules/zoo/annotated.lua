--- What recipes share about a set that was annotated by rules which its names do not tell: crops of objects in scenes,
-- half of whose kinds are two categories each: tinted warmly or not, large or not.
--
--     local categories = zoo.annotated.categories { "dog", "cat", "panda" }
--     local set = zoo.annotated.crops(categories, { kinds = { "dog", "cat", "panda" }, scenes = 1000, seed = 0 })
local ty = require "tycho"
local arguments = require "tycho.arguments"
local datasets = require "tycho.datasets"
local scenes = require "tycho.zoo.scenes"

local M = {}

local warm = { red = true, orange = true, yellow = true, pink = true }

--- What the annotator writes (name), the kind that the name tells, and which objects of it belong (holds), which is
-- known to the set alone.
---@param kinds string[]
---@return {name: string, kind: string, holds: fun(object: table): boolean}[]
function M.categories(kinds)
  arguments.expect("zoo.annotated.categories", "kinds", kinds, "a list of strings")
  local categories = {}
  for i, name in ipairs(kinds) do
    local rules = { { "", function() return true end } }
    if i % 4 == 1 then
      rules = { { " (1)", function(o) return warm[o.colour] ~= nil end },
        { " (2)", function(o) return warm[o.colour] == nil end } }
    elseif i % 4 == 3 then
      rules = { { " (1)", function(o) return o.size == "large" end },
        { " (2)", function(o) return o.size ~= "large" end } }
    end
    for _, rule in ipairs(rules) do
      categories[#categories + 1] = { name = name .. rule[1], kind = name, holds = rule[2] }
    end
  end
  return categories
end

local function article(text) return (text:find "^[aeiou]" and "an " or "a ") .. text end

--- What a label of a kind may say: the kind alone first, sizes, tints.
---@param kind string
---@return string[]
function M.phrases(kind)
  arguments.expect("zoo.annotated.phrases", "kind", kind, "a string")
  local list, tints = { article(kind), "a small " .. kind, "a large " .. kind }, {}
  for name in pairs(datasets.scenes.tints) do tints[#tints + 1] = name end
  table.sort(tints)
  for _, tint in ipairs(tints) do list[#list + 1] = article(tint .. " " .. kind) end
  return list
end

--- Square crops about the boxes of one draw of scenes: pictures f32 [n, 3, 64, 64] from -1 to 1, labels i64 [n] (the
-- category, from 0), of_scene (the number of each crop's scene, from 0). options: kinds (that the scenes show), scenes
-- (1000), seed (0), least (24: pixels of a crop's longer side).
---@param categories table[]  of categories()
---@param options {kinds: string[], scenes?: integer, seed?: integer, least?: integer}
---@return {pictures: Tensor, labels: Tensor, of_scene: integer[]}
function M.crops(categories, options)
  local who = "zoo.annotated.crops"
  arguments.expect(who, "categories", categories, "a list of tables")
  local o = arguments.read(who, options, { kinds = arguments.none, scenes = 1000, seed = 0, least = 24 },
    { kinds = "a list of strings", scenes = "an integer >= 1", seed = "an integer", least = "an integer >= 1" })
  arguments.expect(who, "kinds", o.kinds, "a list of strings")
  local of_kind = {}
  for c, category in ipairs(categories) do
    of_kind[category.kind] = of_kind[category.kind] or {}
    table.insert(of_kind[category.kind], c)
  end
  local set = scenes.set("validation", { "image", "scene", "boxes" }, { objects_of = o.kinds, seed = o.seed })
  local batch = set:batch(ty.arange(o.scenes))
  local side, boxes = set.side, batch.boxes:tolist()
  local crops, labels, of_scene = {}, {}, {}
  for s, scene in ipairs(batch.scene) do
    for k, object in ipairs(scene.objects) do
      local _, left, top, right, bottom = table.unpack(boxes[s][k])
      local size = math.min(side, math.max(right - left, bottom - top) + 4)
      if size - 4 >= o.least then
        local x = math.max(0, math.min(side - size, (left + right - size) // 2))
        local y = math.max(0, math.min(side - size, (top + bottom - size) // 2))
        for _, c in ipairs(of_kind[datasets.scenes.objects[object.object + 1].name] or {}) do
          if categories[c].holds(object) then
            local crop = scenes.pictures(batch.image:select(0, s - 1):narrow(1, y, size):narrow(2, x, size))
            crops[#crops + 1] = crop:unsqueeze(0):interpolate { size = { 64, 64 }, mode = "bilinear" }
            labels[#labels + 1], of_scene[#of_scene + 1] = c - 1, s - 1
          end
        end
      end
    end
  end
  if #crops == 0 then arguments.fail("%s: least: expected crops of so many pixels, got none of %d", who, o.least) end
  return { pictures = ty.concat(crops, 0), labels = ty.tensor(labels), of_scene = of_scene }
end

--- Positions of crops by the numbers of their scenes: of so many folds of the scenes one is held out; of the others a
-- third may be examples (candidates), by which the rest is found (scored). i64 each.
---@param of_scene integer[]  of crops()
---@param fold integer        from 0
---@param folds integer
---@return {held_out: Tensor, candidates: Tensor, scored: Tensor}
function M.parts(of_scene, fold, folds)
  local who = "zoo.annotated.parts"
  arguments.expect(who, "of_scene", of_scene, "a list of integers")
  arguments.expect(who, "folds", folds, "an integer >= 2")
  arguments.expect(who, "fold", fold, ("an integer in [0, %d]"):format(folds - 1))
  local lists = { held_out = {}, candidates = {}, scored = {} }
  for i, s in ipairs(of_scene) do
    local name = s % folds == fold and "held_out" or s // folds % 3 == 0 and "candidates" or "scored"
    table.insert(lists[name], i - 1)
  end
  for name, list in pairs(lists) do lists[name] = ty.tensor(list, { dtype = "i64" }) end
  return lists
end

return M
