-- Merlin: an inflated network computes what the network of slices does, prompts that are swapped negate the score,
-- equal texts belong together, and the two losses are those of their definitions.
local here = arg and arg[0]:match ".*/" or "tests/modules/vlm/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local models, vlm = require "tycho.models", require "tycho.vlm"

local merlin, nn = vlm.merlin, ty.nn

local function distance(a, b) return (a:to "f64" - b:to "f64"):abs():max():item() end

-- A network of slices whose norms have seen something.
local function flat_network()
  ty.manual_seed(4)
  local flat = models.ResNet3d { in_channels = 1, classes = 3, channels = { 4, 6, 8 }, blocks = { 1, 2, 1 },
    convolution = "space", small = true }
  for _ = 1, 3 do flat(ty.randn(4, 1, 3, 12, 12) * 2 + 1) end
  return flat:eval()
end

local function constant(depth)
  return ty.randn(2, 1, 1, 12, 12):expand(2, 1, depth, 12, 12):contiguous()
end

check.test("an inflated network gives the features of the network of slices", function()
  local flat = flat_network()
  local slice = constant(1)
  local volume = slice:expand(2, 1, 9, 12, 12):contiguous()
  local wanted = flat:maps(slice)
  for _, stride in ipairs { 1, 2 } do
    -- In the middle of the kernel: exact at all depths, up to the ends.
    local network = merlin.inflate(flat, { stem_stride = stride }):eval()
    local maps = network:maps(volume)
    check.ok(distance(maps, wanted:expand(maps.shape)) < 1e-5)
    check.ok(distance(network(volume), flat(slice)) < 1e-5)
  end
  -- A volume of one slice: nothing is added by its neighbours, which are not there.
  check.ok(distance(merlin.inflate(flat):eval():maps(slice), wanted) < 1e-6)
  -- And slice by slice where the volume changes: no depth is mixed before the strides.
  local stem = merlin.inflate(flat):eval().stem
  local other = ty.randn(2, 1, 9, 12, 12)
  check.ok(distance(stem(other), flat.stem(other)) < 1e-6)
end)

check.test("weights spread over the depth give the same away from the ends, and not at them", function()
  local flat = flat_network()
  local slice = constant(1)
  local network = merlin.inflate(flat, { spread = true }):eval()
  local maps = network:maps(slice:expand(2, 1, 65, 12, 12):contiguous())
  local wanted = flat:maps(slice):squeeze(2)
  local depth = maps.shape[3]
  check.ok(distance(maps:select(2, depth // 2), wanted) < 1e-5)
  check.ok(distance(maps:select(2, 0), wanted) > 1e-3)
  local weight, thin = network.stem:state_dict()["0.weight"], flat.stem:state_dict()["0.weight"]
  check.equal(weight.shape, { 4, 1, 3, 3, 3 })
  check.ok(distance(weight:sum(2), thin:squeeze(2)) < 1e-6)
end)

local function small(dtype)
  ty.manual_seed(7)
  local image = models.ResNet3d { in_channels = 1, classes = 3, channels = { 4, 6 }, blocks = { 1, 1 }, small = true,
    stem_stride = 2 }
  local text = models.CLIPTextModelWithProjection { vocab_size = 12, hidden_size = 8, intermediate_size = 16,
    num_hidden_layers = 1, num_attention_heads = 2, max_position_embeddings = 6, eos_token_id = 0, projection_dim = 8 }
  return merlin.Model { image = image, text = text, width = 8 }:to { dtype = dtype or "f32" }
end

local function batch_of(n, dtype)
  ty.manual_seed(8)
  local tokens = ty.randint(1, 12, { n, 6 })
  tokens[":, 5"]:fill_(0)
  return { volumes = ty.randn(n, 1, 8, 8, 8):to { dtype = dtype or "f32" }, tokens = tokens,
    codes = ty.randint(0, 2, { n, 3 }):to(dtype or "f32") }
end

check.test("the loss is cross entropy of the codes plus the contrast, each alone where the other is off", function()
  local model, batch = small():eval(), batch_of(5)
  local both = merlin.loss(model, batch, { codes = 2, reports = 0.5 })
  local codes, log = merlin.loss(model, batch, { reports = 0 })
  local reports = merlin.loss(model, { volumes = batch.volumes, tokens = batch.tokens }, { codes = 0 })
  check.close(codes:item(), nn.bce_with_logits(model(batch.volumes), batch.codes):item(), 1e-6)
  check.close(reports:item(), (vlm.contrastive_loss(model:image_features(batch.volumes),
    model:text_features(batch.tokens), model.logit_scale:exp())):item(), 1e-5)
  check.close(both:item(), 2 * codes:item() + 0.5 * reports:item(), 1e-5)
  check.equal(log.reports, nil)
end)

check.test("the gradient of the loss is that of finite differences, in the stem, heads, text and scale", function()
  local model, batch = small("f64"), batch_of(4, "f64")
  merlin.loss(model, batch):backward()
  for _, name in ipairs { "image.stem.0.weight", "image.fc.weight", "visual_projection.weight", "logit_scale",
    "text.text_projection.weight" } do
    local p
    for own, parameter in model:named_parameters() do if own == name then p = parameter end end
    local flat, gradient = p:detach():flatten(), p.grad:flatten()
    local k, h = flat:numel() // 2, 1e-5
    local function at(step)
      local value = flat[tostring(k)]:item()
      ty.no_grad(function() p:detach():flatten():narrow(0, k, 1):add_(step) end)
      local loss = merlin.loss(model, batch):item()
      ty.no_grad(function() p:detach():flatten():narrow(0, k, 1):fill_(value) end)
      return loss
    end
    check.close(gradient[tostring(k)]:item(), (at(h) - at(-h)) / (2 * h), 1e-6, name)
  end
end)

check.test("equal texts belong together, and the order of a batch does not matter", function()
  local tokens = ty.tensor({ { 1, 2 }, { 3, 4 }, { 1, 2 } }, { dtype = "i64" })
  check.equal(merlin.same(tokens):to("u8"):tolist(), { { 1, 0, 1 }, { 0, 1, 0 }, { 1, 0, 1 } })
  ty.manual_seed(2)
  local image, text = ty.randn(3, 4), ty.randn(3, 4)
  text[2]:copy_(text[0])
  local loss = merlin.contrast(image, text, 3, merlin.same(tokens)):item()
  -- By hand: rows 0 and 2 share their target between columns 0 and 2.
  local cosines = (nn.normalize(image):matmul(nn.normalize(text):transpose(0, 1)) * 3)
  local function one(logits)
    local p = logits:log_softmax(-1):tolist()
    return -((p[1][1] + p[1][3]) / 2 + p[2][2] + (p[3][1] + p[3][3]) / 2) / 3
  end
  check.close(loss, (one(cosines) + one(cosines:transpose(0, 1))) / 2, 1e-5)
  local order = ty.tensor({ 2, 0, 1 }, { dtype = "i64" })
  check.close(merlin.contrast(image:index_select(0, order), text:index_select(0, order), 3,
    merlin.same(tokens:index_select(0, order))):item(), loss, 1e-5)
  -- With a text of its own for each it is the usual loss.
  local own = ty.eye(3):to "bool"
  check.close(merlin.contrast(image, text, 3, own):item(), (vlm.contrastive_loss(image, text, 3)):item(), 1e-5)
end)

check.test("prompts that are swapped negate the score", function()
  ty.manual_seed(3)
  local image, present, absent = ty.randn(5, 8), ty.randn(3, 8), ty.randn(2, 8)
  local score = merlin.present(image, present, absent)
  check.equal(score.shape, { 5 })
  check.ok(distance(score, -merlin.present(image, absent, present)) < 1e-6)
  check.ok(distance(merlin.present(image, present, present), ty.zeros(5)) < 1e-6)
  local by_hand = nn.normalize(image):matmul(nn.normalize(present):transpose(0, 1)):mean(1)
    - nn.normalize(image):matmul(nn.normalize(absent):transpose(0, 1)):mean(1)
  check.ok(distance(score, by_hand) < 1e-6)
end)

check.test("rows of labels in which each class, and none, is met as often", function()
  local labels = ty.zeros(60, 2)
  labels["0:3, 0"]:fill_(1)
  labels["10:50, 1"]:fill_(1)
  local rows, met, distinct = merlin.balanced(labels):tolist(), { 0, 0, 0 }, {}
  for _, row in ipairs(rows) do
    local k = row < 3 and 1 or row >= 10 and row < 50 and 2 or 3
    met[k], distinct[row] = met[k] + 1, true
  end
  check.equal(met, { 20, 20, 20 })
  check.ok(distinct[0] and distinct[1] and distinct[2] and distinct[48])
end)

check.test("a model that is fitted finds by words: light in one half of a volume, or none", function()
  ty.manual_seed(11)
  local n = 32
  local volumes, codes = ty.randn(n, 1, 8, 8, 8) * 0.1, ty.zeros(n, 3)
  local whole = ty.full({ n, 6 }, 3, { dtype = "i64" })
  whole[":, 5"]:fill_(0)
  for i = 0, n - 1 do
    if i % 2 == 0 then
      volumes[("%d, 0, 0:4"):format(i)]:add_(1)
      codes[("%d, 0"):format(i)]:fill_(1)
      whole[("%d, 1"):format(i)]:fill_(7)
    end
  end
  local model = merlin.fit(small(), { volumes = volumes, codes = codes, texts = ty.stack({ whole, whole }, 1) },
    { steps = 30, batch = 8, lr = 5e-3, seed = 1, quiet = true })
  check.equal(model.training, false)
  local prompt = { present = whole:narrow(0, 0, 1), absent = whole:narrow(0, 1, 1) }
  local scores, image = merlin.find(model, volumes, { prompt })
  check.equal({ scores.shape, image.shape }, { { n, 1 }, { n, 8 } })
  check.equal(scores:squeeze(1):gt(0):to("u8"):tolist(), codes:select(1, 0):to("u8"):tolist())
end)

check.test("steps read the whole report and its sections in turn", function()
  local turns = {}
  for step = 0, 7 do turns[step + 1] = merlin.turn(step, 3) end
  check.equal(turns, { 0, 1, 0, 2, 0, 3, 0, 1 })
  check.equal(merlin.turn(5, 0), 0)
end)

check.test("wrong arguments", function()
  local flat, model = flat_network(), small()
  check.fails(function() merlin.inflate(model.image) end, 'flat: expected a ResNet3d with convolution "space", got')
  check.fails(function() merlin.Model { image = flat, width = 3 } end, "text: expected a CLIPTextModelWithProjection")
  check.fails(function() merlin.loss(model, batch_of(2), { codes = 0, reports = 0 }) end, "above 0, got 0 for both")
  check.fails(function() merlin.contrast(ty.ones(2, 3), ty.ones(3, 3), 1, ty.ones(2, 2)) end, "image and text [n, d]")
  check.fails(function() merlin.present(ty.ones(2, 3), ty.ones(1, 4), ty.ones(1, 3)) end, "present [p, d]")
  check.fails(function() models.ResNet3d { convolution = "space", stem_stride = 2 } end, "stem_stride: expected 1")
end)

check.finish()
