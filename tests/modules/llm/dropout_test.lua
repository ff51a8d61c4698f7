-- Dropout put on a published model's layers.
local here = (arg and arg[0]:match ".*/" or "tests/modules/llm/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local llm = require "tycho.llm"

local function model()
  ty.manual_seed(1)
  return llm.Llama { vocab_size = 40, hidden_size = 32, intermediate_size = 48, num_hidden_layers = 2,
    num_attention_heads = 2, max_position_embeddings = 16 }
end
local tokens = ty.tensor { { 3, 1, 4, 1, 5, 9, 2, 6 } }

check.test("it drops in training, is nothing in evaluation, and comes off", function()
  local m = model()
  local plain = m:eval()(tokens):tolist()
  check.equal(llm.dropout.attach(m, 0.5), 4)
  check.equal(m:eval()(tokens):tolist(), plain)
  m:train()
  ty.manual_seed(2)
  local first = m(tokens):tolist()
  check.ok(first[1][1][1] ~= plain[1][1][1])
  ty.manual_seed(2)
  check.equal(m(tokens):tolist(), first, "the same seed drops the same")
  check.equal(llm.dropout.remove(m), 4)
  check.equal(llm.dropout.remove(m), 0)
  check.equal(m(tokens):tolist(), plain)
end)

check.test("a layer gives the residual and the kept outputs, scaled", function()
  local layer = ty.nn.Linear(8, 2000)
  local host = ty.nn.Sequential(layer)
  local x, residual = ty.randn(1, 8), ty.ones(1, 2000) * 3
  local full = layer(x)
  llm.dropout.attach(host, 0.25, function() return true end)
  local y = (layer(x, residual) - residual):flatten()
  local kept = y:abs():gt(1e-5)
  local share = kept:to("f32"):mean():item()
  check.ok(math.abs(share - 0.75) < 0.05, share)
  check.close(y:masked_select(kept):tolist(), (full:flatten():masked_select(kept) / 0.75):tolist(), 1e-4)
end)

check.test("mistakes are errors", function()
  local m = model()
  check.fails(function() llm.dropout.attach(m, 1) end, "share: expected a number in [0, 1), got 1")
  check.fails(function() llm.dropout.attach(m, 0.1, "nothing") end, "no linear layer matches")
  llm.dropout.attach(m, 0.1)
  check.fails(function() llm.dropout.attach(m, 0.1) end, "has dropout already")
end)

check.finish()
