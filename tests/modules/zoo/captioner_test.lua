-- What models that learn from captions share: wrong captions, names, how a model begins.
local here = (arg and arg[0]:match ".*/" or "tests/modules/zoo/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local datasets, zoo = require "tycho.datasets", require "tycho.zoo"
local captioner = zoo.captioner

check.test("so many captions are another's, and those that are not stay", function()
  local noisy, clean = captioner.pairs("training", 300, { label_noise = 0.4 }), captioner.pairs("training", 300)
  local wrong, share = noisy.wrong:tolist(), 0
  for i, caption in ipairs(clean.captions) do
    share = share + wrong[i] / 300
    if wrong[i] == 0 then check.equal(noisy.captions[i], caption) end
  end
  check.ok(share > 0.3 and share < 0.5)
  check.equal(clean.wrong:sum():item(), 0)
end)

check.test("names are those of the first object, with its tint", function()
  local some = captioner.pairs("validation", 40, { objects = { 1, 1 } })
  local objects, looks, tinted = some.objects:tolist(), some.looks:tolist(), 0
  for i, name in ipairs(some.names) do
    local object = datasets.scenes.objects[objects[i] + 1].name
    local tint
    for colour, place in pairs(datasets.scenes.tints) do if place == looks[i] then tint = colour end end
    check.equal(name, tint and tint .. " " .. object or object)
    check.ok(some.captions[i]:find(object, 1, true))
    tinted = tinted + (tint and 1 or 0)
  end
  check.ok(tinted > 5 and tinted < 35)
end)

check.test("a model begins with a tower that stays and a language model that has read", function()
  local tokenizer = zoo.tokenizer "scene-vlm"
  local size = { width = 32, layers = 1, heads = 2, inner = 48 }
  ty.manual_seed(1)
  local language = captioner.begin(tokenizer, size).language_model
  local model = captioner.begin(tokenizer, size, language)
  local given = zoo.load "scene-vlm"
  for name, tensor in pairs(model.vision_tower:state_dict()) do
    check.ok(ty.equal(tensor, given.vision_tower:state_dict()[name]), name)
  end
  for name, p in model:named_parameters() do check.equal(p.requires_grad, not name:find "^vision_tower", name) end
  check.ok(ty.equal(model.language_model.model.embed_tokens.weight, language.model.embed_tokens.weight))
end)

check.test("texts alone begin with no picture, and all of them is learnt", function()
  local texts = captioner.texts(zoo.answerer.dialogue(zoo.tokenizer "scene-vlm", 0), 5)
  check.ok(#texts > 5)
  for _, one in ipairs(texts) do
    for k, id in ipairs(one.ids) do check.ok(id ~= 1 and one.learnt[k]) end
  end
end)

check.finish()
