-- Scenes as sentences that are true or not, and the judging of pictures by them.
local here = (arg and arg[0]:match ".*/" or "tests/modules/datasets/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local datasets = require "tycho.datasets"
local statements = datasets.scenes.statements

local names = statements.names()
local plain = { "plain", "gradient", "dots" }
local set = datasets.load("scenes", { split = "validation", length = 300, backgrounds = plain,
  fields = { "statements", "labels", "scene", "asked" } })
local batch = set:batch(ty.arange(300))

check.test("there is a name for each sentence, and no two are the same", function()
  check.equal(#names, statements.count)
  check.equal(statements.count, 1900)
  local seen = {}
  for _, name in ipairs(names) do
    check.ok(not seen[name], name)
    seen[name] = true
  end
  check.equal({ names[1], names[101], names[102], names[1001] },
    { "dog", "natural dog", "red dog", "dog at the top left" })
end)

check.test("the sentences of a scene are those of its objects", function()
  local truth = batch.statements:tolist()
  check.equal(batch.statements:narrow(1, 0, 100):tolist(), batch.labels:tolist())
  for r, scene in ipairs(batch.scene) do
    local expected, got = {}, {}
    for _, object in ipairs(scene.objects) do
      local name = names[object.object + 1]
      expected[name] = true
      expected[(object.colour or "natural") .. " " .. name] = true
      if object.place then expected[name .. " at the " .. object.place] = true end
    end
    for i, value in ipairs(truth[r]) do if value == 1 then got[names[i]] = true end end
    check.equal(got, expected)
  end
end)

check.test("a judge that knows sees all that is asked for, one that is blind does not", function()
  local logits = batch.statements:to "f32" * 2 - 1
  local shares, counts = statements.score(logits, batch.asked)
  check.equal(shares, { object = 1, colour = 1, place = 1 })
  check.ok(counts.object > 300 and counts.colour > 100 and counts.place > 30)
  shares = statements.score(logits:roll(1, 0), batch.asked)
  check.ok(shares.object < 0.1 and shares.colour < 0.4 and shares.place < 0.4)
  check.fails(function() statements.score(logits:narrow(0, 0, 2), batch.asked) end, "logits: expected [300, 1900]")
end)

check.finish()
