-- Vision-language-vision auto-encoder: what stands in the place of a text's states gets the right gradient through a
-- painter that does not change, with a text's own states the loss is the painter's, captions by hand and by a cache.
local here = arg and arg[0]:match ".*/" or "tests/modules/vlm/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local diffusion, models, vlm = require "tycho.diffusion", require "tycho.models", require "tycho.vlm"
local vlv = vlm.vlv

local function apart(a, b) return (a - b):abs():max():item() end

local function painter()
  ty.manual_seed(1)
  local net = models.UNet2DConditionModel { sample_size = 4, in_channels = 3, out_channels = 3,
    down_block_types = { "CrossAttnDownBlock2D" }, up_block_types = { "CrossAttnUpBlock2D" },
    block_out_channels = { 8 }, layers_per_block = 1, cross_attention_dim = 6, attention_head_dim = 2,
    norm_num_groups = 4 }
  -- Some layers begin at zero.
  for _, p in ipairs(net:parameters()) do
    if p.ndim > 1 then ty.no_grad(function() p:copy_(ty.randn(p.shape) * 0.2) end) end
  end
  return net:eval()
end
local objective = require "tycho.diffusion.objective" { schedule = diffusion.schedule.flow(), predict = "flow" }

local function encoder(dtype)
  ty.manual_seed(2)
  local tower = models.ResNet { in_channels = 3, classes = 2, channels = { 4 }, blocks = { 1 }, small = true }
  return vlv.Encoder(tower, { channels = 4, places = 16, queries = 5, width = 6, inner = 8, layers = 1, heads = 2 })
    :to(dtype or "f32")
end

check.test("an encoder gives as many embeddings as it has queries, of the width of the text's states", function()
  local e = encoder():eval()
  local x = ty.randn(3, 3, 4, 4)
  check.equal(ty.no_grad(e, x).shape, { 3, 5, 6 })
  -- Other queries, other embeddings, of the same picture.
  local y = ty.no_grad(e, x)
  check.ok(apart(y:select(1, 0), y:select(1, 1)) > 1e-3)
  check.ok(apart(y:select(0, 0), y:select(0, 1)) > 1e-3)
end)

check.test("with a text's states the loss is the painter's own", function()
  local net, x, text = painter(), ty.randn(4, 3, 4, 4), ty.randn(4, 7, 6)
  local given = { t = ty.tensor { 0.1, 0.4, 0.6, 0.9 }, noise = ty.randn(4, 3, 4, 4) }
  local want = ty.no_grad(objective.loss, objective, net, x, { text = { embeddings = text } }, given):item()
  check.equal(ty.no_grad(vlv.loss, objective, net, text, x, { given = given }):item(), want)
  check.ok(math.abs(ty.no_grad(vlv.loss, objective, net, text * 0, x, { given = given }):item() - want) > 1e-6)
end)

check.test("the gradient of the embeddings through the frozen painter is that of finite differences", function()
  local net, x = painter():to "f64", ty.randn(2, 3, 4, 4):to "f64"
  net:requires_grad_(false)
  local c = ty.randn(2, 5, 6):to "f64"
  c:requires_grad_(true)
  local given = { t = ty.tensor({ 0.3, 0.7 }):to "f64", noise = ty.randn(2, 3, 4, 4):to "f64" }
  local function loss() return vlv.loss(objective, net, c, x, { given = given }) end
  loss():backward()
  check.gradient(loss, c, { 1, 8, 15, 22, 29, 36, 43, 50, 57 }, 1e-7)
end)

check.test("stage 1 changes the encoder, and not a byte of the painter, which learns as before afterwards", function()
  local net, e, x = painter(), encoder(), ty.randn(2, 3, 4, 4) * 2
  local given = { t = ty.tensor { 0.6, 0.8 }, noise = ty.randn(2, 3, 4, 4) }
  local function fixed()
    return ty.no_grad(function() return vlv.loss(objective, net, e(x), x, { given = given }) end):item()
  end
  e:eval()
  local first = fixed()
  local before, wanted = {}, {}
  for name, p in net:named_parameters() do before[name], wanted[name] = ty.io.to_bytes(p:detach()), p.requires_grad end
  local queries = e.queries:detach():clone()
  vlv.reconstruct(e, objective, net, x, { steps = 60, batch = 2, lr = 1e-2 })
  for name, p in net:named_parameters() do
    check.equal(ty.io.to_bytes(p:detach()) == before[name], true, name)
    check.equal(p.grad == nil, true)
    check.equal(p.requires_grad, wanted[name])
  end
  check.ok(apart(e.queries:detach(), queries) > 1e-3)
  check.ok(fixed() < first, ("%g after %g"):format(fixed(), first))
end)

-- ---- captions ----

local function captioner()
  local e = encoder():eval()
  local decoder = models.Llama { vocab_size = 12, hidden_size = 16, intermediate_size = 32, num_hidden_layers = 2,
    num_attention_heads = 2, max_position_embeddings = 32, tie_word_embeddings = true }
  return vlv.Captioner(e, decoder, 6):eval()
end

check.test("the loss of captions counts each word and its end once", function()
  local c, x = captioner(), ty.randn(2, 3, 4, 4)
  local tokens = ty.tensor { { 0, 5, 6, 1, 1, 1 }, { 0, 7, 8, 9, 4, 1 } }
  local logits = ty.no_grad(c, x, tokens):log_softmax(-1)
  local sum, counted = 0, 0
  for r, row in ipairs(tokens:tolist()) do
    for k = 2, 6 do
      if row[k - 1] ~= 1 then
        sum, counted = sum - logits:select(0, r - 1):select(0, k - 2):select(0, row[k]):item(), counted + 1
      end
    end
  end
  check.equal(counted, 8)
  check.close(ty.no_grad(c.loss, c, x, tokens, 1):item(), sum / counted, 1e-5)
end)

check.test("captions are learnt, and written word for word as computing all anew has them", function()
  local c, x = captioner(), ty.randn(4, 3, 4, 4)
  local tokens = ty.tensor { { 0, 5, 6, 1, 1 }, { 0, 7, 8, 9, 1 }, { 0, 2, 1, 1, 1 }, { 0, 3, 5, 4, 1 } }
  vlv.caption(c, x, tokens, { last = 1, steps = 150, batch = 4, lr = 5e-3, encoder = 1 })
  local said = c:write(x, { first = 0, last = 1, most = 5 })
  check.equal(said:tolist(), tokens:tolist())
  local all = said:narrow(1, 0, 1)
  for _ = 2, 5 do
    local word = ty.no_grad(c, x, all):narrow(1, all.shape[2] - 1, 1):argmax(-1)
    word = ty.where(all:eq(1):any { 1 }:unsqueeze(1), 1, word)
    all = ty.concat({ all, word:to "i64" }, 1)
  end
  check.equal(all:tolist(), said:tolist())
end)

check.test("an encoder that is to stay does", function()
  local c, x = captioner(), ty.randn(4, 3, 4, 4)
  local before, map = c.encoder.queries:detach():clone(), c.map[1].weight:detach():clone()
  vlv.caption(c, x, ty.tensor { { 0, 5, 1 }, { 0, 7, 1 }, { 0, 2, 1 }, { 0, 3, 1 } },
    { last = 1, steps = 3, batch = 4, encoder = 0 })
  check.equal(apart(c.encoder.queries:detach(), before), 0)
  check.ok(apart(c.map[1].weight:detach(), map) > 0)
end)

check.test("what does not fit is one clear error", function()
  check.fails(function() vlv.Encoder(ty.nn.Linear(2, 2), { channels = 2, places = 2, width = 2 }) end,
    "tower: expected a module with maps()")
  check.fails(function() vlv.Captioner(encoder(), ty.nn.Linear(2, 2), 6) end, "expected a language model")
  check.fails(function() vlv.loss(objective, painter(), 3, ty.randn(1, 3, 4, 4)) end,
    "embeddings: expected a tensor, got")
end)

check.finish()
