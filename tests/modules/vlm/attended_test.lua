-- What questions attend to: the weights of attention and the chosen features against a plain computation by loops.
local here = arg and arg[0]:match ".*/" or "tests/modules/vlm/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local models, vlm = require "tycho.models", require "tycho.vlm"

ty.manual_seed(2)
local tokenizer = ty.tokenizer.train({ "what is this? red apple" }, { vocabulary = 270, special = { "<e>", "<i>" } })
ty.tokenizer.fields(tokenizer).eos = 0
local dialogue = vlm.Dialogue(tokenizer, { image_token = 1, features = 4, before = " ", lead = " " })
local model = models.Llava { image_token_index = 1, tie_word_embeddings = true, vision_feature_layer = -1,
  text_config = { model_type = "llama", vocab_size = tokenizer.size, hidden_size = 16, intermediate_size = 32,
    num_hidden_layers = 2, num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 64,
    tie_word_embeddings = true },
  vision_config = { model_type = "clip_vision_model", image_size = 8, patch_size = 4, hidden_size = 8,
    intermediate_size = 16, num_hidden_layers = 1, num_attention_heads = 2 } }:eval()
for _, p in ipairs(model.language_model:parameters()) do
  if p.ndim == 2 then ty.no_grad(function() p:mul_(12) end) end
end

check.test("attention's weights are softmax of scaled products, and give its output", function()
  local layer = model.language_model.model.layers[1].self_attn
  local x = ty.randn(1, 5, 16)
  local cos, sin = model.language_model.rotary:table(5, "cpu")
  cos, sin = cos:narrow(0, 0, 5), sin:narrow(0, 0, 5)
  local w = ty.no_grad(function() return layer:weights(x, { cos = cos, sin = sin }) end)
  check.equal(w.shape, { 1, 4, 5, 5 })
  check.ok((w:sum(-1) - 1):abs():max():item() < 1e-5)
  check.equal(w:select(2, 1):narrow(-1, 2, 3):abs():max():item(), 0.0) -- nobody sees what follows
  local v = ty.nn.split_heads(layer.v_proj(x), 2)
  v = ty.stack({ v, v }, 2):flatten(1, 2)
  local y = layer.o_proj(ty.nn.join_heads(w:matmul(v)))
  check.ok((y - layer(x, { cos = cos, sin = sin })):abs():max():item() < 1e-4 * y:abs():max():item())
end)

check.test("the vector of a question is the mean of the features that its words attend to", function()
  local pictures = ty.randn(2, 3, 8, 8)
  local questions = { { { question = "what is this?", answer = "red" }, { question = "red?", answer = "apple" } },
    { { question = "is it?", answer = "red" } } }
  local vectors, taken = vlm.attended(model, dialogue:packed(questions), { forward = { pictures = pictures },
    mass = 0.6 })
  check.equal({ vectors.shape, taken.shape }, { { 3, 16 }, { 3, 4 } })
  local n = 0
  for i, turns in ipairs(questions) do
    for _, one in ipairs(turns) do
      n = n + 1
      -- By itself: the states before and after the first layer, and its weights.
      local tokens = dialogue:rows { { one } }
      local asked = dialogue:prompt(one.question).shape[2]
      local layer, x, y, w = model.language_model.model.layers[1], nil, nil, nil
      local remove = layer:register_forward_hook(function(_, after, stream, _, at)
        if type(after) == "table" then y = after[1] + after[2] end
        x = layer.input_layernorm(stream)
        w = layer.self_attn:weights(x, at):mean { 1 }:select(0, 0):tolist()
      end)
      ty.no_grad(function() model(tokens, { pictures = pictures:narrow(0, i - 1, 1) }) end)
      remove()
      local given, sum, order = { 0, 0, 0, 0 }, 0, { 1, 2, 3, 4 }
      for row = 5, asked do
        for k = 1, 4 do given[k], sum = given[k] + w[row][k], sum + w[row][k] end
      end
      table.sort(order, function(a, b) return given[a] > given[b] end)
      local mass, mean, count = 0, ty.zeros { 16 }, 0
      for _, k in ipairs(order) do
        local is_taken = mass <= 0.6
        mass = mass + given[k] / sum
        check.equal(taken:select(0, n - 1):select(0, k - 1):item(), is_taken)
        if is_taken then mean, count = mean + y:select(0, 0):select(0, k - 1), count + 1 end
      end
      check.ok((mean / count - vectors:select(0, n - 1)):abs():max():item() < 1e-4 * mean:abs():max():item())
      check.ok(count >= 1)
    end
  end
end)

check.test("a row's vector is by the words of all of its questions", function()
  local pictures, one = ty.randn(1, 3, 8, 8), { question = "what?", answer = "red" }
  local function vectors(questions, whole)
    return (vlm.attended(model, dialogue:packed { questions }, { forward = { pictures = pictures }, whole = whole }))
  end
  check.close(vectors({ one }, true):tolist(), vectors({ one }):tolist(), 1e-6)
  check.close(vectors({ one, one }, true):tolist(), vectors({ one }):tolist(), 1e-6)
  check.equal(vectors({ one, { question = "is it red?", answer = "no" } }, true).shape, { 1, 16 })
end)

check.test("all of the mass is all of the picture", function()
  local pictures = ty.randn(1, 3, 8, 8)
  local _, taken = vlm.attended(model, dialogue:packed { { { question = "what?", answer = "red" } } },
    { forward = { pictures = pictures }, mass = 1 })
  check.equal(taken:all():item(), true)
  check.fails(function() vlm.attended(model.language_model, {}, {}) end, "expected a Llava")
end)

check.finish()
