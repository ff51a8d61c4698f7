-- The masked objective: shares are those asked for, labels are the tokens that were hidden, nothing else changes, and
-- an encoder learns what a sequence's law tells.
local here = (arg and arg[0]:match ".*/" or "tests/modules/llm/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local llm = require "tycho.llm"
local masking = llm.masking

local options = { mask = 50, vocabulary = 50 }

check.test("shares of hidden, random and plain tokens; labels", function()
  ty.manual_seed(1)
  local tokens = ty.randint(0, 50, { 200, 500 })
  local inputs, labels = masking.mask(tokens, options)
  local function share(t) return t:to("f64"):mean():item() end
  local asked = labels:ne(-100)
  -- 100,000 tokens: the scatter of a share of 0.15 is 0.0011, and five of these is the bound.
  check.close(share(asked), 0.15, 0.006)
  check.close(share(inputs:eq(50)), 0.12, 0.006)
  local changed = inputs:ne(tokens)
  check.close(share(changed), 0.15 * (0.8 + 0.1 * 49 / 50), 0.006)
  check.ok(not changed:logical_and(asked:logical_not()):any():item(), "what is not asked for stays")
  check.ok(ty.where(asked, labels, tokens):equal(tokens), "labels are the tokens")
  local again = masking.mask(tokens, options)
  check.ok(not again:equal(inputs), "other tokens the next time")
end)

check.test("all or none of it, and what is skipped", function()
  local tokens = ty.randint(0, 50, { 4, 9 })
  local inputs, labels = masking.mask(tokens, { mask = 50, vocabulary = 50, share = 1, hidden = 1, random = 0 })
  check.ok(inputs:eq(50):all():item() and labels:equal(tokens))
  inputs, labels = masking.mask(tokens, { mask = 50, vocabulary = 50, share = 0 })
  check.ok(inputs:equal(tokens) and labels:eq(-100):all():item())
  inputs, labels = masking.mask(tokens, { mask = 50, vocabulary = 50, share = 1, hidden = 0, random = 0 })
  check.ok(inputs:equal(tokens) and labels:equal(tokens))
  labels = select(2, masking.mask(tokens, { mask = 50, vocabulary = 50, share = 1, skip = tokens:lt(25) }))
  check.ok(labels:eq(-100):equal(tokens:lt(25)))
end)

local function bert()
  return llm.BertForMaskedLM { vocab_size = 12, hidden_size = 32, num_hidden_layers = 1, num_attention_heads = 2,
    intermediate_size = 64, max_position_embeddings = 8, hidden_dropout_prob = 0, attention_probs_dropout_prob = 0 }
end

check.test("an encoder learns: tokens in rows that count on", function()
  ty.manual_seed(3)
  local rows = (ty.randint(0, 10, { 300, 1 }) + ty.arange(8):unsqueeze(0)):remainder(10):to "i64"
  local model, o = bert(), { mask = 11, vocabulary = 10, steps = 400, lr = 5e-3 }
  local before = masking.evaluate(model, rows, { mask = 11, vocabulary = 10 })
  check.equal(masking.evaluate(model, rows, { mask = 11, vocabulary = 10 }), before)
  local losses = masking.fit(model, rows, o)
  check.equal(#losses, 400)
  local after = masking.evaluate(model, rows, { mask = 11, vocabulary = 10 })
  check.ok(after.loss < 0.6 * before.loss, ("%g of %g"):format(after.loss, before.loss))
  check.ok(model.training)
end)

check.test("mistakes", function()
  check.fails(function() masking.mask(ty.ones(2), options) end, "llm.masking.mask: tokens: expected i64, got f32")
  local few = ty.randint(0, 5, { 2, 4 })
  check.fails(function() masking.mask(few, { mask = 3 }) end, "vocabulary: expected an integer >= 1")
  check.fails(function() masking.mask(few, { mask = 3, vocabulary = 4, hidden = 0.8, random = 0.3 }) end,
    "expected a sum of at most 1, got 1.1")
  check.fails(function() masking.fit(bert(), few, options) end, "steps: expected an integer >= 0")
  check.fails(function() masking.evaluate(bert(), few, { mask = 3, vocabulary = 4, share = 0 }) end,
    "expected some tokens to be asked for")
end)

check.test("rows of a long text", function()
  check.equal(masking.rows(ty.arange(11, { dtype = "i32" }), 4):tolist(), { { 0, 1, 2, 3 }, { 4, 5, 6, 7 } })
  check.equal(masking.rows(ty.arange(4), 4).dtype, "i64")
  check.fails(function() masking.rows(ty.arange(3), 4) end, "llm.masking.rows: tokens: expected at least 4")
end)

check.finish()
