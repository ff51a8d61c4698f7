-- What the recipes of scenes share: the tokenizer of captions, single emoji, and the labels of judges.
local here = (arg and arg[0]:match ".*/" or "tests/modules/zoo/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local datasets, zoo = require "tycho.datasets", require "tycho.zoo"

check.test("the tokenizer of captions writes CLIP's marks and is read back the same", function()
  local tokenizer = zoo.scenes.tokenizer(200, 400, { "Rolling on the floor" })
  local words = { "Two red apples on a blue background", "a pig" }
  local tokens = zoo.scenes.tokens(tokenizer, words, 48)
  check.equal(tokens.shape[1], 2)
  for i, text in ipairs(words) do
    local row = tokens[i - 1]:tolist()
    check.equal(row[1], tokenizer.bos)
    local ends = 0
    for k = 2, #row do
      if row[k] == tokenizer.eos then
        ends = k
        break
      end
    end
    for k = ends, #row do check.equal(row[k], tokenizer.eos) end
    check.equal(tokenizer:decode(table.move(row, 2, ends - 1, 1, {})), text:lower())
  end
  check.equal(zoo.scenes.tokens(tokenizer, words, 5).shape, { 2, 5 })
  check.equal(zoo.scenes.tokens(tokenizer, words, 5)[0][4]:item(), tokenizer.eos)
  local folder = os.tmpname()
  os.remove(folder)
  ty.io.mkdir(folder)
  tokenizer:save(folder)
  local again = ty.tokenizer.load(folder)
  check.equal(again:encode_batch(words):tolist(), tokens:tolist())
  check.equal({ again.bos, again.eos, again.pad }, { 0, 1, 1 })
end)

check.test("single emoji are none of the objects that are held out, on colours where they are transparent", function()
  local emoji = zoo.scenes.emoji()
  local held_out, names = 0, {}
  for _, name in ipairs(emoji.names) do names[name] = true end
  for _, object in ipairs(datasets.scenes.objects) do
    if object.held_out then
      held_out = held_out + 1
      check.ok(not names[object.emoji], object.emoji)
    end
  end
  check.equal(held_out, 10)
  ty.manual_seed(4)
  local shown, places = emoji:draw(3)
  check.equal(shown.shape, { 3, 3, 64, 64 })
  local pictures = emoji.pictures:index_select(0, places)
  for i = 0, 2 do
    local alpha, x = pictures[i][3], pictures[i]:narrow(0, 0, 3):to "f32" / 127.5 - 1
    local solid, clear = alpha:eq(255), alpha:eq(0)
    for c = 0, 2 do
      check.ok((shown[i][c] - x[c]):abs():masked_fill(solid:logical_not(), 0):max():item() < 1e-5)
      local background = shown[i][c]:masked_select(clear)
      check.ok((background:max() - background:min()):item() < 1e-6)
    end
  end
end)

check.test("labels of a judge: sentences, then subgroups", function()
  local labels, subgroups = zoo.judge.labels(), datasets.emoji.subgroups()
  check.equal(#labels, 1900 + #subgroups)
  check.equal(labels[1], "dog")
  check.equal(labels[1901], "face-smiling")
  local seen = {}
  for _, name in ipairs(subgroups) do
    check.ok(not seen[name], name)
    seen[name] = true
  end
  check.ok(seen["food-fruit"] and seen["animal-mammal"])
end)

check.test("cells of scenes: shares of what is on top, counted pixel by pixel", function()
  local set = zoo.scenes.set("validation", { "image", "owner", "boxes", "scene" })
  local batch = set:batch { 3, 11, 12, 40 }
  local objects, colours = zoo.judge.cells(batch, 8)
  local none = 1 -- behind an object's own colours and the tints
  for _ in pairs(datasets.scenes.tints) do none = none + 1 end
  check.equal({ objects.shape, colours.shape }, { { 4, 64, 101 }, { 4, 64, none + 1 } })
  for i, scene in ipairs(batch.scene) do
    local owner = batch.owner[i - 1]:tolist()
    for cell = 0, 63 do
      local wanted, tinted = {}, {}
      for y = cell // 8 * 8 + 1, cell // 8 * 8 + 8 do
        for x = cell % 8 * 8 + 1, cell % 8 * 8 + 8 do
          local object = scene.objects[owner[y][x] + 1]
          local number = object and object.object or 100
          local look = not object and none or object.colour and datasets.scenes.tints[object.colour] or 0
          wanted[number] = (wanted[number] or 0) + 1 / 64
          tinted[look] = (tinted[look] or 0) + 1 / 64
        end
      end
      local got, seen = objects[i - 1][cell], colours[i - 1][cell]
      for number, share in pairs(wanted) do check.close(got[number]:item(), share, 1e-6) end
      for look, share in pairs(tinted) do check.close(seen[look]:item(), share, 1e-6) end
      check.close(got:sum():item(), 1, 1e-5)
      check.close(seen:sum():item(), 1, 1e-5)
    end
  end
end)

check.test("a judge that knows the labels is right, one that says nothing is not", function()
  local batch = zoo.scenes.set("validation", { "image", "statements", "labels" }):batch(ty.arange(60))
  local sure = batch.statements:to "f32" * 20 - 10
  local at = 0
  local Oracle = ty.nn.module "Oracle"
  function Oracle:forward(x)
    local rows = sure:narrow(0, at, x.shape[1])
    at = at + x.shape[1]
    return ty.concat({ rows, ty.zeros(x.shape[1], #datasets.emoji.subgroups()) }, 1)
  end
  local oracle = Oracle()
  local found = zoo.judge.measure(oracle, "validation", 60)
  check.equal({ found.object, found.colour, found.place, found.mean_average_precision }, { 1, 1, 1, 1 })
  at, sure = 0, ty.zeros(60, 1900) - 1
  found = zoo.judge.measure(oracle, "validation", 60)
  check.equal({ found.object, found.colour, found.place }, { 0, 0, 0 })
  check.ok(found.mean_average_precision < 0.3)
end)

check.test("pictures some at a time, and captions, by a CLIP", function()
  local clip, words = zoo.load "scene-clip", zoo.tokenizer "scene-clip"
  local batch = zoo.scenes.set("validation", { "image", "caption" }):batch(ty.arange(70))
  local places = {}
  local seen = zoo.scenes.through(batch.image, function(x, start, rows)
    places[#places + 1] = { start, rows }
    return x:mean { 2, 3 }
  end)
  check.equal(places, { { 0, 64 }, { 64, 6 } })
  check.close(seen:flatten():tolist(), (batch.image:to "f32" / 127.5 - 1):mean({ 2, 3 }):flatten():tolist(), 1e-6)
  local texts = { batch.caption[1], batch.caption[2] }
  local want = ty.no_grad(function() return clip:text_features(zoo.scenes.tokens(words, texts, 48)) end)
  check.equal(ty.no_grad(zoo.scenes.read, clip, words, texts):tolist(), want:tolist())
  check.fails(function() zoo.scenes.through(3, print) end, "zoo.scenes.through: image: expected a tensor, got 3")
  check.fails(function() zoo.scenes.read(3, words, texts) end, "zoo.scenes.read: clip: expected a module, got 3")
end)

check.finish()
