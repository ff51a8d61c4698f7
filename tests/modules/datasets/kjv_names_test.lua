-- Names of the Bible: tags by lists and by context, and corpora that keep apart what is to be tested.
local here = (arg and arg[0]:match ".*/" or "tests/modules/datasets/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local datasets = require "tycho.datasets"
local names = datasets.kjv_names

check.test("tags", function()
  local common = { ["and"] = true, ["then"] = true }
  local text = names.annotate("And Moses went up out of Egypt, he and forty and two Levites.", common)
  check.equal(text.words, { "And", "Moses", "went", "up", "out", "of", "Egypt", "he", "and", "forty", "and", "two",
    "Levites" })
  check.equal(text.tags, { "O", "B-person", "O", "O", "O", "O", "B-place", "O", "O", "B-number", "I-number", "I-number",
    "B-people" })
  check.equal({ text.starts[1], text.starts[2], text.starts[8] }, { true, false, true })
  check.equal(text.names, 6)
  local function kind(verse, i) return names.annotate(verse, common).tags[i] end
  check.equal(kind("And Israel said unto him", 2), "B-person")
  check.equal(kind("and he dwelt in Israel then", 5), "B-place")
  check.equal(kind("and the elders of Israel went", 5), "B-people")
  check.equal(names.annotate("And Zerubabbel went up there", common), nil, "a name that no list has")
  check.equal(names.annotate("And Moses went", common), nil, "too short")
  check.fails(function() names.annotate(5, common) end, "kjv_names.annotate: verse: expected a string, got 5")
end)

check.test("corpora", function()
  local corpora = names.corpora { every = 12 }
  for _, part in ipairs { "general", "domain", "training", "testing" } do check.ok(#corpora[part] > 0, part) end
  local held, known = 0, {}
  for _, class in ipairs(names.classes) do known[class] = true end
  for _, text in ipairs(corpora.training) do
    check.equal({ text.back, text.names > 0, #text.tags }, { false, true, #text.words })
    for _, tag in ipairs(text.tags) do if not known[tag] then check.equal(tag, "a class") end end
  end
  for _, text in ipairs(corpora.testing) do held = held + (text.back and 1 or 0) end
  check.ok(held > 0, "names that training does not have")
  check.fails(function() names.corpora { every = 0 } end, "kjv_names.corpora: every: expected an integer >= 1, got 0")
end)

check.test("prompts of books that are refused", function()
  local prompts = datasets.refused_books.new(3)
  local list = prompts:draw("audit", prompts.permitted, "seen", 5)
  check.equal(#list, 5)
  for _, item in ipairs(list) do
    check.ok(item.prompt:find "^From .*, go on: " or item.prompt:find " says: ", item.prompt)
    check.ok(item.answer:find "^ %S+$", item.answer)
  end
  check.equal(prompts:draw("audit", prompts.permitted, "seen", 5), list, "the same each time")
  local other = prompts:draw("audit", prompts.permitted, "seen", 5, { stream = "b", refuse = true })
  check.ok(other[1].prompt ~= list[1].prompt)
  check.equal(other[1].answer, datasets.refused_books.refusal)
  check.equal(prompts:draws { { "audit", prompts.permitted, "seen", 5 },
    { "audit", prompts.permitted, "seen", 2, { stream = "b", refuse = true } } },
    { list[1], list[2], list[3], list[4], list[5], other[1], other[2] })
  check.fails(function() prompts:draw("audit", { "Genesys" }, "seen", 1) end, 'there is no "Genesys" in audit')
  check.fails(function() prompts:draw("audit", {}, "seen", 1) end, "books: expected at least one, got none")
end)

check.finish()
