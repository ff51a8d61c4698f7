-- What models that learn from captions share: grades that the truth gives, wrong captions, how a model begins.
local here = (arg and arg[0]:match ".*/" or "tests/modules/zoo/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local vlm, zoo = require "tycho.vlm", require "tycho.zoo"
local captioner = zoo.captioner

check.test("a scene's own caption has the best grade, and others the share that is true of it", function()
  local words, sum, count = {}, 0, 0
  for k, word in ipairs(vlm.grader.words) do words[word] = k end
  for _, batch in ipairs(captioner.graded(60, 2)) do
    for _, turns in ipairs(batch.questions) do
      check.equal(#turns, 3)
      check.equal(turns[1].answer, "five")
      for k = 2, 3 do sum, count = sum + words[turns[k].answer], count + 1 end
    end
  end
  check.equal(count, 120)
  check.ok(sum / count < 2.5)
end)

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
