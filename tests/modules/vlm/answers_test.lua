-- Answers counted by kind, models compared on the same questions, and costs from shapes against the kernels that run.
local here = arg and arg[0]:match ".*/" or "tests/modules/vlm/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local models, vlm = require "tycho.models", require "tycho.vlm"
local answers = vlm.answers

local function list(text) -- "c+" is a right answer of kind c
  local found = {}
  for kind, sign in text:gmatch "(%a)([+-])" do found[#found + 1] = { kind = kind, right = sign == "+" } end
  return found
end

check.test("shares by kind, and the mean of the kinds whatever their number", function()
  check.equal(answers.shares(list "a+a+a+a-b-b+"), { a = 0.75, b = 0.5, all = 0.625 })
  check.equal(answers.shares {}, { all = 0 })
end)

check.test("two models on the same questions: the difference and its error are those of the pairs", function()
  local one, two = list "a+a-a-a+b+b-b-", list "a+a+a-a-b+b+b+"
  local difference, err = answers.paired(one, two)
  check.close(difference, (0 / 4 + 2 / 3) / 2, 1e-12)
  -- Differences of a: 0, 1, 0, -1; of b: 0, 1, 1.
  check.close(err, math.sqrt((2 / 3) / 4 + (1 / 3) / 3) / 2, 1e-12)
  check.equal({ answers.paired(one, one) }, { 0, 0 })
  check.fails(function() answers.paired(one, list "a+") end, "expected answers to the same questions, got 7 and 1")
  check.fails(function() answers.paired(list "a+", list "b+") end, "got the kinds a and b at 1")
end)

ty.manual_seed(1)
local tokenizer = ty.tokenizer.train({ "what is this? red apple" }, { vocabulary = 270, special = { "<e>", "<i>" } })
ty.tokenizer.fields(tokenizer).eos = 0
local dialogue = vlm.Dialogue(tokenizer, { image_token = 1, features = 4, before = " ", lead = " " })
local model = models.Llava { model_type = "llava", image_token_index = 1, tie_word_embeddings = true,
  vision_feature_layer = -2,
  text_config = { model_type = "llama", vocab_size = tokenizer.size, hidden_size = 16, intermediate_size = 40,
    num_hidden_layers = 3, num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 64,
    tie_word_embeddings = true },
  vision_config = { model_type = "clip_vision_model", image_size = 8, patch_size = 4, hidden_size = 8,
    intermediate_size = 24, num_hidden_layers = 3, num_attention_heads = 2 } }

check.test("questions that are learnt are answered, by the pictures", function()
  local pictures = ty.stack { ty.ones(3, 8, 8), -ty.ones(3, 8, 8) }
  local questions = { { { question = "what is this?", answer = "red", kind = "colour" },
    { question = "what?", answer = "apple", kind = "name" } },
    { { question = "what is this?", answer = "apple", kind = "colour" } } }
  local opt = ty.optim.AdamW(model:parameters(), { lr = 1e-2 })
  for _ = 1, 60 do
    opt:step(vlm.Dialogue.loss(model, dialogue:packed(questions), { pictures = pictures }))
  end
  local found = answers.ask(model, dialogue, { { pictures = pictures, questions = questions } })
  check.equal(found, { { kind = "colour", right = true }, { kind = "name", right = true },
    { kind = "colour", right = true } })
  -- The other picture gets the other answer.
  found = answers.ask(model, dialogue, { { pictures = pictures:flip { 0 }, questions = questions } })
  check.equal({ found[1].right, found[3].right }, { false, false })
  check.equal(model.training, true)
end)

-- Products and attention of what fn runs.
local function work(fn)
  local sum, counted = 0, { matmul = true, linear = true, scaled_dot_product_attention = true, attention = true,
    conv2d = true }
  for _, event in ipairs((ty.profile(fn, { limits = { flops = 1, bandwidth = 1 } })).events) do
    if counted[event.op] then sum = sum + event.flops end
  end
  return sum
end

check.test("costs from shapes are those of the kernels that run", function()
  local pictures = ty.randn(1, 3, 8, 8)
  local row = { 1, 1, 1, 1, 5, 6, 7, 8, 9, 10 }
  local tokens = ty.tensor({ row }, { dtype = "i64" })
  local head = 2 * 16 * tokenizer.size
  local function both(shares)
    local cost = vlm.cost(model, { text = 6, shares = shares })
    local features = model:picture_features(pictures)
    local cache = model:cache()
    check.close(work(function() ty.no_grad(function() model:picture_features(pictures) end) end), cost.seeing, 0)
    -- forward() has the logits of all tokens.
    check.close(work(function()
      ty.no_grad(function() model(tokens, { features = features, cache = cache }) end)
    end), cost.prefill + 9 * head, 0)
    check.close(work(function()
      ty.no_grad(function() model(ty.tensor { { 5 } }, { cache = cache }) end)
    end), cost.decode, 0)
    for i, held in ipairs(cache:held()) do check.equal(cost.layers[i].tokens + 1, held) end
    return cost
  end
  local dense = both()
  check.equal(dense.kv, 3 * 2 * 10 * 2 * 4 * 4)
  vlm.mixture_of_depths.apply(model, { shares = { 1, 0.5, 0.25 } })
  local routed = both { 1, 0.5, 0.25 }
  check.equal(routed.kv, (10 + 8 + 7) * 2 * 2 * 4 * 4)
  check.ok(routed.prefill < dense.prefill and routed.decode < dense.decode)
end)

check.finish()
