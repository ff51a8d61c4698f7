-- Momentum self-distillation: the loss of the whole cycle and the gradient of its queries, soft targets and queues from
-- their definition, memory that does not grow with the cycle, training that goes on bit for bit.
local here = arg and arg[0]:match ".*/" or "tests/modules/vlm/"
local check = dofile(here .. "../../lua/check.lua")
local scratch = dofile(here .. "../../lua/scratch.lua")
local ty = require "tycho"
local models, vlm = require "tycho.models", require "tycho.vlm"

local msd, nn = vlm.msd, ty.nn

local function distance(a, b) return (a:to "f64" - b:to "f64"):abs():max():item() end

local function clip(seed, width)
  ty.manual_seed(seed or 3)
  return models.CLIPModel { projection_dim = 12,
    text_config = { vocab_size = 16, hidden_size = width or 16, intermediate_size = 32, num_hidden_layers = 1,
      num_attention_heads = 2, max_position_embeddings = 5, eos_token_id = 15 },
    vision_config = { image_size = 8, patch_size = 2, num_channels = 1, hidden_size = width or 16,
      intermediate_size = 32, num_hidden_layers = 1, num_attention_heads = 2 } }
end

-- Eight kinds of pictures, a light square at one of eight places, and texts that name the place.
local function world(n, seed)
  ty.manual_seed(seed)
  local pictures = ty.randn(n, 1, 8, 8) * 0.1
  for i = 0, n - 1 do
    local y, x = i % 8 // 4 * 4, i % 4 * 2
    pictures[("%d, 0, %d:%d, %d:%d"):format(i, y, y + 4, x, x + 2)]:fill_(1)
  end
  local tokens = ty.full({ n, 5 }, 14, { dtype = "i64" })
  tokens[":, 2"]:copy_(ty.arange(n) % 8 + 2)
  tokens[":, 3"]:copy_(ty.randint(10, 14, { n }))
  tokens[":, 4"]:fill_(15)
  return pictures, tokens
end

local function batches(n, size, seed)
  local pictures, tokens = world(n, seed or 1)
  local list = {}
  for start = 0, n - 1, size do
    local count = math.min(size, n - start)
    list[#list + 1] = { pictures = pictures:narrow(0, start, count), tokens = tokens:narrow(0, start, count) }
  end
  return list, pictures, tokens
end

check.test("its own teacher, no soft targets, no queue: the large batch's loss, the queries' gradient", function()
  local list, pictures, tokens = batches(20, 6)
  local direct = clip()
  local image = nn.normalize(direct:image_features(pictures))
  local text = nn.normalize(direct:text_features(tokens))
  local scale, own = direct.logit_scale:exp(), ty.arange(20)
  local whole = vlm.contrastive_loss(image, text, scale)
  -- The same with the keys held still: only queries carry gradients.
  local queries = (ty.cross_entropy(image:matmul(text:detach():transpose(0, 1)) * scale, own)
    + ty.cross_entropy(text:matmul(image:detach():transpose(0, 1)) * scale, own)) * 0.5
  check.close(queries:item(), whole:item(), 1e-6)
  queries:backward()
  local wanted = direct:parameters()
  for _, size in ipairs { 20, 6, 1 } do
    local model = clip()
    check.close(msd.backward(model, model, batches(20, size), { alpha = 0 }), whole:item(), 1e-5)
    for i, p in ipairs(model:parameters()) do
      check.ok(distance(p.grad, wanted[i].grad) < 1e-5, ("batches of %d, parameter %d"):format(size, i))
    end
  end
  -- The mean over small batches is another loss: contrast within each alone.
  local small = 0
  for _, batch in ipairs(list) do
    local a, b = direct:image_features(batch.pictures), direct:text_features(batch.tokens)
    small = small + vlm.contrastive_loss(a, b, scale):item() * batch.pictures.shape[1] / 20
  end
  check.ok(whole:item() - small > 0.5, "which is smaller, since there is less to be mistaken for")
end)

check.test("soft targets, a teacher and a queue, from the definition", function()
  local list, pictures, tokens = batches(6, 4)
  local model, teacher = clip(3), clip(4)
  local queue = msd.queue(5)
  ty.manual_seed(9)
  local old_image, old_text = nn.normalize(ty.randn(5, 12)), nn.normalize(ty.randn(5, 12))
  queue:push(old_image, old_text)
  local function unit(m)
    return ty.no_grad(function()
      return nn.normalize(m:image_features(pictures)):tolist(), nn.normalize(m:text_features(tokens)):tolist(),
        m.logit_scale:exp():item()
    end)
  end
  local qi, qt, scale = unit(model)
  local ti, tt, soft = unit(teacher)
  local function joined(a, b)
    local all = table.move(a, 1, #a, 1, {})
    return table.move(b:tolist(), 1, 5, #all + 1, all)
  end
  local ki, kt = joined(ti, old_image), joined(tt, old_text)
  local function softmax(query, keys, by)
    local values, sum = {}, 0
    for j, key in ipairs(keys) do
      local dot = 0
      for d = 1, 12 do dot = dot + query[d] * key[d] end
      values[j] = math.exp(by * dot)
      sum = sum + values[j]
    end
    for j = 1, #keys do values[j] = values[j] / sum end
    return values
  end
  local want = 0
  for i = 1, 6 do
    for _, way in ipairs { { qi, ti, kt }, { qt, tt, ki } } do
      local p, q = softmax(way[1][i], way[3], scale), softmax(way[2][i], way[3], soft)
      for j = 1, 11 do want = want - ((j == i and 0.7 or 0) + 0.3 * q[j]) * math.log(p[j]) / 12 end
    end
  end
  check.close(msd.backward(model, teacher, list, { alpha = 0.3, queue = queue }), want, 1e-5)
  for _, p in ipairs(teacher:parameters()) do check.ok(p.grad == nil, "the teacher gets no gradient") end
  -- The queue has the cycle's keys now, the last five of eleven.
  check.ok(distance(queue.image, ty.tensor(ti)["1:6"]) < 1e-6 and distance(queue.text, ty.tensor(tt)["1:6"]) < 1e-6)
  local rows = msd.targets(ty.eye(3), ty.eye(5)[":, 0:3"], 2, 0.25, 1):tolist()
  for i, row in ipairs(rows) do
    local sum = 0
    for _, value in ipairs(row) do sum = sum + value end
    check.close(sum, 1, 1e-6)
    check.ok(row[i + 1] > 0.75, "the own key is one further on")
  end
end)

check.test("memory does not grow with the cycle", function()
  local model = clip(3, 64)
  local function peak(count)
    local list = batches(16 * count, 16)
    model:zero_grad()
    msd.backward(model, model, list) -- gradients are there
    collectgarbage()
    collectgarbage()
    ty.memory.reset_peak()
    local before = ty.memory.stats().live
    msd.backward(model, model, list)
    return ty.memory.stats().peak - before
  end
  local one, many = peak(1), peak(12)
  -- Twelve times the pairs; keys and a batch's similarities to them are the rest.
  check.ok(many < 1.5 * one, ("from %d to %d bytes"):format(one, many))
end)

local function loader(in_order)
  local pictures, tokens = world(64, 1)
  return ty.data.DataLoader(ty.data.TensorDataset { image = pictures, tokens = tokens }, { batch_size = 4,
    shuffle = not in_order, seed = 2 })
end

check.test("fit: captions of pictures that were not seen are found; it goes on bit for bit", function()
  local model = clip()
  -- Two batches of four are one picture of each kind.
  local losses, momentum = msd.fit(model, loader(true), { steps = 150, cycle = 2, lr = 3e-3, warmup = 10,
    momentum = 0.9, alpha = 0.2, ramp = 10, quiet = true })
  check.ok(losses[#losses] < losses[1], "the loss falls")
  local pictures, tokens = world(8, 2)
  for _, m in ipairs { model, momentum } do
    local found = vlm.retrieval(m:eval(), pictures, tokens, { among = 8 }).captions
    check.ok(found > 0.6, ("found %.3f, by chance 0.125"):format(found))
  end
  msd.fit(clip(), loader(), { steps = 3, cycle = 2, queue = 8, quiet = true })
  local o = { steps = 6, cycle = 2, quiet = true }
  local whole = msd.fit(clip(), loader(), o)
  o.folder, o.pause = scratch.file "run", 3
  msd.fit(clip(), loader(), o)
  o.pause, o.resume = nil, true
  check.equal(msd.fit(clip(), loader(), o), whole)
  -- Momentum 0: the model is its own teacher.
  local plain, same = msd.fit(clip(), loader(), { steps = 2, momentum = 0, alpha = 0, cycle = 2, quiet = true })
  check.ok(same.logit_scale and #plain == 2)
end)

check.test("wrong arguments", function()
  local model, list = clip(), batches(4, 2)
  check.fails(function() msd.backward(nn.Linear(1, 1), model, list) end,
    "vlm.msd.backward: model: expected a CLIPModel")
  check.fails(function() msd.backward(model, model, {}) end, "vlm.msd.backward: batches: expected at least one")
  check.fails(function() msd.backward(model, model, list, { queue = {} }) end, "queue: expected one of vlm.msd.queue")
  check.fails(function() msd.backward(model, model, list, { alpha = 2 }) end, "alpha: expected a number in [0, 1]")
  check.fails(function() msd.queue(0) end, "vlm.msd.queue: size: expected an integer >= 1, got 0")
  check.fails(function() msd.queue(2):push(ty.ones(2, 3), ty.ones(3, 3)) end, "KeyQueue:push: expected image and text")
  local queue = msd.queue(2)
  queue:push(ty.ones(2, 3), ty.ones(2, 3))
  check.fails(function() queue:push(ty.ones(2, 4), ty.ones(2, 4)) end, "expected keys of 3 numbers")
  check.fails(function() msd.fit(model, loader(), { steps = 1, average = 0.9 }) end, "average: expected nil")
  check.fails(function() msd.targets(ty.ones(2, 3), ty.ones(2, 3), 1, 0, 1) end, "expected query [n, d]")
end)

scratch.clean()
check.finish()
