-- Digits on pages, and training with a teacher: places, splits, each part of the loss, what a student learns.
local here = arg and arg[0]:match ".*/" or "tests/modules/vision/"
local check = dofile(here .. "../../lua/check.lua")
local scratch = dofile(here .. "../../lua/scratch.lua")
local ty = require "tycho"
local models, vision = require "tycho.models", require "tycho.vision"

local function vit(depth)
  return models.ViTForImageClassification { image_size = 12, patch_size = 3, num_channels = 1, hidden_size = 16,
    intermediate_size = 32, num_hidden_layers = depth or 2, num_attention_heads = 2, num_labels = 10 }
end

check.test("pages: a picture lies whole on its page, at every place; the rest is paper", function()
  ty.manual_seed(1)
  local images = ty.rand(200, 2, 2, 3)
  local pages = vision.pages.place(images, 4, -5)
  check.equal(pages.shape, { 200, 2, 4, 4 })
  local places, want, got = {}, images:tolist(), pages:tolist()
  for n = 1, 200 do
    local found
    for y = 0, 2 do
      for x = 0, 1 do
        local fits = true
        for c = 1, 2 do
          for i = 1, 4 do
            for j = 1, 4 do
              local inside = i - y >= 1 and i - y <= 2 and j - x >= 1 and j - x <= 3
              fits = fits and got[n][c][i][j] == (inside and want[n][c][i - y][j - x] or -5)
            end
          end
        end
        if fits then found = y * 2 + x end
      end
    end
    check.ok(found, "page " .. n)
    places[found] = true
  end
  for place = 0, 5 do check.ok(places[place], "place " .. place) end
  check.fails(function() vision.pages.place(images, 2) end, "vision.pages.place: images: expected")
end)

check.test("pages: sets are always the same, of digits that are not trained on", function()
  local held_out, validation = vision.pages.set "held_out", vision.pages.set "validation"
  check.equal(held_out.image.shape, { 1440, 1, 9, 9 })
  check.equal(validation.label.shape, { 948 })
  ty.manual_seed(9)
  check.equal(vision.pages.set("held_out").image:eq(held_out.image):all():item(), true)
  check.equal(#vision.pages.training(), 1200)
  local ink = ty.data.digits { split = { 0.8, 0.2 }, seed = 0 }:batch(ty.arange(1200, 1437)).image:sum():item()
  check.close((validation.image + 1):sum():item() / 4, ink + 237 * 64, 1)
  check.equal(vision.pages.transform(ty.zeros(3, 1, 8, 8)).shape, { 3, 1, 9, 9 })
end)

check.test("pages: a base is kept, and measured as by hand", function()
  local o = { steps = 2, width = 16, depth = 1, heads = 2, batch = 8, seed = 3 }
  local first = vision.pages.base(scratch.file "base", o)
  local again = vision.pages.base(scratch.file "base", o)
  local set = vision.pages.set "validation"
  local few = { image = set.image:narrow(0, 0, 40), label = set.label:narrow(0, 0, 40) }
  local mine, theirs = vision.pages.measure(first, few), vision.pages.measure(again, few)
  check.equal(mine, theirs)
  local logits = ty.no_grad(first, few.image)
  check.close(mine.accuracy, logits:argmax(1):eq(few.label):to("f64"):mean():item(), 1e-12)
  check.close(mine.loss, ty.nn.cross_entropy(logits, few.label):item(), 1e-5)
end)

check.test("soft loss: the divergence times T squared; its gradient is T (p - q)", function()
  ty.manual_seed(2)
  local a = ty.randn(3, 4, { dtype = "f64" }):requires_grad_()
  local b = ty.randn(3, 4, { dtype = "f64" })
  local loss = vision.soft_loss(a, b, 3)
  local sum = 0
  local p, q = (a:detach() / 3):softmax(1):tolist(), (b / 3):softmax(1):tolist()
  for i = 1, 3 do
    for j = 1, 4 do sum = sum + q[i][j] * math.log(q[i][j] / p[i][j]) end
  end
  check.close(loss:item(), sum / 3 * 9, 1e-12)
  loss:backward()
  for i = 1, 3 do
    for j = 1, 4 do check.close(a.grad:tolist()[i][j], 3 * (p[i][j] - q[i][j]) / 3, 1e-12) end
  end
  check.close(vision.soft_loss(b, b):item(), 0, 1e-15)
  check.fails(function() vision.soft_loss(a, b:narrow(1, 0, 2)) end, "vision.soft_loss: expected logits")
end)

check.test("the loss is the sum of its parts, blocks by their weights; 0 to oneself without labels", function()
  ty.manual_seed(4)
  local student, teacher = vit(), vit()
  local images, labels = ty.randn(5, 1, 12, 12), ty.randint(0, 10, { 5 })
  local function loss(o)
    o.teacher = o.teacher or teacher
    return vision.distil_loss(student, images, labels, o):item()
  end
  local far = vision.feature_distances(student, teacher, images)
  check.equal(#far, 2)
  local by_hand = {}
  for i = 1, 2 do
    local mine, theirs = student.vit:hidden(images, { layer = i }), teacher.vit:hidden(images, { layer = i })
    by_hand[i] = (mine - theirs):square():mean():item() / theirs:square():mean():item()
    check.close(far[i], by_hand[i], 1e-5)
  end
  local features = loss { hard = 0, soft = 0, weights = { 3, 0.5 } }
  check.close(features, (3 * by_hand[1] + 0.5 * by_hand[2]) / 2, 1e-5)
  local hard, soft = loss { soft = 0, features = 0 }, loss { hard = 0, features = 0, temperature = 4 }
  check.close(hard, ty.nn.cross_entropy(student(images), labels):item(), 1e-6)
  check.close(soft, vision.soft_loss(student(images), teacher(images), 4):item(), 1e-6)
  check.close(loss { hard = 2, soft = 3, features = 0.1, temperature = 4, weights = { 3, 0.5 } },
    2 * hard + 3 * soft + 0.1 * features, 1e-4)
  check.close(vision.distil_loss(student, images, nil, { hard = 0, teacher = student:clone() }):item(), 0, 1e-6)
  check.equal(student.vit.encoder.layer[1]._hooks, false)
  check.fails(function() loss { weights = { 1 } } end, "vision.distil_loss: weights: expected 2 numbers")
  check.fails(function() loss { blocks = "no such" } end, "vision.distil_loss: blocks: expected a pattern")
  check.fails(function() loss { teacher = vit(1) } end, "teacher: expected 2 blocks, got 1")
  check.fails(function() vision.distil_loss(student, images, nil, { teacher = teacher }) end, "labels: expected")
end)

check.test("a student comes nearer to its teacher; what is frozen stays", function()
  ty.manual_seed(5)
  local teacher = vit()
  local student = vit()
  student.classifier:requires_grad_(false)
  local head = student.classifier.weight:clone()
  local set = ty.data.TensorDataset { image = ty.randn(64, 1, 12, 12), label = ty.randint(0, 10, { 64 }) }
  local images = set:batch(ty.arange(64)).image
  local before, called = vision.feature_distances(student, teacher, images), 0
  local losses = vision.distil(student, set, { teacher = teacher, hard = 0, soft = 0, steps = 30, lr = 3e-3,
    batch_size = 32, quiet = true, warmup = 0, more = function()
      called = called + 1
      return ty.zeros({})
    end })
  local after = vision.feature_distances(student, teacher, images)
  check.ok(losses[30] < 0.7 * losses[1] and after[1] < before[1] and after[2] < before[2])
  check.equal(called, 30)
  check.equal(student.classifier.weight:eq(head):all():item(), true)
  check.fails(function() vision.distil(student, set, { teacher = student }) end, "vision.distil: teacher: expected")
  check.fails(function() vision.distil(student, 3) end, "vision.distil: dataset: expected")
end)

scratch.clean()
check.finish()
