--- Entities in text as tags of its words, and how well they are found: exact spans. Ramshaw and Marcus 1995 (tags);
-- Tjong Kim Sang and De Meulder 2003 (scores).
--
--     llm.spans.of { "B-person", "I-person", "O", "B-place" }  --> { { kind = "person", first = 1, last = 2 }, ... }
--     llm.spans.score(gold, predicted).f1
--
-- Tags: "O", "B-KIND" for the first word of an entity, "I-KIND" for those after it. One rule for what is malformed: an
-- "I-KIND" that follows "O" or another kind begins an entity.
local arguments = require "tycho.arguments"

local M = {}

--- The entities of a list of tags, in order; words count from 1.
---@param tags string[]
---@return {kind: string, first: integer, last: integer}[]
function M.of(tags)
  local who = "llm.spans.of"
  arguments.expect(who, "tags", tags, "a list of strings")
  local list, open = {}, nil
  for i, tag in ipairs(tags) do
    local mark, kind = tag:match "^([BI])%-(.+)$"
    if not mark and tag ~= "O" then
      arguments.fail('%s: tags: expected "O", "B-KIND" or "I-KIND", got "%s" as element %d', who, tag, i)
    end
    if mark and not (mark == "I" and open and open.kind == kind) then
      open = { kind = kind, first = i, last = i }
      list[#list + 1] = open
    elseif mark then
      open.last = i
    else
      open = nil
    end
  end
  return list
end

--- Tags of `count` words, a million at most, that have these entities. Entities do not overlap.
---@param list {kind: string, first: integer, last: integer}[]
---@param count integer
---@return string[] tags
function M.tags(list, count)
  local who = "llm.spans.tags"
  arguments.expect(who, "list", list, "a list of tables")
  arguments.expect(who, "count", count, "an integer in [0, 1000000]")
  local tags = {}
  for i = 1, count do tags[i] = "O" end
  for i, span in ipairs(list) do
    arguments.expect(who, ("kind of entity %d"):format(i), span.kind, "a string")
    arguments.expect(who, ("first of entity %d"):format(i), span.first, "an integer >= 1")
    arguments.expect(who, ("last of entity %d"):format(i), span.last, "an integer >= 1")
    if span.last < span.first or span.last > count then
      arguments.fail("%s: list: expected entity %d within %d words, got %d to %d", who, i, count, span.first, span.last)
    end
    for k = span.first, span.last do
      if tags[k] ~= "O" then arguments.fail("%s: list: word %d is in two entities", who, k) end
      tags[k] = (k == span.first and "B-" or "I-") .. span.kind
    end
  end
  return tags
end

local function rates(found, there, right)
  local precision, recall = found > 0 and right / found or 0.0, there > 0 and right / there or 0.0
  return { precision = precision, recall = recall,
    f1 = precision + recall > 0 and 2 * precision * recall / (precision + recall) or 0.0, found = found,
    there = there, right = right }
end

--- Precision, recall and F1 of exact spans over all texts together (micro), and by kind: an entity is right when its
-- kind, first and last word are. keep(span, i): only the entities of text i for which it is true count, of both sides.
---@param gold string[][]       the tags of each text
---@param predicted string[][]  as many, of as many words each
---@param keep? fun(span: table, text: integer): boolean
---@return {precision: number, recall: number, f1: number, found: integer, there: integer, right: integer, kinds: table}
function M.score(gold, predicted, keep)
  local who = "llm.spans.score"
  arguments.expect(who, "gold", gold, "a list of tables")
  arguments.expect(who, "predicted", predicted, "a list of tables")
  arguments.expect(who, "keep", keep, "a function or nil")
  if #gold ~= #predicted then
    arguments.fail("%s: expected tags of as many texts, got %d and %d", who, #gold, #predicted)
  end
  local counts, all = {}, { 0, 0, 0 }
  local function add(kind, which)
    counts[kind] = counts[kind] or { 0, 0, 0 }
    counts[kind][which], all[which] = counts[kind][which] + 1, all[which] + 1
  end
  for i, tags in ipairs(gold) do
    if #tags ~= #predicted[i] then
      arguments.fail("%s: text %d: expected as many tags, got %d and %d", who, i, #tags, #predicted[i])
    end
    local there = {}
    for _, span in ipairs(M.of(tags)) do
      if not keep or keep(span, i) then
        there[span.first] = span
        add(span.kind, 2)
      end
    end
    for _, span in ipairs(M.of(predicted[i])) do
      if not keep or keep(span, i) then
        add(span.kind, 1)
        local other = there[span.first]
        if other and other.last == span.last and other.kind == span.kind then add(span.kind, 3) end
      end
    end
  end
  local result = rates(all[1], all[2], all[3])
  result.kinds = {}
  for kind, c in pairs(counts) do result.kinds[kind] = rates(c[1], c[2], c[3]) end
  return result
end

--- Tags without a model, which taggers have to beat: for each word the tag that it has most often in the labelled texts
-- (of equally frequent ones the first in the alphabet), for others what unknown(text, k) says of word k of a text.
---@param labelled {words: string[], tags: string[]}[]
---@param texts {words: string[]}[]
---@param unknown fun(text: table, k: integer): string
---@return string[][]  tags of each of `texts`
function M.gazetteer(labelled, texts, unknown)
  local who = "llm.spans.gazetteer"
  arguments.expect(who, "labelled", labelled, "a list of tables")
  arguments.expect(who, "texts", texts, "a list of tables")
  arguments.expect(who, "unknown", unknown, "a function")
  local counts, best, result = {}, {}, {}
  for i, text in ipairs(labelled) do
    arguments.expect(who, ("words of labelled text %d"):format(i), text.words, "a list of strings")
    arguments.expect(who, ("tags of labelled text %d"):format(i), text.tags, "a list of strings")
    for k, word in ipairs(text.words) do
      local of, tag = counts[word] or {}, text.tags[k]
      if not tag then
        arguments.fail("%s: labelled text %d: expected a tag for each word, got none for word %d", who, i, k)
      end
      counts[word], of[tag] = of, (of[tag] or 0) + 1
      local most = best[word]
      if not most or of[tag] > of[most] or of[tag] == of[most] and tag < most then best[word] = tag end
    end
  end
  for i, text in ipairs(texts) do
    arguments.expect(who, ("words of text %d"):format(i), text.words, "a list of strings")
    result[i] = {}
    for k, word in ipairs(text.words) do result[i][k] = best[word] or unknown(text, k) end
  end
  return result
end

return M
