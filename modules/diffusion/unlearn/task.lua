--- What is to be forgotten, in words: the prompts with the concept, the same with something else in its place, and
-- those that are to stay as they are; and pictures of them, which the painter draws as it is where none are given.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local WHO = "unlearn.task"

--- What is to be forgotten, as prompts and pictures.
---@class UnlearnTask
---@field word string        the concept in prompts
---@field forget string[]    prompts with it
---@field anchor string[]    the same, `other` in its place
---@field retain string[]    prompts without it
---@field positions Tensor   bool [#forget, tokens]: where its tokens are in the forget prompts
local Task = {}
Task.__index = Task

-- Where `ids` come one after the other in rows of tokens.
local function positions_of(tokens, ids)
  local n, t, k = tokens.shape[1], tokens.shape[2], #ids
  local found = {}
  for i, row in ipairs(tokens:tolist()) do
    found[i] = {}
    for j = 1, t do found[i][j] = false end
    for j = 1, t - k + 1 do
      local same = true
      for m = 1, k do same = same and row[j + m - 1] == ids[m] end
      if same then
        for m = 1, k do found[i][j + m - 1] = true end
      end
    end
  end
  return ty.tensor(found):reshape(n, t)
end

local function with_spaces(text) return " " .. text .. " " end

--- options: word (the concept as it stands in prompts), other (what comes in its place: "" or a word), prompts (all:
-- those with the word are to be forgotten, the others to be kept), pictures (u8 [#prompts, 3, h, w], what prompts show;
-- drawn by the painter when they are wanted, for at most `most` (64) prompts of each part), paint (options of
-- painter:paint for that).
---@param painter TextToImage
---@param options { word: string, other: string, prompts: string[], pictures?: Tensor, most?: integer, paint?: table }
---@return UnlearnTask
return function(painter, options)
  arguments.expect(WHO, "painter", painter, "a table")
  arguments.expect(WHO, "painter.tokens", painter.tokens, "a function")
  local o = arguments.read(WHO, options, { word = "", other = "", prompts = {}, pictures = arguments.none, most = 64,
    paint = {} }, { prompts = "a list of strings", pictures = "a tensor", most = "an integer >= 1", paint = "a table" })
  if o.word == "" then arguments.fail("%s: word: expected a word of the prompts, got none", WHO) end
  if o.pictures and o.pictures.shape[1] ~= #o.prompts then
    arguments.fail("%s: pictures: expected %d, one for each prompt, got %s", WHO, #o.prompts,
      arguments.describe(o.pictures))
  end
  local self = setmetatable({ word = o.word, forget = {}, anchor = {}, retain = {}, most = o.most, paint = o.paint,
    painter = painter, at = { forget = {}, retain = {} }, all = o.pictures, drawn = {} }, Task)
  local word = o.word:gsub("%p", "%%%0")
  for i, prompt in ipairs(o.prompts) do
    local padded = with_spaces(prompt)
    if padded:find(with_spaces(o.word), 1, true) then
      table.insert(self.forget, prompt)
      table.insert(self.at.forget, i - 1)
      local other = padded:gsub(" " .. word .. " ", o.other == "" and " " or " " .. o.other:gsub("%%", "%%%%") .. " ")
      table.insert(self.anchor, other:match "^ *(.-) *$")
    else
      table.insert(self.retain, prompt)
      table.insert(self.at.retain, i - 1)
    end
  end
  if #self.forget == 0 or #self.retain == 0 then
    arguments.fail("%s: prompts: expected some with '%s' and some without, got %d and %d", WHO, o.word, #self.forget,
      #self.retain)
  end
  local ids = painter.tokenizer:encode(o.word, { special = false }):tolist()
  self.positions = ty.keep(positions_of(painter:tokens(self.forget), ids))
  return self
end
