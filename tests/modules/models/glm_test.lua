-- GLM: who sees whom, DeepNorm against its formula, initial weights, orders of norms, names, what is refused.
local here = (arg and arg[0]:match ".*/" or "tests/modules/models/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local models = require "tycho.models"

local function make(norm, more)
  local config = { vocab_size = 40, hidden_size = 24, inner_hidden_size = 32, num_layers = 3, num_attention_heads = 2,
    max_sequence_length = 32, norm = norm }
  for key, value in pairs(more or {}) do config[key] = value end
  return models.GLM(config)
end

local function draw(n, t) return ty.randint(0, 40, { n, t }) end

check.test("no later token of the generated part is seen, and the prefix sees all of itself", function()
  ty.manual_seed(1)
  for _, norm in ipairs { "deepnorm", "post", "pre", "sandwich" } do
    local model = make(norm)
    local tokens, prefix = draw(2, 9), ty.tensor { 4, 2 }
    local function logits(t) return ty.no_grad(function() return model(t, { prefix = prefix }) end) end
    local before = logits(tokens)
    for place = 0, 8 do
      local other = tokens:clone()
      other:narrow(1, place, 1):copy_((other:narrow(1, place, 1) + 1):remainder(40))
      local changed = (logits(other) - before):abs():max(-1):gt(1e-6):to("i64"):tolist()
      for row, length in ipairs { 4, 2 } do
        for q = 0, 8 do
          local sees = place <= q or place < length
          check.equal(changed[row][q + 1], sees and 1 or 0, ("%s: %d of %d"):format(norm, q, place))
        end
      end
    end
  end
end)

check.test("a prefix of one token, or of none, is a causal model", function()
  ty.manual_seed(2)
  local model, tokens = make(), draw(2, 8)
  local causal = model(tokens)
  for _, length in ipairs { 0, 1 } do
    check.close(model(tokens, { prefix = ty.tensor { length, length } }):tolist(), causal:tolist(), 1e-5, "logits")
  end
  local positions = ty.arange(8):unsqueeze(0):expand(2, 8):contiguous()
  check.close(model(tokens, { positions = positions }):tolist(), causal:tolist(), 1e-5, "positions that count")
  local moved = model(tokens, { positions = positions + 5 })
  check.close(moved:tolist(), causal:tolist(), 1e-4, "rotary positions are relative")
  check.ok((model(tokens, { positions = positions:mul(0) }) - causal):abs():max():item() > 1e-3, "and matter")
end)

check.test("a layer of DeepNorm is LN(alpha x + f(x))", function()
  ty.manual_seed(3)
  local model = make("deepnorm")
  local layer, x = model.transformer.layers[1], ty.randn(1, 5, 24)
  local cos, sin = model.rotary:table(5, "cpu")
  local at = { cos = cos:narrow(0, 0, 5), sin = sin:narrow(0, 0, 5) }
  local alpha = (2 * 3) ^ 0.5
  local a = layer.input_layernorm(x)
  local b = layer.post_attention_layernorm(a * alpha + layer.attention(a, at))
  check.close(layer(x, at):tolist(), (b * alpha + layer.mlp(b)):tolist(), 1e-5, "layer")
  local m = layer.mlp
  local both = ty.linear(b, m.dense_h_to_4h.weight, m.dense_h_to_4h.bias)
  local gated = both:narrow(2, 0, 32):gelu() * both:narrow(2, 32, 32)
  check.close(m(b):tolist(), ty.linear(gated, m.dense_4h_to_h.weight, m.dense_4h_to_h.bias):tolist(), 1e-5, "GeGLU")
end)

check.test("initial weights: Glorot's, and smaller by the root of twice the layers where DeepNorm says", function()
  ty.manual_seed(4)
  local config = { hidden_size = 96, inner_hidden_size = 128, num_layers = 8 }
  local deep, post = make("deepnorm", config), make("post", config)
  local function stds(model)
    local layer = model.transformer.layers[1]
    local qkv = layer.attention.query_key_value.weight:detach():reshape(2, 3, 48, 96)
    return { q = qkv:select(1, 0):std():item(), v = qkv:select(1, 2):std():item(),
      out = layer.attention.dense.weight:std():item(), up = layer.mlp.dense_h_to_4h.weight:std():item(),
      down = layer.mlp.dense_4h_to_h.weight:std():item() }
  end
  local square, wide = (2 / (96 + 96)) ^ 0.5, (2 / (96 + 128)) ^ 0.5
  local want = { q = square, v = square, out = square, up = wide, down = wide }
  local a, b = stds(deep), stds(post)
  for key, std in pairs(want) do
    check.close(b[key] / std, 1, 0.05, "post: " .. key)
    check.close(a[key] / std * (key == "q" and 1 or 4), 1, 0.05, "deepnorm: " .. key)
  end
  check.equal(deep.transformer.layers[2].attention.dense.bias:abs():max():item(), 0.0, "biases")
end)

check.test("the mask", function()
  local mask = models.GLM.mask(ty.tensor { 2, 0 }, 3):to("i64"):tolist()
  check.equal(mask, { { { { 1, 1, 0 }, { 1, 1, 0 }, { 1, 1, 1 } } }, { { { 1, 0, 0 }, { 1, 1, 0 }, { 1, 1, 1 } } } },
    "mask")
end)

check.test("gradients, names, what is refused", function()
  ty.manual_seed(5)
  for _, norm in ipairs { "deepnorm", "sandwich" } do
    local model = make(norm)
    local targets = draw(2, 6)
    targets:narrow(1, 0, 3):fill_(-100)
    model:loss(draw(2, 6), targets, { prefix = ty.tensor { 3, 3 } }):backward()
    for name, p in model:named_parameters() do
      check.ok(p.grad and p.grad:isfinite():all():item(), norm .. ": " .. name)
    end
  end
  local names = make("post"):state_dict()
  for _, name in ipairs { "transformer.word_embeddings.weight", "transformer.layers.0.input_layernorm.bias",
    "transformer.layers.2.attention.query_key_value.bias", "transformer.layers.0.attention.dense.weight",
    "transformer.layers.1.mlp.dense_h_to_4h.weight", "transformer.layers.1.mlp.dense_4h_to_h.bias",
    "transformer.layers.1.post_attention_layernorm.weight", "transformer.final_layernorm.weight", "lm_head.weight" } do
    check.ok(names[name] ~= nil, name)
  end
  check.fails(function() make("rms") end, "GLM: config key 'norm': expected \"deepnorm\"")
  check.fails(function() make("post", { num_attention_heads = 5 }) end, "num_attention_heads")
  check.fails(function() make()(draw(1, 40)) end, "GLM: tokens: expected at most 32 positions, got 40")
end)

check.finish()
