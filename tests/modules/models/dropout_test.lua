-- Dropout in the language models: of attention's weights and of what layers add; off in evaluation.
local here = (arg and arg[0]:match ".*/" or "tests/modules/models/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local llm = require "tycho.llm"
local layers = require "tycho.models.layers"

local function off(a, b) return (a - b):abs():max():item() end

-- With next to no dropout the composition is the op: values and gradients, in every case that models have.
check.test("attention with dropout is attention", function()
  local cases = {
    plain = {}, grouped = { kv = 2 }, window = { window = 2 }, scale = { scale = 0.3 }, more_keys = { s = 9 },
    padded = { mask = ty.tensor({ { 0, 0, 1, 1, 1, 1 }, { 1, 1, 1, 1, 1, 1 } }):to("bool"):unsqueeze(1):unsqueeze(1) },
    packed = { n = 1, cu_seqlens = ty.tensor({ 0, 2, 2, 6 }, { dtype = "i64" }), kv = 2, window = 1 },
  }
  for name, case in pairs(cases) do
    ty.manual_seed(1)
    local n, t = case.n or 2, 6
    local q = ty.randn(n, 4, t, 8):requires_grad_()
    local k = ty.randn(n, case.kv or 4, case.s or t, 8):requires_grad_()
    local v = ty.randn(n, case.kv or 4, case.s or t, 8):requires_grad_()
    local weight = ty.randn(n, 4, t, 8)
    local function run(p)
      for _, x in ipairs { q, k, v } do x:set_grad() end
      local y = layers.attend(q, k, v, case, case.scale or 0, case.window or -1, p, true)
      if name == "padded" then y = y["..., 2:, :"] end -- what padding sees is nobody's
      local loss = (y * (name == "padded" and weight["..., 2:, :"] or weight)):sum()
      loss:backward()
      return { y:detach(), q.grad, k.grad, v.grad }
    end
    local want, got = run(0), run(1e-9)
    for i in ipairs(want) do check.ok(off(got[i], want[i]) < 1e-4, ("%s: %d is off"):format(name, i)) end
  end
end)

check.test("weights are dropped and the rest scaled", function()
  ty.manual_seed(2)
  local q, k = ty.zeros(1, 1, 200, 4), ty.zeros(1, 1, 200, 4)
  local y = layers.attend(q, k, ty.ones(1, 1, 200, 4), {}, 0, -1, 0.25, true)
  check.close(y["..., 100:, :"]:mean():item(), 1, 0.03)
  check.ok(y["..., 100:, :"]:std():item() > 0.01, "sums of what is left differ")
end)

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
