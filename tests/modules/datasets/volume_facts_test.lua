-- What reports of volumes say, read back and compared: every drawn report is read as what it was drawn from, and every
-- seeded corruption is one error of its kind.
local check = dofile((arg[0]:match ".*/" or "./") .. "../../lua/check.lua")
local ty = require "tycho"
local datasets = require "tycho.datasets"
local random = require "tycho.datasets.random"
local report = require "tycho.datasets.volumes.report"
local facts = datasets.volumes.facts

local function drawn(split, count)
  return datasets.load("volumes", { split = split, fields = { "report", "findings", "denied" }, seed = 3 })
    :batch(ty.arange(count))
end

local function key(f) return f.kind .. " " .. f.organ end

check.test("reports are read as the findings that they were written of", function()
  for _, split in ipairs { "training", "held_out_findings" } do
    local batch = drawn(split, 500)
    for i, text in ipairs(batch.report) do
      local said, by = facts.parse(text), {}
      check.equal(said.unread, {}, text)
      check.equal(said.denied, batch.denied[i], text)
      check.equal(said.normal, #batch.findings[i] == 0, text)
      check.equal(#said.findings, #batch.findings[i], text)
      for _, f in ipairs(batch.findings[i]) do by[key(f)] = f end
      for _, f in ipairs(said.findings) do
        local truth = by[key(f)] or {}
        check.equal(f.side, truth.side)
        check.ok(not f.part or f.part == truth.part, text)
        check.ok(not f.size or f.size == truth.size, text)
        check.ok(not f.amount or f.amount == report.amount(truth.size), text)
      end
      local score = facts.score(text, batch.findings[i])
      check.equal(score.wrong, { false_finding = 0, missed_finding = 0, wrong_place = 0, wrong_size = 0 }, text)
      check.equal({ score.right, score.placed }, { #batch.findings[i], #batch.findings[i] })
    end
  end
end)

check.test("what a sentence says", function()
  local said = facts.parse "A 12 mm nodule in the mid zone of the right lung. No cysts. Zebras."
  check.equal(said.findings, { { kind = "nodule", organ = "right lung", side = "right", part = "middle", size = 12,
    text = "A 12 mm nodule in the mid zone of the right lung" } })
  check.equal({ said.denied, said.unread, said.normal }, { { "cyst" }, { "Zebras" }, false })
  said = facts.parse "a large left pleural effusion; absence of the upper 3 cm of the liver; a nodule of 9 mm"
  check.equal({ said.findings[1].organ, said.findings[1].amount }, { "left lung", "large" })
  check.equal({ said.findings[2].kind, said.findings[2].part, said.findings[2].size }, { "missing part", "upper", 30 })
  check.equal(said.unread, { "a nodule of 9 mm" }) -- of no organ
  check.equal(facts.parse "", { findings = {}, denied = {}, normal = false, unread = {} })
end)

-- One change of a list of findings, and the error that it is.
local changes = {
  false_finding = function(list)
    local kind = "nodule"
    for _, f in ipairs(list) do if f.kind == "nodule" then kind = "cyst" end end
    for _, f in ipairs(list) do if f.kind == kind then return false end end
    list[#list + 1] = { kind = kind, organ = "spleen", size = 20, part = "upper" }
  end,
  missed_finding = function(list) table.remove(list, 1) end,
  wrong_place = function(list)
    list[1].organ, list[1].side = list[1].organ == "liver" and "right lung" or "liver", nil
    if list[1].organ == "right lung" then list[1].side = "right" end
    if list[1].kind == "effusion" then list[1].organ, list[1].side = "heart", nil end
    for i = 2, #list do if list[i].kind == list[1].kind then return false end end
  end,
  wrong_size = function(list) list[1].size = list[1].size * 2 + 4 end,
}

check.test("each seeded corruption is one error of its kind, and the report itself has none", function()
  local batch, r, tried = drawn("training", 400), random.new(1, "corruptions", 0), {}
  for i, findings in ipairs(batch.findings) do
    if #findings > 0 then
      for _, kind in ipairs(facts.errors) do
        local list = {}
        for k, f in ipairs(findings) do
          list[k] = {}
          for name, value in pairs(f) do list[k][name] = value end
        end
        if list[1].kind ~= "effusion" or list[1].organ ~= "heart" then
          if changes[kind](list) ~= false then
            local score = facts.score(list, findings)
            local wanted = { false_finding = 0, missed_finding = 0, wrong_place = 0, wrong_size = 0 }
            wanted[kind] = 1
            check.equal(score.wrong, wanted, ("%s of %s"):format(kind, batch.report[i]))
            tried[kind] = (tried[kind] or 0) + 1
            -- The same through words, where they say it.
            local text = report.write(r, list)
            local total = 0
            for _, count in pairs(facts.score(text, findings).wrong) do total = total + count end
            check.ok(total <= 1, text)
          end
        end
      end
    end
    check.equal(facts.total { facts.score(batch.report[i], batch.report[i]) }.errors, 0)
  end
  for _, kind in ipairs(facts.errors) do check.ok((tried[kind] or 0) > 100, kind) end
end)

check.test("totals", function()
  local a = facts.score("a 12 mm nodule in the liver; a cyst in the spleen, 20 mm", "a nodule in the liver, 30 mm")
  check.equal(a, { wrong = { false_finding = 1, missed_finding = 0, wrong_place = 0, wrong_size = 1 }, right = 0,
    placed = 1, written = 2, there = 1 })
  local b = facts.score("a cyst in the spleen, 20 mm", "a cyst in the spleen, 22 mm; a 9 mm nodule in the left lung")
  local total = facts.total { a, b }
  check.equal({ total.precision, total.recall, total.placed.precision }, { 1 / 3, 1 / 3, 2 / 3 })
  check.close(total.f1, 1 / 3, 1e-12)
  check.equal({ total.wrong.false_finding, total.wrong.missed_finding, total.errors }, { 0.5, 0.5, 1.5 })
  check.equal(facts.total { facts.score("no findings", {}) }.f1, 1)
  check.equal(facts.score("a nodule in the left lung, 9 mm", "a 9 mm nodule in the liver").wrong.wrong_place, 1)
  check.equal(facts.score("a large left pleural effusion", { { kind = "effusion", organ = "left lung", size = 9 } })
    .wrong.wrong_size, 1)
end)

check.test("reports are split by anatomy, and keep what is to be kept", function()
  local text = "A 12 mm nodule in the left lung. No cyst. A calcification of 9 mm in the aorta. The right lung has no "
    .. "upper part."
  check.equal(facts.split(text), { "right lung: the right lung has no upper part",
    "left lung: a 12 mm nodule in the left lung", "heart and aorta: a calcification of 9 mm in the aorta",
    "liver and spleen: normal" })
  check.equal(facts.filter(text, function(f) return f.organ == "aorta" end),
    "no cyst; a calcification of 9 mm in the aorta")
  check.equal(facts.filter(text, function() return false end, function() return false end), "no findings")
  check.equal(facts.filter("The lungs are clear, the heart is normal. No cyst.", function() return true end),
    "no findings; no cyst")
  check.equal(facts.parse("right lung: normal; left lung: a 9 mm cyst in the left lung"), { denied = {}, normal = true,
    unread = {}, findings = { { kind = "cyst", organ = "left lung", side = "left", size = 9,
      text = "left lung: a 9 mm cyst in the left lung" } } })
  for i, one in ipairs(drawn("training", 100).report) do
    check.equal(facts.total { facts.score(table.concat(facts.split(one), "; "), one) }.errors, 0, i)
    check.equal(facts.total { facts.score(facts.filter(one, function() return true end), one) }.errors, 0, i)
  end
end)

check.test("prompts are sentences of the grammar, and what is told is what is not normal", function()
  for _, kind in ipairs(facts.kinds) do
    local present, absent = facts.prompts(kind)
    local organs = {}
    for _, text in ipairs(present) do
      local f = facts.parse(text).findings[1]
      check.equal(f and f.kind, kind, text)
      organs[f.organ] = true
    end
    for _, code in ipairs(datasets.volumes.codes) do
      if code[1] == kind then check.ok(organs[code[2]], kind .. " " .. code[2]) end
    end
    for _, text in ipairs(absent) do check.equal(facts.parse(text).denied, { kind }) end
  end
  check.fails(function() facts.prompts "zebra" end, 'kind: expected one of facts.kinds, got "zebra"')
  check.equal(facts.told "right lung: normal; left lung: a cyst in the left lung, 9 mm; liver and spleen: normal",
    "a cyst in the left lung, 9 mm")
  check.equal(facts.told "right lung: normal; left lung: normal", "normal")
end)

check.test("studies are the items, cropped, with codes and the kinds of each slice", function()
  local set = datasets.volumes.studies { count = 30, seed = 4, frontal = true, slices = true }
  local items = datasets.load("volumes", { size = 32, seed = 4, fields = { "volume", "report", "findings", "marks" } })
    :batch(ty.arange(30))
  check.equal({ set.volumes.shape, set.frontal.shape, set.slices.shape, set.codes.shape }, { { 30, 1, 32, 20, 28 },
    { 30, 1, 32, 32 }, { 30, 32, 5 }, { 30, #datasets.volumes.codes } })
  check.ok((set.volumes - (items.volume:narrow(3, 6, 20):narrow(4, 2, 28) * 2 - 1)):abs():max():item() < 1e-6)
  check.ok((set.frontal - (items.volume:mean(3) * 5 - 1.5)):abs():max():item() < 1e-5)
  local lost = items.marks:gt(0):to("f32"):sum():item()
    - items.marks:narrow(2, 6, 20):narrow(3, 2, 28):gt(0):to("f32"):sum():item()
  check.equal(lost, 0) -- nothing that was found is cropped away
  for i, list in ipairs(items.findings) do
    check.equal(set.reports[i], items.report[i]:lower())
    local wanted = {}
    for _, f in ipairs(list) do wanted[f.kind .. f.organ] = 1 end
    for k, code in ipairs(datasets.volumes.codes) do
      check.equal(set.codes[("%d, %d"):format(i - 1, k - 1)]:item(), wanted[code[1] .. code[2]] or 0)
    end
    for k, kind in ipairs(facts.kinds) do
      local there = false
      for number, f in ipairs(list) do
        there = there or f.kind == kind and items.marks:select(0, i - 1):eq(number):any():item() == true
      end
      check.equal(set.slices:select(0, i - 1):select(1, k - 1):max():item(), there and 1 or 0)
    end
  end
  check.fails(function() datasets.volumes.studies { count = 0 } end, "count: expected an integer >= 1, got 0")
end)

check.test("wrong arguments", function()
  check.fails(function() facts.parse(3) end, "datasets.volumes.facts.parse: text: expected a string, got 3")
  check.fails(function() facts.score({ { kind = "cyst" } }, "") end, "written: expected findings { kind =")
  check.fails(function() facts.total {} end, "scores: expected at least one, got none")
  check.fails(function() facts.filter("a", 1) end, "keep: expected a function, got 1")
end)

check.test("questions: of a kind that is there, where it is, and of one that is not", function()
  local list = { { kind = "cyst", organ = "liver" }, { kind = "nodule", organ = "left lung" } }
  check.equal(facts.kinds[1], "nodule")
  check.equal(facts.questions(list), { { "is there a nodule?", "yes" }, { "where is the nodule?", "left lung" },
    { "is there a calcification?", "no" } })
  -- What is not shown is as if it was not there; the first kind says where the search begins.
  local function right(f) return f.organ ~= "left lung" end
  check.equal(facts.questions(list, { shown = right })[1], { "is there a nodule?", "no" })
  check.equal(#facts.questions({}, { first = 3 }), 1)
  check.fails(function() facts.questions { { kind = 3 } } end, "findings: expected { kind = string, organ = string }")
end)

check.finish()
