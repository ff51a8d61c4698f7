-- Questions about clips: answers are true of the clip, none gives itself away, and kinds and answers come evenly.
local check = dofile((arg[0]:match ".*/" or "./") .. "../../lua/check.lua")
local ty = require "tycho"
local datasets = require "tycho.datasets"

local options = { frames = 8, size = 64, cuts = 0.5, still = 0.2, questions = 8, length = 400,
  fields = { "scene", "questions" } }
local batch = {}
do
  local set = datasets.load("clips", options)
  for from = 0, 399, 50 do
    local b = set:batch(ty.arange(from, from + 50))
    for r = 1, 50 do batch[#batch + 1] = { clip = b.scene[r], questions = b.questions[r] } end
  end
end

-- Objects of a clip by name, with their segments.
local function named(clip)
  local by = {}
  for k, segment in ipairs(clip.segments) do
    for i, o in ipairs(segment.objects) do
      by[o.name] = by[o.name] or {}
      table.insert(by[o.name], { object = o, segment = segment, number = k, moves = i == #segment.objects })
    end
  end
  return by
end

check.test("answers are true of the clip", function()
  local asked = {}
  for _, item in ipairs(batch) do
    local by, segments = named(item.clip), item.clip.segments
    for _, q in ipairs(item.questions) do
      asked[q.kind] = (asked[q.kind] or 0) + 1
      local function is(value) check.equal(q.answer, value, q.question) end
      local law = q.question:match "^how does the (.-) move%?$"
      local way = q.question:match "^which way does the (.-) move%?$"
      local colour = q.question:match "^what colour is the (.-)%?$"
      local thing, place_when = q.question:match "^where is the (.-) at (.-)%?$"
      local order, x, y = q.question:match "^which comes (%a+), the (.-) or the (.-)%?$"
      if law then
        check.equal(#by[law], 1)
        check.ok(by[law][1].moves)
        local m = by[law][1].object.motion
        is(({ constant = "in a line", gravity = m.form == "fall" and "it falls" or "in an arc", bounce = "it bounces",
          spin = "it spins", approach = "it comes closer" })[m.law])
      elseif way then
        is(({ right = "right", left = "left", up = "top", down = "bottom", ["lower right"] = "bottom right",
          ["upper left"] = "top left", ["lower left"] = "bottom left", ["upper right"] = "top right" })
          [by[way][1].object.motion.direction])
      elseif colour then
        is(by[colour][1].object.colour)
      elseif thing then
        local one = by[thing][1]
        local at = one.object.track[place_when == "the end" and one.segment.from + one.segment.count
          or one.segment.from + 1]
        local across, down = (at[3] + at[5]) / 128, (at[4] + at[6]) / 128
        check.equal(q.answer:find "left" ~= nil, across < 0.36, q.question)
        check.equal(q.answer:find "right" ~= nil, across > 0.64, q.question)
        check.equal(q.answer:find "top" ~= nil, down < 0.36, q.question)
        check.equal(q.answer:find "bottom" ~= nil, down > 0.64, q.question)
      elseif order then
        check.equal(#segments, 2)
        check.ok(x ~= y and (q.answer == x or q.answer == y))
        local want = segments[order == "first" and 1 or 2]
        is(want.objects[#want.objects].name)
      elseif q.kind == "name" then
        local right = false
        for _, one in ipairs(by[q.answer]) do
          local at_end = q.question:find "at the end" ~= nil
          local here = #segments == 1 or one.number == (at_end and 2 or 1)
          right = right or here and one.moves == (q.question:find "not move" == nil)
        end
        check.ok(right, q.question .. " " .. q.answer)
      else
        check.equal(q.kind, "yes_no")
        local yes = q.answer == "yes"
        local to, side = q.question:match "^does the (.-) move to the (.-)%?$"
        local moves = not to and q.question:match "^does the (.-) move%?$"
        if moves then check.equal(by[moves][1].moves, yes) end
        if to then
          local words = { right = "right", left = "left", up = "top", down = "bottom", ["lower right"] = "bottom right",
            ["upper left"] = "top left", ["lower left"] = "bottom left", ["upper right"] = "top right" }
          check.equal(words[by[to][1].object.motion.direction] == side, yes, q.question)
        end
      end
    end
  end
  for _, kind in ipairs(datasets.clips.question_kinds) do check.ok((asked[kind] or 0) > 60, kind) end
end)

check.test("no question comes twice, and who has not seen the clip does not do well", function()
  local by = {}
  for _, item in ipairs(batch) do
    local seen = {}
    for _, q in ipairs(item.questions) do
      check.equal(seen[q.question], nil)
      seen[q.question] = true
      by[q.kind] = by[q.kind] or { n = 0, of = {} }
      by[q.kind].n, by[q.kind].of[q.answer] = by[q.kind].n + 1, (by[q.kind].of[q.answer] or 0) + 1
    end
  end
  local limit = { name = 0.1, order = 0.1, colour = 0.25, law = 0.35, way = 0.35, place = 0.3, yes_no = 0.6 }
  for kind, counted in pairs(by) do
    for answer, n in pairs(counted.of) do check.ok(n / counted.n < limit[kind], kind .. " " .. answer) end
  end
end)

check.test("questions depend on the clip's seed, split and position alone", function()
  local set = datasets.load("clips", options)
  check.equal(set:get(37).questions, batch[38].questions)
  local fewer = datasets.load("clips", { frames = 8, size = 64, cuts = 0.5, still = 0.2, questions = 2, length = 40,
    fields = { "questions" } }):batch { 37 }
  check.ok(#fewer.questions[1] <= 2)
  check.equal(fewer.questions[1][1], batch[38].questions[1])
end)

check.finish()
