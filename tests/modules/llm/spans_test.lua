-- Entities as tags: spans and scores are those of seqeval on 1,000 random texts, many of them malformed.
local here = (arg and arg[0]:match ".*/" or "tests/modules/llm/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local spans = require("tycho.llm").spans

local letters = { ["."] = "O", A = "B-a", a = "I-a", B = "B-b", b = "I-b", C = "B-c", c = "I-c" }
local function tags_of(text)
  local list = {}
  for letter in text:gmatch "." do list[#list + 1] = letters[letter] end
  return list
end

check.test("scores of seqeval", function()
  local gold, predicted, scores = {}, {}, {}
  for line in io.lines(here .. "../fixtures/spans_seqeval.txt") do
    local one, other, there, found, right = line:match "^(%S+) (%S+) (%d+) (%d+) (%d+)$"
    if one then
      gold[#gold + 1], predicted[#predicted + 1] = tags_of(one), tags_of(other)
      local score = spans.score({ tags_of(one) }, { tags_of(other) })
      check.equal({ score.there, score.found, score.right }, { tonumber(there), tonumber(found), tonumber(right) })
    else
      for number in line:gmatch "%S+" do scores[#scores + 1] = tonumber(number) end
    end
  end
  check.equal(#gold, 1000)
  local all = spans.score(gold, predicted)
  check.close(all.precision, scores[1], 1e-12)
  check.close(all.recall, scores[2], 1e-12)
  check.close(all.f1, scores[3], 1e-12)
  for i, kind in ipairs { "a", "b", "c" } do check.close(all.kinds[kind].f1, scores[3 + i], 1e-12) end
  check.equal(spans.score(gold, gold).f1, 1.0)
end)

check.test("one rule for what is malformed", function()
  check.equal(spans.of { "I-a", "I-a", "O", "I-b", "I-a" }, { { kind = "a", first = 1, last = 2 },
    { kind = "b", first = 4, last = 4 }, { kind = "a", first = 5, last = 5 } })
  check.equal(spans.of { "B-a", "B-a", "I-a", "I-b" }, { { kind = "a", first = 1, last = 1 },
    { kind = "a", first = 2, last = 3 }, { kind = "b", first = 4, last = 4 } })
  check.equal(spans.of {}, {})
end)

check.test("tags and spans are each other's inverse", function()
  local tags = { "O", "B-place", "I-place", "B-place", "O", "B-person" }
  check.equal(spans.tags(spans.of(tags), 6), tags)
end)

check.test("some of the entities alone, of both sides; nothing found is no error", function()
  local gold = { { "B-a", "O", "B-b" }, { "B-a" } }
  local predicted = { { "B-a", "B-b", "B-b" }, { "O" } }
  local score = spans.score(gold, predicted, function(span, i) return span.kind == "b" and i == 1 end)
  check.equal({ score.there, score.found, score.right }, { 1, 2, 1 })
  check.close(score.f1, 2 / 3, 1e-12)
  check.equal(spans.score({ { "O" } }, { { "O" } }).f1, 0.0)
end)

check.test("mistakes", function()
  check.fails(function() spans.of { "B-a", "X" } end, 'llm.spans.of: tags: expected "O", "B-KIND" or "I-KIND", got "X"')
  check.fails(function() spans.score({ { "O" } }, {}) end, "expected tags of as many texts, got 1 and 0")
  check.fails(function() spans.score({ { "O" } }, { { "O", "O" } }) end, "text 1: expected as many tags, got 1 and 2")
  check.fails(function() spans.tags({ { kind = "a", first = 1, last = 3 } }, 2) end, "expected entity 1 within 2 words")
  check.fails(function()
    spans.tags({ { kind = "a", first = 1, last = 2 }, { kind = "b", first = 2, last = 2 } }, 2)
  end, "word 2 is in two entities")
end)

check.test("the gazetteer", function()
  local labelled = { { words = { "Moab", "went", "Moab" }, tags = { "B-place", "O", "B-person" } },
    { words = { "Moab", "went" }, tags = { "B-place", "B-person" } } }
  local texts = { { words = { "Moab", "went", "Nebo" } } }
  local tags = spans.gazetteer(labelled, texts, function(text, k)
    return text.words[k] == "Nebo" and "B-place" or "O"
  end)
  check.equal(tags, { { "B-place", "B-person", "B-place" } }, "of equally frequent tags the first in the alphabet")
  check.fails(function() spans.gazetteer({ { words = { "a" }, tags = {} } }, texts, print) end,
    "llm.spans.gazetteer: labelled text 1: expected a tag for each word, got none for word 1")
end)

check.finish()
