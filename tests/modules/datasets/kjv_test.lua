-- The King James Bible by chapters.
local here = (arg and arg[0]:match ".*/" or "tests/modules/datasets/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local datasets, llm = require "tycho.datasets", require "tycho.llm"

check.test("chapters with their verses", function()
  local all = datasets.load("kjv", { split = "all" })
  check.equal(#all, 1189)
  local first, last, verses = all:get(0), all:get(1188), 0
  check.equal({ first.book, first.number, #first.verses, last.book, last.number },
    { "Genesis", 1, 31, "Revelation", 22 })
  check.equal(first.verses[1], "In the beginning God created the heaven and the earth.")
  for _, chapter in all:each() do verses = verses + #chapter.verses end
  check.equal(verses, 31102)
end)

check.test("the held-out chapters are those of llm.corpus, and no others are trained on", function()
  local training, held_out = datasets.load "kjv", datasets.load("kjv", { split = "held_out" })
  check.equal({ #training, #held_out }, { 1071, 118 })
  local seen = {}
  for _, chapter in training:each() do seen[chapter.text] = true end
  for _, chapter in held_out:each() do check.ok(not seen[chapter.text]) end
  local few, folder = datasets.load("kjv", { split = "held_out", books = 1 }), os.tmpname()
  os.remove(folder)
  local corpus = llm.corpus.open { folder = folder, books = 1, vocabulary = 257 }
  local texts = {}
  for i, chapter in few:each() do texts[i + 1] = chapter.text end
  check.equal(texts, corpus.documents.held_out)
  os.execute("rm -r '" .. folder .. "'")
end)

check.test("page, sheet, mistakes", function()
  check.ok(datasets.info("kjv").licence:find "public domain")
  local path = os.tmpname() .. ".png"
  check.equal(datasets.show("kjv", { path = path, count = 3 }), path)
  check.equal(ty.io.load_image(path).shape[1], 1)
  os.remove(path)
  check.fails(function() datasets.load("kjv", { split = "validaton" }) end, "there is no \"validaton\"; there are")
  check.fails(function() datasets.load("kjv", { books = 67 }) end, "books: expected an integer in [1, 66]")
  check.fails(function() datasets.load("kjv"):get(1071) end, "position 1071 is out of range for 1071")
end)

check.test("verses by book", function()
  local books = datasets.load("kjv", { split = "all", books = 2 }):by_book()
  local count = 0
  for _ in pairs(books) do count = count + 1 end
  check.equal(count, 2)
  check.ok(books.Genesis:find("In the beginning God created the heaven and the earth. And the earth", 1, true) == 1)
  check.equal(books.Exodus:sub(-1), ".")
end)

check.finish()
