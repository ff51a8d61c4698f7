-- Dropout in the language models: of attention's weights and of what layers add; off in evaluation.
local here = (arg and arg[0]:match ".*/" or "tests/modules/models/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local llm = require "tycho.llm"

local function off(a, b) return (a - b):abs():max():item() end

local tokens = ty.randint(0, 50, { 2, 10 })
local families = {
  ["GPT-2, weights of attention"] = function() return llm.GPT2 { vocabulary = 50, context = 16, width = 32, layers = 2,
    heads = 4, attention_dropout = 0.2 } end,
  ["GPT-2, embeddings"] = function() return llm.GPT2 { vocabulary = 50, context = 16, width = 32, layers = 2, heads = 4,
    embedding_dropout = 0.2 } end,
  ["GPT-2, a published config"] = function() return llm.GPT2:from_config { vocab_size = 50, n_positions = 16,
    n_embd = 32, n_layer = 2, n_head = 4, attn_pdrop = 0, embd_pdrop = 0, resid_pdrop = 0.1 } end,
  Llama = function() return llm.Llama { vocab_size = 50, hidden_size = 32, intermediate_size = 48,
    num_hidden_layers = 2, num_attention_heads = 4, num_key_value_heads = 2, attention_dropout = 0.2 } end,
}
for name, make in pairs(families) do
  check.test("in training only: " .. name, function()
    ty.manual_seed(3)
    local model = make()
    model:eval()
    check.equal(off(model(tokens), model(tokens)), 0.0)
    model:train()
    check.ok(off(model(tokens), model(tokens)) > 1e-4, "draws differ")
    local function gradient(options)
      ty.manual_seed(4)
      model:zero_grad()
      model:loss(tokens, nil, options):backward()
      return model:parameters()[1].grad
    end
    check.equal(off(gradient { checkpoint = true }, gradient()), 0.0, "checkpointing draws the same again")
  end)
end

check.test("what is saved says so", function()
  local model = llm.GPT2 { vocabulary = 50, context = 16, width = 32, layers = 1, heads = 4, dropout = 0.1,
    attention_dropout = 0.3 }
  check.equal({ model.config.resid_pdrop, model.config.embd_pdrop, model.config.attn_pdrop }, { 0.1, 0.1, 0.3 })
end)

check.finish()
