-- Pictures and texts in one space: the loss against its definition and transformers', training, retrieval.
local here = arg and arg[0]:match ".*/" or "tests/modules/vlm/"
local check = dofile(here .. "../../lua/check.lua")
local scratch = dofile(here .. "../../lua/scratch.lua")
local ty = require "tycho"
local hub = require "tycho.hub"
local models = require "tycho.models"
local vlm = require "tycho.vlm"

check.test("contrastive_loss is transformers' loss of CLIP", function()
  local root = check.root .. "tests/fixtures/vision/clip/"
  local model, want = hub.load(root, { dtype = "f32" }), ty.io.load_safetensors(root .. "expected.safetensors")
  local image = model:image_features(want.x:narrow(0, 0, 3))
  local text = model:text_features(want.tokens, { mask = want.mask })
  local scale = model.logit_scale:exp()
  local loss, logits = vlm.contrastive_loss(image, text, scale)
  check.close(loss:item(), want.contrastive:item(), 1e-5)
  check.close(logits:flatten():tolist(), want.logits["0:3"]:flatten():tolist(), 1e-3)
  check.close(vlm.contrastive_loss(image, text, scale:item()):item(), want.contrastive:item(), 1e-5)
end)

check.test("contrastive_loss: from the definition, whatever the lengths; the scale ends at 100", function()
  ty.manual_seed(1)
  local image, text = ty.randn(4, 3, { dtype = "f64" }), ty.randn(4, 3, { dtype = "f64" })
  local function naive(scale)
    local a, b, sum = image:tolist(), text:tolist(), 0
    local function cosine(i, j)
      local dot, x, y = 0, 0, 0
      for k = 1, 3 do dot, x, y = dot + a[i][k] * b[j][k], x + a[i][k] ^ 2, y + b[j][k] ^ 2 end
      return dot / math.sqrt(x * y)
    end
    for i = 1, 4 do
      local rows, columns = 0, 0
      for j = 1, 4 do
        rows, columns = rows + math.exp(scale * cosine(i, j)), columns + math.exp(scale * cosine(j, i))
      end
      sum = sum + math.log(rows) + math.log(columns) - 2 * scale * cosine(i, i)
    end
    return sum / 8
  end
  for _, scale in ipairs { 0, 1, 14.3 } do
    check.close(vlm.contrastive_loss(image, text, scale):item(), naive(scale), 1e-9)
    local tensor = ty.tensor(scale, { dtype = "f64" })
    check.close(vlm.contrastive_loss(image * 7, text / 3, tensor):item(), naive(scale), 1e-9)
  end
  check.close(vlm.contrastive_loss(image, text, 1000):item(), naive(100), 1e-9)
  check.close(vlm.contrastive_loss(image, text, ty.tensor(1000.0)):item(), naive(100), 1e-4)
  check.fails(function() vlm.contrastive_loss(image, text["0:3"], 1) end,
    "vlm.contrastive_loss: expected image and text [n, d] alike, got a tensor [4, 3] and a tensor [3, 3]")
  check.fails(function() vlm.contrastive_loss(image, text, "1") end,
    "vlm.contrastive_loss: scale: expected a tensor or a finite number, got \"1\"")
end)

-- Eight kinds of pictures: a light square at one of eight places; their captions name the place, with filler between.
local function world(n, seed)
  ty.manual_seed(seed)
  local kinds = ty.arange(n) % 8
  local pictures = ty.randn(n, 1, 8, 8) * 0.1
  for i = 0, n - 1 do
    local y, x = i % 8 // 4 * 4, i % 4 * 2
    pictures[("%d, 0, %d:%d, %d:%d"):format(i, y, y + 4, x, x + 2)]:fill_(1)
  end
  local filler = ty.randint(10, 14, { n, 2 })
  local tokens = ty.concat({ ty.full({ n, 1 }, 14, { dtype = "i64" }), filler:narrow(1, 0, 1), (kinds + 2):unsqueeze(1),
    filler:narrow(1, 1, 1), ty.full({ n, 1 }, 15, { dtype = "i64" }) }, 1)
  return pictures, tokens
end

local function clip()
  ty.manual_seed(3)
  return models.CLIPModel { projection_dim = 12,
    text_config = { vocab_size = 16, hidden_size = 16, intermediate_size = 32, num_hidden_layers = 1,
      num_attention_heads = 2, max_position_embeddings = 5, eos_token_id = 15 },
    vision_config = { image_size = 8, patch_size = 2, num_channels = 1, hidden_size = 16, intermediate_size = 32,
      num_hidden_layers = 1, num_attention_heads = 2 } }
end

-- Batches of one picture of each kind.
local function loader(n)
  local pictures, tokens = world(n, 1)
  local set = ty.data.TensorDataset { image = pictures, tokens = tokens, mask = ty.ones_like(tokens) }
  return ty.data.DataLoader(set, { batch_size = 8 })
end

check.test("fit_contrastive: captions of pictures that were not seen are found", function()
  local model = clip()
  local pictures, tokens = world(80, 2)
  local before = vlm.retrieval(model, pictures["0:8"], tokens["0:8"], { among = 8 })
  local losses = vlm.fit_contrastive(model, loader(64), { steps = 150, lr = 3e-3, warmup = 10, quiet = true })
  check.ok(losses[#losses] < 0.3 * losses[1], ("from %.3f to %.3f"):format(losses[1], losses[#losses]))
  model:eval()
  local after = vlm.retrieval(model, pictures["0:8"], tokens["0:8"], { among = 8 })
  check.ok(before.captions < 0.5 and after.captions == 1 and after.pictures == 1, "found")
  check.equal({ after.among, after.count, model.training }, { 8, 8, false })
end)

check.test("fit_contrastive goes on bit for bit; the scale stays below 100; own inputs", function()
  local whole = vlm.fit_contrastive(clip(), loader(32), { steps = 6, quiet = true })
  local folder = scratch.file "run"
  vlm.fit_contrastive(clip(), loader(32), { steps = 6, pause = 3, folder = folder, quiet = true })
  local rest = vlm.fit_contrastive(clip(), loader(32), { steps = 6, folder = folder, resume = true, quiet = true })
  check.equal(rest, whole)
  local seen = 0
  local function inputs(batch)
    seen = seen + 1
    return batch.image, batch.tokens, batch.mask
  end
  check.equal(vlm.fit_contrastive(clip(), loader(32), { steps = 2, inputs = inputs, checkpoint = true, quiet = true,
    schedule = ty.optim.cosine { steps = 6, warmup = 1, final = 0.1 } })[1], whole[1])
  check.equal(seen, 2)
  local model = clip()
  ty.no_grad(function() model.logit_scale:fill_(9) end)
  vlm.fit_contrastive(model, loader(32), { steps = 1, lr = 0, quiet = true })
  check.close(model.logit_scale:item(), math.log(100), 1e-5)
  check.fails(function() vlm.fit_contrastive(ty.nn.Linear(1, 1), loader(8), { steps = 1 }) end,
    "fit_contrastive: model: expected a CLIPModel (image_features, text_features, logit_scale), got a module Linear")
  check.fails(function()
    vlm.fit_contrastive(model, loader(8), { steps = 1, quiet = true, inputs = function(b) return b.picture end })
  end, "vlm.fit_contrastive: inputs: expected pictures and tokens of a batch, got nil and nil")
end)

-- A "model" whose features are given: pictures hold theirs, captions the row of a table.
local function given(table_of_texts)
  local model = ty.nn.Linear(1, 1)
  rawset(model, "logit_scale", ty.zeros {})
  rawset(model, "image_features", function(_, x) return x:flatten(1) end)
  rawset(model, "text_features", function(_, tokens) return ty.embedding(table_of_texts, tokens:select(1, 0)) end)
  return model
end

check.test("retrieval counts what the definition counts", function()
  ty.manual_seed(5)
  local n, d = 23, 4
  local texts = ty.randn(n, d)
  local pictures = (texts + ty.randn(n, d) * 0.8):reshape(n, d, 1, 1)
  local captions = ty.arange(n):unsqueeze(1)
  local model = given(texts)
  -- Among all of them, by hand.
  local a = ty.nn.normalize(pictures:flatten(1)):matmul(ty.nn.normalize(texts):transpose(0, 1)):tolist()
  local function share(at, k)
    local hits = 0
    for i = 1, n do
      local above = 0
      for j = 1, n do if at(i, j) > at(i, i) then above = above + 1 end end
      if above < k then hits = hits + 1 end
    end
    return hits / n
  end
  local function row(i, j) return a[i][j] end
  local function column(i, j) return a[j][i] end
  check.equal(vlm.retrieval(model, pictures, captions, { among = n, batch = 5 }),
    { captions = share(row, 1), captions_in_5 = share(row, 5), pictures = share(column, 1),
      pictures_in_5 = share(column, 5), among = n, count = n })
  -- In groups it is easier, and every picture counts once: 23 = 2 * 10 + 3.
  local few = vlm.retrieval(model, pictures, captions, { among = 10 })
  check.ok(few.captions >= share(row, 1) and few.captions < 1)
  check.close(few.captions * n % 1, 0, 1e-9)
  check.equal(few, vlm.retrieval(model, pictures, captions, { among = 10 }))
  -- Where the same caption stands twice, either is right.
  local twice = ty.concat({ captions["0:5"], captions["0:5"] }, 0)
  local exact = texts["0:5"]:reshape(5, d, 1, 1)
  check.equal(vlm.retrieval(model, ty.concat({ exact, exact }, 0), twice, { among = 10 }).captions, 1.0)
  -- A model that knows nothing finds one in ten.
  local blind = vlm.retrieval(given(ty.ones(n, d)), pictures["0:20"], captions["0:20"], { among = 10 })
  check.close(blind.captions, 0.1, 1e-9)
  check.fails(function() vlm.retrieval(model, pictures, captions) end,
    "vlm.retrieval: among: expected at most the 23 pictures that there are, got 100")
  check.fails(function() vlm.retrieval(model, pictures, captions["0:3"]) end,
    "vlm.retrieval: expected pictures [n, channels, height, width] and captions [n, t], got a tensor [23, 4, 1, 1]")
end)

check.test("recall counts what the definition counts, with several texts of a picture", function()
  ty.manual_seed(6)
  local image, text = ty.randn(9, 4), ty.randn(14, 4)
  local owner = ty.tensor { 0, 0, 1, 2, 2, 2, 3, 4, 5, 6, 7, 7, 7, 0 } -- the last picture has none
  local a = ty.nn.normalize(image):matmul(ty.nn.normalize(text):transpose(0, 1)):tolist()
  local of = owner:tolist()
  local function at_least(k)
    local captions, pictures = 0, 0
    for i = 1, 8 do
      local order = {}
      for j = 1, 14 do order[j] = j end
      table.sort(order, function(x, y) return a[i][x] > a[i][y] end)
      local hit = false
      for r = 1, k do hit = hit or of[order[r]] == i - 1 end
      captions = captions + (hit and 1 or 0)
    end
    for j = 1, 14 do
      local above = 0
      for i = 1, 9 do above = above + (a[i][j] > a[of[j] + 1][j] and 1 or 0) end
      pictures = pictures + (above < k and 1 or 0)
    end
    return captions / 8, pictures / 14
  end
  local found = vlm.recall(image, text, { owner = owner, at = { 1, 3 } })
  for _, k in ipairs { 1, 3 } do
    local captions, pictures = at_least(k)
    check.close({ found.captions[k], found.pictures[k] }, { captions, pictures }, 1e-9)
  end
  check.equal(vlm.recall(image, image * 3, { at = { 1 } }), { captions = { 1.0 }, pictures = { 1.0 } })
  check.equal({ vlm.found(image, image * 3, 2), vlm.found(image, -image, 2) }, { 1.0, 0.0 })
  check.fails(function() vlm.found(image, image, 1) end, "vlm.found: among: expected an integer >= 2 or nil, got 1")
  check.fails(function() vlm.recall(image, text) end, "vlm.recall: expected the option owner")
  check.fails(function() vlm.recall(image, text, { owner = owner + 3 }) end, "owner: expected numbers from 0 to 8")
end)

check.test("zero_shot", function()
  local classes = ty.tensor { { 1.0, 0.0 }, { 0.0, 2.0 } }
  local accuracy, found = vlm.zero_shot(ty.tensor { { 3.0, 1.0 }, { 0.1, 0.2 }, { 5.0, 4.0 } }, classes,
    ty.tensor { 0, 1, 1 })
  check.close(accuracy, 2 / 3, 1e-6)
  check.equal(found:tolist(), { 0, 1, 0 })
  check.fails(function() vlm.zero_shot(classes, classes, ty.tensor { 0, 2 }) end,
    "vlm.zero_shot: labels: expected numbers from 0 to 1, got 0 to 2")
end)

check.test("cached_backward: the gradients of the large batch, batch by batch", function()
  local pictures, tokens = world(24, 4)
  local function batches(size)
    local list = {}
    for start = 0, 23, size do
      local count = math.min(size, 24 - start)
      list[#list + 1] = { pictures = pictures:narrow(0, start, count), tokens = tokens:narrow(0, start, count) }
    end
    return list
  end
  local direct = clip()
  local loss = vlm.contrastive_loss(direct:image_features(pictures), direct:text_features(tokens),
    direct.logit_scale:exp())
  loss:backward()
  for _, size in ipairs { 24, 8, 5 } do
    local model = clip()
    check.close(vlm.cached_backward(model, batches(size)), loss:item(), 1e-5)
    local wanted = direct:parameters()
    for i, p in ipairs(model:parameters()) do
      check.ok((p.grad - wanted[i].grad):abs():max():item() < 1e-5, ("batches of %d, parameter %d"):format(size, i))
    end
  end
  check.fails(function() vlm.cached_backward(direct, {}) end, "vlm.cached_backward: batches: expected at least one")
  check.fails(function() vlm.cached_backward(direct, { { pictures = pictures } }) end,
    "expected pictures, tokens and perhaps mask, got a tensor [24, 1, 8, 8], nil and nil in batch 1")
end)

check.test("recall in groups is the mean of the groups' recall", function()
  ty.manual_seed(5)
  local image = ty.randn(11, 4)
  local text = image + ty.randn(11, 4)
  local a = vlm.recall(image:narrow(0, 0, 5), text:narrow(0, 0, 5), { at = { 1, 2 } })
  local b = vlm.recall(image:narrow(0, 5, 5), text:narrow(0, 5, 5), { at = { 1, 2 } })
  local both = vlm.recall(image, text, { at = { 1, 2 }, among = 5 })
  for _, key in ipairs { "captions", "pictures" } do
    for k = 1, 2 do check.close(both[key][k], (a[key][k] + b[key][k]) / 2, 1e-12) end
  end
  check.equal(vlm.recall(image, text, { among = 50 }), vlm.recall(image, text))
  check.fails(function() vlm.recall(image, text:narrow(0, 0, 3), { among = 2 }) end, "vlm.recall: among: expected")
end)

check.test("classes by their names", function()
  local asked = {}
  local vectors = vlm.named({ "dog", "100 %" }, function(texts)
    for _, text in ipairs(texts) do asked[#asked + 1] = text end
    return ty.tensor { { 3.0, 4.0 }, { 0.0, 2.0 } }
  end, { "a %s", "just %s" })
  check.equal(asked, { "a dog", "a 100 %", "just dog", "just 100 %" })
  check.ok((vectors - ty.tensor { { 1.2, 1.6 }, { 0.0, 2.0 } }):abs():max():item() < 1e-6)
  check.fails(function() vlm.named({ "dog" }, function() end) end, "vlm.named: what encode returned: expected a tensor")
  check.fails(function() vlm.named({}, print, {}) end, "vlm.named: prompts: expected at least one, got none")
end)

check.test("accumulation adds the mean of the batches' gradients", function()
  local model, other = clip(), clip()
  other:load_state_dict(model:state_dict())
  local pictures = ty.randn(4, 1, 8, 8)
  local tokens = ty.randint(1, 9, { 4, 5 })
  local list = {}
  for k = 1, 2 do list[k] = { pictures = pictures:narrow(0, 2 * k - 2, 2), tokens = tokens:narrow(0, 2 * k - 2, 2) } end
  local mean = vlm.accumulated_backward(model, list)
  local sum = 0
  for _, batch in ipairs(list) do
    local loss = vlm.contrastive_loss(other:image_features(batch.pictures), other:text_features(batch.tokens),
      other.logit_scale:exp())
    sum = sum + loss:item() / 2
    loss:backward()
  end
  check.close(mean, sum, 1e-6)
  local wanted = other:parameters()
  for i, p in ipairs(model:parameters()) do
    if p.grad then check.ok((p.grad - wanted[i].grad / 2):abs():max():item() < 1e-5) end
  end
end)

check.finish()
