-- Reports by a light adapter: what is frozen stays byte for byte, both stages lower the loss, reports are written and
-- ranked as the model's own probabilities say.
local here = arg and arg[0]:match ".*/" or "tests/modules/vlm/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local models, peft, vlm = require "tycho.models", require "tycho.peft", require "tycho.vlm"

local rad, nn = vlm.llava_rad, ty.nn

local reports = { "a nodule in the left lung", "no findings", "a cyst in the liver; no nodule", "an effusion" }
local tokenizer = ty.tokenizer.train({ rad.question, table.unpack(reports) }, { vocabulary = 300,
  special = { "<end>", "<image>" } })
ty.tokenizer.fields(tokenizer).eos = 0

local function new_model(seed)
  ty.manual_seed(seed or 1)
  local tower = models.ResNetVisionModel.around(models.ResNet { in_channels = 1, classes = 2, channels = { 4, 8 },
    blocks = { 1, 1 }, small = true }, 8)
  local model = models.Llava { model_type = "llava", vision_config = tower:published_config(), image_token_index = 1,
    vision_feature_layer = -1, tie_word_embeddings = true, eos_token_id = 0,
    text_config = { model_type = "llama", vocab_size = tokenizer.size, hidden_size = 32, intermediate_size = 64,
      num_hidden_layers = 2, num_attention_heads = 2, max_position_embeddings = 128, tie_word_embeddings = true } }
  model.vision_tower:load_state_dict(tower:state_dict())
  return model
end
local dialogue = vlm.Dialogue(tokenizer, { image_token = 1, features = 16, before = " ", lead = " " })

ty.manual_seed(5)
local pictures = ty.randn(4, 1, 8, 8)

local function copy(model)
  local state = {}
  for name, tensor in pairs(model:state_dict()) do state[name] = tensor:clone() end
  return state
end

check.test("stage 1 changes the projector alone, stage 2 it and the adapters, which merge into the weights", function()
  local model = new_model()
  local looked, start = rad.look(model, pictures), copy(model)
  local pool = { reports = reports, looked = looked }
  check.equal(looked.shape, { 4, 16, 8 })
  local first = rad.tune(model, dialogue, pool, rad.align(model), { steps = 20, batch = 4, lr = 1e-2 })
  for name, tensor in pairs(model:state_dict()) do
    check.equal(tensor:eq(start[name]):all():item(), not name:find "^multi_modal_projector", name)
  end
  local second = rad.tune(model, dialogue, pool, rad.adapt(model, { rank = 4 }), { steps = 30, batch = 4, lr = 1e-2 })
  check.ok(second < first, ("%g %g"):format(second, first))
  peft.merge(model)
  peft.remove(model)
  local moved = 0
  for name, tensor in pairs(model:state_dict()) do
    local same = tensor:eq(start[name]):all():item()
    local adapted = name:find "^language_model%.model%.layers.*_proj%.weight$"
    if name:find "^multi_modal_projector" or adapted then
      if not same then moved = moved + 1 end
    else
      check.ok(same, name)
    end
  end
  check.equal(moved, 4 + 2 * 7)
end)

check.test("what is learnt is written, by the pictures, and is the likeliest", function()
  local model = new_model()
  rad.tune(model, dialogue, { reports = reports, pictures = pictures }, model:parameters(), { steps = 80, batch = 4,
    lr = 1e-2 })
  check.equal(rad.write(model, dialogue, pictures, { batch = 3 }), reports)
  check.equal(rad.write(model, dialogue, pictures:flip { 0 })[1], reports[4])
  local x = rad.likelihoods(model, dialogue, rad.look(model, pictures), reports)
  check.equal(x:argmax(1):tolist(), { 0, 1, 2, 3 })
  -- Against the loss of each pair alone.
  for i = 0, 3 do
    local tokens, targets = dialogue:rows { { { question = rad.question, answer = reports[i % 3 + 1] } } }
    local learnt = targets:ne(-100):to("i64"):sum():item()
    local loss = ty.no_grad(function()
      return model:loss(tokens, targets, { pictures = pictures:narrow(0, i, 1) }):item()
    end)
    check.close(x[("%d, %d"):format(i, i % 3)]:item(), -loss * learnt, 1e-3)
  end
end)

check.test("the parts learn by themselves, and both stages in one leave a plain model", function()
  local model = new_model()
  local reading = vlm.Dialogue(tokenizer, { image_token = 1, features = 0, before = " ", lead = " " })
  local shown = ty.zeros(4, 16, 2)
  shown["0, 3, 1"]:fill_(1)
  shown["2, :, 0"]:fill_(1)
  local head = rad.know(model, pictures, shown, { steps = 60, batch = 4, lr = 1e-2 })
  local told = ty.no_grad(function() return head(rad.seen(model, pictures)):gt(0):to "f32" end)
  check.equal(told:flatten():tolist(), shown:flatten():tolist())
  check.equal(model.training, false)
  local tower = copy(model)
  rad.read(model, reading, reports, { steps = 80, batch = 4, lr = 1e-2 })
  local drawn, known = rad.draw(model, reading, 6, { seed = 2 }), {}
  for _, text in ipairs(reports) do known[text] = true end
  local right = 0
  for _, text in ipairs(drawn) do right = right + (known[text] and 1 or 0) end
  check.ok(right >= 4, right)
  check.equal(drawn, rad.draw(model, reading, 6, { seed = 2 }))
  for name, tensor in pairs(model:state_dict()) do
    if not name:find "^language_model" then check.ok(tensor:eq(tower[name]):all():item(), name) end
  end
  local looked = rad.look(model, pictures)
  local first, second = rad.train(model, dialogue, { looked = looked, reports = reports }, { align = 10, adapt = 60,
    rank = 8, batch = 4, lr = 1e-2 })
  check.ok(second < first)
  for name in model:named_parameters() do check.ok(not name:find "lora", name) end
  check.equal(rad.write(model, dialogue, pictures), reports)
  check.equal(rad.retrieval(model, dialogue, looked, reports, 4), { reports = 1, pictures = 1 })
end)

check.test("the order of training is that of its seed alone", function()
  local function loss(seed)
    local model = new_model()
    ty.manual_seed(seed)
    return rad.tune(model, dialogue, { reports = reports, looked = rad.look(model, pictures) }, rad.align(model),
      { steps = 5, batch = 2, lr = 1e-2, seed = 3 })
  end
  check.equal(loss(1), loss(2))
end)

check.test("norms of the tower learn where they are to", function()
  local tower = new_model().vision_tower
  local function mean() return tower:state_dict()["resnet.bn1.running_mean"]:clone() end
  local before = mean()
  tower:train()
  tower:hidden(pictures + 3)
  check.ok(mean():eq(before):all():item())
  tower:learn_norms(true):train()
  tower:hidden(pictures + 3)
  check.ok(not mean():eq(before):all():item())
  check.fails(function() tower:learn_norms(1) end, "learn: expected a boolean, got 1")
end)

check.test("the nearest picture is the one of the largest cosine", function()
  local known = ty.randn(6, 4, 8)
  local looked = known:index_select(0, ty.tensor({ 4, 1 }, { dtype = "i64" })) * 3 + ty.randn(2, 4, 8) * 0.01
  check.equal(rad.nearest(looked, known), { 5, 2 })
end)

check.test("wrong arguments", function()
  local model = new_model()
  check.fails(function() rad.align(nn.Linear(2, 2)) end, "align: model: expected a Llava, got a module Linear")
  check.fails(function() rad.tune(model, dialogue, { reports = { "a" } }, {}) end,
    "pool: expected looked or pictures of 1 reports, got nil")
  check.fails(function() rad.write(model, nil, pictures) end, "dialogue: expected a Dialogue, got")
  check.fails(function() rad.adapt(model, { rank = 0 }) end, "rank: expected an integer >= 1, got 0")
  check.fails(function() rad.nearest(ty.ones(1, 2, 3), ty.ones(1, 2, 4)) end, "looked and known")
end)

check.finish()
