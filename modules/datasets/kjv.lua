--- The King James Bible by chapters. Its page, datasets/kjv/README.md, says where it is from; tycho.llm.corpus makes
-- tokens of it.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local random = require "tycho.datasets.random"

local M = {}

local splits = { training = true, held_out = true, all = true }

--- The chapters of the King James Bible as a data set of texts.
---@class Chapters
local Chapters = ty.data.class "Chapters"

function Chapters:describe() return ("of the King James Bible (%s)"):format(self.split) end

--- Chapter i of the split: book ("1 Samuel"), number, text (with its heading) and verses (a list).
---@param i integer
---@return {book: string, number: integer, text: string, verses: string[]}
function Chapters:get(i)
  local text = math.tointeger(i) and self.texts[i + 1]
  if not text then
    arguments.fail("dataset: position %s is out of range for %d items", arguments.describe(i), self.size)
  end
  local verses = {}
  for line in text:gmatch "[^\n]+" do verses[#verses + 1] = line end
  local book, number = table.remove(verses, 1):match "^(.*) (%d+)$"
  return { book = book, number = math.tointeger(number), text = text, verses = verses }
end

--- The verses of the split's chapters as one text for each book, one after another.
---@return table<string, string>
function Chapters:by_book()
  local verses = {}
  for i = 0, self.size - 1 do
    local chapter = self:get(i)
    local list = verses[chapter.book] or {}
    verses[chapter.book] = table.move(chapter.verses, 1, #chapter.verses, #list + 1, list)
  end
  for book, list in pairs(verses) do verses[book] = table.concat(list, " ") end
  return verses
end

--- datasets.load("kjv", options). options: split ("training"; "held_out": every tenth chapter, which are those that
-- llm.corpus holds out; "all"), books (66, so many of them, from Genesis on).
---@param options? {split: string, books: integer}
---@return Chapters
function M.load(options)
  local o = arguments.read("datasets.kjv", options, { split = "training", books = 66 },
    { split = "a string", books = "an integer in [1, 66]" })
  if not splits[o.split] then
    arguments.fail("datasets.kjv: split: there is no \"%s\"; there are: all, held_out, training%s", o.split,
      ty.core.nearest(o.split, splits))
  end
  local chapters = ty.data.documents(ty.data.kjv { books = o.books })
  local dealt, rest = ty.data.deal(chapters, 10, { 10 })
  local texts = o.split == "all" and chapters or o.split == "held_out" and dealt[10] or rest
  return setmetatable({ texts = texts, size = #texts, split = o.split }, Chapters)
end

--- What datasets.show draws: the first verses of some chapters, a line for each.
---@param options {path: string, split?: string, count: integer, seed: integer}
---@return string path
function M.show(options)
  local o = arguments.read("datasets.show", options, { path = "kjv.png", split = "training", count = 24, seed = 0,
    columns = arguments.none }, { path = "a string", split = "a string", count = "an integer >= 1",
    seed = "an integer", columns = "an integer >= 1" })
  local set, lines = M.load { split = o.split }, {}
  local draw = random.new(o.seed, "show", 0)
  for k = 1, math.min(o.count, #set) do
    local chapter = set:get(draw:integer(0, #set - 1))
    lines[k] = ("%s %d: %s"):format(chapter.book, chapter.number, chapter.verses[1])
    if #lines[k] > 132 then lines[k] = lines[k]:sub(1, 130) .. ".." end
  end
  ty.plot.grid(ty.full({ #lines, 1, 2, 800 }, 60, { dtype = "u8" }), { columns = 1, labels = lines }):save(o.path)
  return o.path
end

return M
