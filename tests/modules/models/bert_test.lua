-- BERT over packed sequences gives what it gives over rows with padding, hidden states, losses and gradients.
local here = arg and arg[0]:match ".*/" or "tests/modules/models/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local models = require "tycho.models"

local lengths = { 5, 1, 9, 3 }

local function inputs(vocabulary)
  ty.manual_seed(2)
  local rows, packed, mask = {}, {}, {}
  local cu, at = { 0 }, 0
  for i, n in ipairs(lengths) do
    local x = ty.randint(3, vocabulary, { n })
    packed[i] = x
    rows[i] = ty.pad(x, { 0, 9 - n }, "constant", 1)
    mask[i] = ty.arange(9):lt(n)
    at = at + n
    cu[i + 1] = at
  end
  return ty.stack(rows, 0), ty.stack(mask, 0), ty.concat(packed, 0):unsqueeze(0), ty.tensor(cu, { dtype = "i64" })
end

local config = { vocab_size = 40, hidden_size = 16, num_hidden_layers = 2, num_attention_heads = 2,
  intermediate_size = 24, max_position_embeddings = 16, hidden_dropout_prob = 0, attention_probs_dropout_prob = 0 }

for _, name in ipairs { "BertForMaskedLM", "RobertaForMaskedLM" } do
  check.test(name, function()
    ty.manual_seed(1)
    local given = { pad_token_id = name:find "Roberta" and 1 or 0 }
    for key, value in pairs(config) do given[key] = value end
    local model = models[name](given):to "f64"
    local rows, mask, packed, cu = inputs(40)
    local labels = rows:masked_fill(mask:logical_not(), -100)
    model:loss(rows, labels, { mask = mask }):backward()
    local want, list = {}, model:parameters()
    for i, p in ipairs(list) do
      want[i] = p.grad:clone()
      p:set_grad()
    end
    local loss = model:loss(packed, packed, { cu_seqlens = cu, longest = 9 })
    check.close(loss:item(), model:loss(rows, labels, { mask = mask }):item(), 1e-12)
    loss:backward()
    for i, p in ipairs(list) do check.close((p.grad - want[i]):abs():max():item(), 0, 1e-12) end
    -- Each token's own logits.
    local all, at = model(rows, { mask = mask }), 0
    local own = model(packed, { cu_seqlens = cu })
    for i, n in ipairs(lengths) do
      check.close((own[0]:narrow(0, at, n) - all[i - 1]:narrow(0, 0, n)):abs():max():item(), 0, 1e-12)
      at = at + n
    end
    check.equal(model(ty.empty({ 1, 0 }, { dtype = "i64" }), { cu_seqlens = ty.tensor { 0 } }).shape, { 1, 0, 40 })
    check.fails(function() model(rows, { cu_seqlens = cu }) end, "expected [1, n] with cu_seqlens")
    check.fails(function() model(packed, { cu_seqlens = cu, mask = mask }) end, "neither a cache nor a mask")
    check.fails(function() model(packed, { cu_seqlens = cu, longest = 400 }) end, "400 tokens, but there are")
    check.fails(function() model:embed(packed, { cu_seqlens = cu }) end, "goes without cu_seqlens")
  end)
end

check.finish()
