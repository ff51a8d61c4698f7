-- BLEU against NLTK (tests/fixtures/make_bleu.py): the op on padded tensors, and the plain Lua on lists.
local here = (arg and arg[0]:match ".*/" or "tests/modules/llm/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local bleu = require("tycho.llm").bleu

local f = ty.io.load_npz(check.root .. "tests/fixtures/bleu.npz")
local methods = { "none", "epsilon", "add_one", "geometric", "length" }
local candidates, references = {}, {}
do
  local x, y = f.candidates:tolist(), f.references:tolist()
  local x_lengths, y_lengths = f.candidate_lengths:tolist(), f.reference_lengths:tolist()
  for i, list in ipairs(x) do
    candidates[i], references[i] = table.move(list, 1, x_lengths[i], 1, {}), {}
    for j, other in ipairs(y[i]) do
      if y_lengths[i][j] >= 0 then references[i][j] = table.move(other, 1, y_lengths[i][j], 1, {}) end
    end
  end
end

local function worst(got, want)
  local difference = 0
  for i, x in ipairs(got) do difference = math.max(difference, math.abs(x - want[i])) end
  check.equal(#got, #want)
  return difference
end

check.test("ty.bleu gives NLTK's scores, for one thread and for two", function()
  for m, smoothing in ipairs(methods) do
    for threads = 1, 2 do
      ty.set_threads(threads)
      local scores = ty.bleu(f.candidates, f.references, f.candidate_lengths, f.reference_lengths, nil,
        { smoothing = smoothing })
      check.equal(scores.dtype, "f32")
      check.ok(worst(scores:tolist(), f.scores:select(0, m - 1):tolist()) < 1e-6, smoothing)
    end
    local exact = ty.bleu(f.candidates, f.references, f.candidate_lengths, f.reference_lengths, nil,
      { smoothing = smoothing, dtype = "f64" })
    check.ok(worst(exact:tolist(), f.scores:select(0, m - 1):tolist()) < 1e-14, smoothing)
    local corpus = ty.bleu(f.candidates, f.references, f.candidate_lengths, f.reference_lengths, nil,
      { smoothing = smoothing, corpus = true, dtype = "f64" })
    check.close(corpus:item(), f.corpus:select(0, m - 1):item(), 1e-14)
  end
  local weighted = ty.bleu(f.candidates, f.references, f.candidate_lengths, f.reference_lengths, f.weights,
    { smoothing = "epsilon", epsilon = 0.01 })
  check.ok(worst(weighted:tolist(), f.weighted:tolist()) < 1e-6)
end)

check.test("the plain Lua gives them too, of ids and of words", function()
  for m, smoothing in ipairs(methods) do
    local got, words = {}, {}
    for i, candidate in ipairs(candidates) do
      got[i] = bleu.sentence(candidate, references[i], { smoothing = smoothing })
      if i % 10 == 0 then
        local function spelled(list)
          local copy = {}
          for k, id in ipairs(list) do copy[k] = "word " .. id end
          return copy
        end
        local others = {}
        for j, list in ipairs(references[i]) do others[j] = spelled(list) end
        words[#words + 1] = bleu.sentence(spelled(candidate), others, { smoothing = smoothing }) - got[i]
      end
    end
    check.ok(worst(got, f.scores:select(0, m - 1):tolist()) < 1e-14, smoothing)
    check.ok(worst(words, ty.zeros(#words):tolist()) == 0)
  end
  local weights, got = f.weights:tolist(), {}
  for i, candidate in ipairs(candidates) do
    got[i] = bleu.sentence(candidate, references[i], { weights = weights, smoothing = "epsilon", epsilon = 0.01 })
  end
  check.ok(worst(got, f.weighted:tolist()) < 1e-14)
  check.fails(function() bleu.sentence({}, {}, { smoothing = "method1" }) end,
    'smoothing: expected "none" or "epsilon"')
end)

check.test("batch pads lists; an unsmoothed candidate without a match scores 0", function()
  local scores, counts = bleu.batch(candidates, references, { smoothing = "geometric" })
  check.ok(worst(scores:tolist(), f.scores:select(0, 3):tolist()) < 1e-6)
  check.equal(counts.shape, { #candidates, 10 })
  check.close(bleu.batch(candidates, references, { corpus = true }):item(), f.corpus:select(0, 0):item(), 1e-6)
  scores, counts = bleu.batch({ { 1, 2, 3 }, {}, { 4 } }, { { { 1, 2 }, { 3 } }, { { 1 } }, {} }, { order = 2 })
  check.close(scores:tolist(), { math.sqrt(1 / 2), 0, 0 }, 1e-6)
  check.equal(counts:tolist(), { { 3, 1, 3, 2, 3, 2 }, { 0, 0, 0, 0, 0, 1 }, { 0, 0, 1, 0, 1, 0 } })
  check.equal(bleu.batch({}, {}):numel(), 0)
  check.fails(function() bleu.batch({ { 1 } }, {}) end, "references: expected those of 1 candidates, got those of 0")
end)

check.finish()
