--- What a report of a volume says, as facts, and how two reports differ in them: errors by kind, precision, recall, F1.
-- The grammar is that of tycho.datasets.volumes.report; a sentence that is not of it is given back unread. Reports are
-- judged by what they say and not by their words, as CheXprompt's errors are (Zambrano Chaves et al. 2024, "Towards a
-- clinically accessible radiology foundation model"), whose kinds without earlier pictures are these four: a false
-- finding, a missed one, a wrong place, a wrong size.
--
--     local facts = datasets.volumes.facts
--     local score = facts.score(text, item.findings)       -- { wrong = { false_finding = 0, ... }, right = 2 ... }
--     local score = facts.score(text, item.findings)       -- { wrong = { false_finding = 0, ... }, right = 2, ... }
local arguments = require "tycho.arguments"
local findings = require "tycho.datasets.volumes.findings"
local report = require "tycho.datasets.volumes.report"

local M = {}

--- Kinds of errors, in the order of tables.
M.errors = { "false_finding", "missed_finding", "wrong_place", "wrong_size" }

--- Parts of the body that a report is split by, and the organs of each.
M.sections = { { "right lung", { "right lung" } }, { "left lung", { "left lung" } },
  { "heart and aorta", { "heart", "aorta" } }, { "liver and spleen", { "liver", "spleen" } } }

--- Kinds of findings, and by kind the sentences that deny it.
M.kinds, M.absent = findings.kinds, report.absent

-- ---- reading ----

local denials, normal = {}, {}
for kind, list in pairs(report.absent) do
  for _, text in ipairs(list) do denials[text] = kind end
end
for _, text in ipairs(report.nothing) do normal[text] = true end

local kinds = { { "nodule", "nodule" }, { "cyst", "cyst" }, { "calcif", "calcification" }, { "effusion", "effusion" },
  { "fluid", "effusion" }, { "missing", "missing part" }, { "absence", "missing part" },
  { "has no %a+ part", "missing part" } }

local function organ_of(text)
  local side = text:match "(%a+) lung" -- "lower left lung" and "left lung" alike
  if side ~= "left" and side ~= "right" then side = nil end
  if side then return side .. " lung", side end
  for _, organ in ipairs { "heart", "aorta", "liver", "spleen" } do
    if text:find(organ, 1, true) then return organ end
  end
  if text:find("pericardial", 1, true) then return "heart" end
  side = text:match "(%a+) side" or text:match "(%a+) pleural"
  if side == "left" or side == "right" then return side .. " lung", side end
end

-- The finding of a sentence in small letters, or nil where it is of no grammar.
local function finding_of(text)
  local kind
  for _, pair in ipairs(kinds) do
    if not kind and text:find(pair[1]) then kind = pair[2] end
  end
  local organ, side = organ_of(text)
  if not kind or not organ then return nil end
  local f = { kind = kind, organ = organ, side = side }
  local part = text:match "%f[%a](upper)%f[%A]" or text:match "%f[%a](lower)%f[%A]" or text:match "%f[%a](middle)%f[%A]"
  f.part = part or text:find "%f[%a]mid%f[%A]" and "middle" or nil
  local number, unit = text:match "(%d+) (%am)%f[%A]"
  if number and (unit == "mm" or unit == "cm") then
    f.size = math.tointeger(number) * (unit == "cm" and 10 or 1)
  elseif kind == "effusion" then
    f.amount = text:match "%f[%a](small)%f[%A]" or text:match "%f[%a](moderate)%f[%A]"
      or text:match "%f[%a](large)%f[%A]"
  end
  return f
end

-- The sentences of a report in its own letters, without the mark at their ends.
local function sentences(text)
  local list = {}
  for part in text:gmatch "[^;.\n]+" do
    part = part:match "^%s*(.-)%s*$"
    if part ~= "" then list[#list + 1] = part end
  end
  return list
end

--- What a report says: { findings (each { kind, organ, side, part, size, amount }, the last three where the sentence
-- says them: size in millimetres, amount small, moderate or large), denied (kinds, in their order), normal (whether it
-- says that nothing is found), unread (sentences of another grammar) }.
---@param text string
---@return {findings: table[], denied: string[], normal: boolean, unread: string[]}
function M.parse(text)
  arguments.expect("datasets.volumes.facts.parse", "text", text, "a string")
  local said = { findings = {}, denied = {}, normal = false, unread = {} }
  for _, sentence in ipairs(sentences(text)) do
    local small = sentence:lower():gsub("^[%a ]+: ", "") -- what a section is of
    if normal[small] or small == "normal" then
      said.normal = true
    elseif denials[small] then
      table.insert(said.denied, denials[small])
    else
      local f = finding_of(small)
      if f then f.text = sentence end
      table.insert(f and said.findings or said.unread, f or sentence)
    end
  end
  return said
end

--- A report without the sentences about findings for which keep(finding) is false, and without those that deny a kind
-- for which deny(kind) is false (nil: all stay). Where no finding is left it says so.
---@param text string
---@param keep fun(finding: table): boolean
---@param deny? fun(kind: string): boolean
---@return string
function M.filter(text, keep, deny)
  local who = "datasets.volumes.facts.filter"
  arguments.expect(who, "text", text, "a string")
  arguments.expect(who, "keep", keep, "a function")
  arguments.expect(who, "deny", deny, "a function or nil")
  local kept, found = {}, false
  for _, sentence in ipairs(sentences(text)) do
    local small = sentence:lower()
    local f = not normal[small] and not denials[small] and finding_of(small)
    local stays
    if f then
      stays = keep(f)
      found = found or stays
    elseif denials[small] then
      stays = not deny or deny(denials[small])
    else
      stays = not normal[small]
    end
    if stays then kept[#kept + 1] = small end
  end
  if not found then table.insert(kept, 1, report.nothing[1]) end
  return table.concat(kept, "; ")
end

--- A report split by anatomy: for each of M.sections a text that begins with the section's name and holds the report's
-- sentences about its organs; "normal" where there are none. Sentences about no organ are in none of them.
---@param text string
---@return string[]
function M.split(text)
  arguments.expect("datasets.volumes.facts.split", "text", text, "a string")
  local own = {}
  for _, f in ipairs(M.parse(text).findings) do
    own[f.organ] = own[f.organ] or {}
    table.insert(own[f.organ], f.text:lower())
  end
  local result = {}
  for i, section in ipairs(M.sections) do
    local parts = {}
    for _, organ in ipairs(section[2]) do table.move(own[organ] or {}, 1, #(own[organ] or {}), #parts + 1, parts) end
    result[i] = ("%s: %s"):format(section[1], #parts > 0 and table.concat(parts, "; ") or "normal")
  end
  return result
end

local said = { ["missing part"] = { "the upper part of the %s is missing", "the %s has no upper part" },
  effusion = { "a large effusion on the %s side", "a moderate %s pleural effusion" } }

--- What says of a kind of findings that it is there, in each of the organs that training meets it in, and what denies
-- it: sentences as reports have them.
---@param kind string
---@return string[] present
---@return string[] absent
function M.prompts(kind)
  local who = "datasets.volumes.facts.prompts"
  arguments.expect(who, "kind", kind, "a string")
  if not report.absent[kind] then
    arguments.fail("%s: kind: expected one of facts.kinds, got \"%s\"", who, kind)
  end
  local present = {}
  for _, organ in ipairs(findings.where[kind].seen) do
    for _, text in ipairs(said[kind] or { "a " .. kind .. " in the %s, 16 mm", "the %s contains a 12 mm " .. kind }) do
      present[#present + 1] = text:format(kind == "effusion" and organ:match "^%a+" or organ)
    end
  end
  return present, table.move(report.absent[kind], 1, #report.absent[kind], 1, {})
end

--- What of a report split by anatomy is not normal, as one text; "normal" where all is.
---@param text string
---@return string
function M.told(text)
  arguments.expect("datasets.volumes.facts.told", "text", text, "a string")
  local list = {}
  for _, sentence in ipairs(sentences(text)) do
    local own = sentence:gsub("^[%a ]+: ", "")
    if own ~= "normal" then list[#list + 1] = own end
  end
  return #list > 0 and table.concat(list, "; ") or "normal"
end

--- Questions about the findings of an item, as { question, answer } in small letters: whether there is one of a kind
-- that is there and where it is, and whether there is one of a kind that is not. options: first (1: from which of
-- M.kinds on the kinds are looked for, in turn), shown(finding) (nil: all: those for which it is false are passed over,
-- as if they were not there).
---@param list table[]
---@param options? { first?: integer, shown?: fun(finding: table): boolean }
---@return string[][]
function M.questions(list, options)
  local who = "datasets.volumes.facts.questions"
  arguments.expect(who, "findings", list, "a list of tables")
  local o = arguments.read(who, options, { first = 1, shown = arguments.none }, { shown = "a function",
    first = "an integer" })
  local there, result = {}, {}
  for i, f in ipairs(list) do
    if type(f) ~= "table" or type(f.kind) ~= "string" or type(f.organ) ~= "string" then
      arguments.fail("%s: findings: expected { kind = string, organ = string }, got %s as number %d", who,
        arguments.describe(f), i)
    end
    if not o.shown or o.shown(f) then there[f.kind] = there[f.kind] or f end
  end
  local yes, no
  for k = 0, #M.kinds - 1 do
    local kind = M.kinds[(o.first - 1 + k) % #M.kinds + 1]
    if there[kind] and not yes then
      yes = true
      result[#result + 1] = { "is there a " .. kind .. "?", "yes" }
      result[#result + 1] = { "where is the " .. kind .. "?", there[kind].organ }
    elseif not there[kind] and not no then
      no = true
      result[#result + 1] = { "is there a " .. kind .. "?", "no" }
    end
  end
  return result
end

-- ---- comparing ----

local function as_findings(who, what, x)
  if type(x) == "string" then return M.parse(x).findings end
  arguments.expect(who, what, x, "a string or a list of tables")
  for i, f in ipairs(x.findings or x) do
    if type(f) ~= "table" or type(f.kind) ~= "string" or type(f.organ) ~= "string" then
      arguments.fail("%s: %s: expected findings { kind = string, organ = string }, got %s as number %d", who, what,
        arguments.describe(f), i)
    end
  end
  return x.findings or x
end

local function same_place(a, b) return a.organ == b.organ and (not a.part or not b.part or a.part == b.part) end

-- Sizes are the same within a quarter, or within 4 mm, a voxel of 64; a word has the sizes that it is written for.
local function same_size(a, b)
  if a.size and b.size then return math.abs(a.size - b.size) <= math.max(4, math.max(a.size, b.size) / 4) end
  local one = a.amount or a.size and a.kind == "effusion" and report.amount(a.size)
  local two = b.amount or b.size and b.kind == "effusion" and report.amount(b.size)
  return not one or not two or one == two
end

--- How a report differs from another, or from the findings of an item. Findings of one kind are paired, first those in
-- the same place and of the same size, then those in the same place, in the same organ, and any; what is left over is
-- false or missed. Returns { wrong = counts by M.errors, right = pairs without an error, placed = pairs of the same
-- organ, written, there = findings of the report and of the reference }.
---@param written string|table
---@param reference string|table
---@return {wrong: table<string, integer>, right: integer, placed: integer, written: integer, there: integer}
function M.score(written, reference)
  local who = "datasets.volumes.facts.score"
  local ours, theirs = as_findings(who, "written", written), as_findings(who, "reference", reference)
  local score = { wrong = {}, right = 0, placed = 0, written = #ours, there = #theirs }
  for _, kind in ipairs(M.errors) do score.wrong[kind] = 0 end
  local taken, paired, pairs_of = {}, {}, 0
  local function pair(fits)
    for i, a in ipairs(ours) do
      for j, b in ipairs(theirs) do
        if not paired[i] and not taken[j] and a.kind == b.kind and fits(a, b) then
          paired[i], taken[j], pairs_of = true, true, pairs_of + 1
          local placed, sized = same_place(a, b), same_size(a, b)
          if a.organ == b.organ then score.placed = score.placed + 1 end
          if not placed then score.wrong.wrong_place = score.wrong.wrong_place + 1 end
          if not sized then score.wrong.wrong_size = score.wrong.wrong_size + 1 end
          if placed and sized then score.right = score.right + 1 end
        end
      end
    end
  end
  pair(function(a, b) return same_place(a, b) and same_size(a, b) end)
  pair(same_place)
  pair(function(a, b) return a.organ == b.organ end)
  pair(function() return true end)
  score.wrong.false_finding, score.wrong.missed_finding = #ours - pairs_of, #theirs - pairs_of
  return score
end

local function f1_of(right, written, there)
  return { precision = written > 0 and right / written or 0, recall = there > 0 and right / there or 0,
    f1 = written + there > 0 and 2 * right / (written + there) or 1 }
end

--- The sum of scores: wrong (errors of each kind, of a report), errors (all of them, of a report), precision, recall
-- and f1 of findings of which all that is said is right, and in `placed` the same where only kind and organ count.
---@param scores table[]
---@return table
function M.total(scores)
  local who = "datasets.volumes.facts.total"
  arguments.expect(who, "scores", scores, "a list of tables")
  if #scores == 0 then arguments.fail("%s: scores: expected at least one, got none", who) end
  local sum, wrong = { right = 0, placed = 0, written = 0, there = 0 }, {}
  for i, score in ipairs(scores) do
    if type(score.wrong) ~= "table" then
      arguments.fail("%s: scores: expected what score() returned, got %s as number %d", who,
        arguments.describe(score), i)
    end
    for key in pairs(sum) do sum[key] = sum[key] + score[key] end
    for key, count in pairs(score.wrong) do wrong[key] = (wrong[key] or 0) + count end
  end
  local result = f1_of(sum.right, sum.written, sum.there)
  result.placed, result.wrong, result.errors = f1_of(sum.placed, sum.written, sum.there), {}, 0
  for _, key in ipairs(M.errors) do
    result.wrong[key] = wrong[key] / #scores
    result.errors = result.errors + result.wrong[key]
  end
  return result
end

return M
