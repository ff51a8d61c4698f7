-- Pictures of a folder by words
-- claim: the photograph that a sentence describes is the first of those that are found
-- system: a CLIP or SigLIP, published or of the zoo, and an index file that is kept beside the pictures
-- paper: Radford et al. 2021, "Learning Transferable Visual Models From Natural Language Supervision"
-- time: seconds; the first time as long as reading the pictures takes
--
-- ./run recipes/vlm/search.lua "a red car" path/of/pictures
--
-- Without a folder, scenes are drawn into one, and each is looked for by its own caption among all.
local ty = require "tycho"
local datasets, vlm, zoo = require "tycho.datasets", require "tycho.vlm", require "tycho.zoo"

-- The text and the folder may stand first, without their names.
local words = { table.unpack(arg) }
for i, name in ipairs { "--text", "--folder" } do
  if not words[2 * i - 1] or words[2 * i - 1]:sub(1, 1) == "-" then break end
  table.insert(words, 2 * i - 1, name)
end
local r = ty.recipe.declare({
  args = {
    { "text", "", "what is looked for" },
    { "folder", "", "a folder with PNG, JPEG and WebP files (none: scenes that are drawn)" },
    { "model", "scene-clip", "a folder with config.json and weights, or the name of a model of the zoo" },
    { "count", 10, "pictures that are shown" },
    { "scenes", 300, "that are drawn where there is no folder", quick = 40 },
    { "among", 100, "scenes of which each caption finds its own", quick = 20 },
  },
}, words)
local args = r.args
local path = args.model
if not ty.io.stat(path .. "/config.json") then path = zoo.path(path) end
local encoder = vlm.gallery_encoder(path, { device = r.device, dtype = "f32" })

local folder, captions = args.folder, nil
if folder == "" then
  folder, captions = r:path "scenes", {}
  ty.io.mkdir(folder)
  local set = datasets.load("scenes", { split = "validation", fields = { "image", "caption" } })
  for i = 0, args.scenes - 1 do
    local item = set:get(r.seed * 1000 + i)
    ty.io.save_image(("%s/%04d.png"):format(folder, i), item.image)
    captions[i + 1] = item.caption
  end
end

local began = ty.system.clock()
local gallery = vlm.gallery(folder, encoder, { on_progress = function(done, all)
  if done % 512 < 32 and done < all then r:say("%d of %d pictures", done, all) end
end })
local seconds = ty.system.clock() - began
for picture, why in pairs(gallery.problems) do r:say("left out: %s: %s", picture, why) end
r:say("%d pictures, %d encoded in %.1f s (%.0f a minute)", #gallery.paths, gallery.encoded, seconds,
  gallery.encoded / seconds * 60)

local text = args.text ~= "" and args.text or captions and captions[1]
local found = text and gallery:search(text, args.count) or {}
if text then r:say("%s:", text) end
for _, one in ipairs(found) do r:say("  %.3f  %s", one.score, one.path) end
if #found > 0 then
  local list = {}
  for i, one in ipairs(found) do
    list[i] = ty.io.decode_image(ty.io.read(one.path), { channels = 3, size = { 96, 96 } })
  end
  ty.plot.grid(ty.stack(list, 0), { columns = 5 }):save(r:path "found.png")
end

-- How often it works: captions of scenes among a hundred, where these are known.
local rows = {}
if captions then
  local first, asked = 0, 0
  for from = 1, #captions - args.among + 1, args.among do
    local part = gallery.features:narrow(0, from - 1, args.among)
    for i = 0, args.among - 1, 4 do
      local wanted = encoder:texts({ captions[from + i] }):select(0, 0):to { device = part.device }
      local best = part:matmul(wanted):argmax():item()
      first, asked = first + (captions[from + best] == captions[from + i] and 1 or 0), asked + 1
    end
  end
  rows[1] = { claim = "scenes that their caption finds first among a hundred, share", measured = first / asked,
    bar = 0.5 }
end
rows[#rows + 1] = { claim = "pictures a minute", measured = gallery.encoded / seconds * 60, bar = 2000,
  judged = gallery.encoded >= 100 and nil }
os.exit(r:finish(rows))
