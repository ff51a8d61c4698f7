-- Heads that are not those of the family's language model, or not tied to its embedding, against transformers: the
-- small models of tests/fixtures/llm (make_llm.py, heads()); what loading says of heads that are not known.
local here = (arg and arg[0]:match ".*/" or "tests/modules/models/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local hub = require "tycho.hub"
local models = require "tycho.models"

local root = check.root .. "tests/fixtures/llm/"

local function compare(got, want, what)
  check.equal(got.shape, want.shape, what .. " shape")
  check.ok((got - want):abs():max():item() <= 1e-4 * want:abs():max():item(), what)
end

local kinds = { gpt2_untied = "GPT2", gpt2_sequence = "GPT2ForSequenceClassification",
  gpt2_token = "GPT2ForTokenClassification", llama_sequence = "LlamaForSequenceClassification",
  qwen2_token = "Qwen2ForTokenClassification", bert_untied = "BertForMaskedLM", bert_decoder = "BertLMHeadModel",
  bert_sequence = "BertForSequenceClassification", bert_token = "BertForTokenClassification",
  bert_answers = "BertForQuestionAnswering", falcon_sequence = "FalconForSequenceClassification",
  falcon_token = "FalconForTokenClassification", opt_sequence = "OPTForSequenceClassification",
  modernbert_mean = "ModernBertForSequenceClassification" }
for base, class in pairs { roberta = "Roberta", distilbert = "DistilBert", modernbert = "ModernBert" } do
  kinds[base .. "_untied"], kinds[base .. "_sequence"] = class .. "ForMaskedLM", class .. "ForSequenceClassification"
  kinds[base .. "_token"] = class .. "ForTokenClassification"
  kinds[base .. "_answers"] = class .. "ForQuestionAnswering"
end

for name, kind in pairs(kinds) do
  check.test(name, function()
    local want = ty.io.load_safetensors(root .. name .. "/expected.safetensors")
    local function logits(model)
      local got, right = ty.no_grad(model.forward, model, want.tokens, { mask = want.mask }), want.logits
      if got.ndim == 3 then -- padding counts for nothing
        local seen = want.mask:unsqueeze(-1):to "f32"
        got, right = got * seen, right * seen
      end
      return got, right
    end
    local model = hub.load(root .. name, { dtype = "f32" })
    check.equal(getmetatable(model).__name, kind)
    check.equal({ model.report.unexpected, model.report.missing, model.report.left_out }, { {}, {}, {} })
    local got, right = logits(model)
    compare(got, right, name .. " logits")
    if name:find "sequence" and not name:find "bert" then
      compare(ty.no_grad(model.forward, model, want.tokens), want.logits, name .. " without a mask, by pad_token_id")
    end

    -- What is saved is the same class again.
    model:save(scratch.file(name))
    local again = hub.load(scratch.file(name))
    check.equal(getmetatable(again).__name, kind)
    compare(logits(again), right, name .. " saved")

    -- One made from a config has the same parameters, and can be trained.
    local fresh = hub.load(root .. name, { weights = false }):train()
    local names = {}
    for key in pairs(model:state_dict()) do names[key] = true end
    for key in pairs(fresh:state_dict()) do
      check.ok(names[key], key)
      names[key] = nil
    end
    check.equal(names, {})
    if kind:find "Sequence" then
      local loss = fresh:loss(want.tokens, ty.tensor { 0, 2, 1 }, { mask = want.mask })
      loss:backward()
      check.ok(loss:item() > 0)
      fresh.config.problem_type = "multi_label_classification"
      check.ok(fresh:loss(want.tokens, ty.ones { 3, 3 }, { mask = want.mask }):item() > 0)
    elseif kind:find "Token" then
      check.ok(fresh:loss(want.tokens, want.tokens:remainder(3), { mask = want.mask }):item() > 0)
    elseif kind:find "Question" then
      local inside = ty.tensor({ { 0, 3 }, { 1, 1 }, { 2, 2 } }, { dtype = "i64" })
      check.ok(fresh:loss(want.tokens, inside, { mask = want.mask }):item() > 0)
    end
    if kind:find "Classification" then check.fails(function() fresh:generate({}, 1) end, "generates no text") end
  end)
end

-- A folder with a fixture's config, changed, and tensors.
local count = 0
local function folder(name, change, more)
  count = count + 1
  local path = scratch.file("folder" .. count)
  ty.io.mkdir(path)
  local config, state = ty.io.load_json(root .. name .. "/config.json"), hub.weights(root .. name)
  for key, value in pairs(change) do config[key] = value end
  for key, value in pairs(more or {}) do state[key] = value or nil end
  ty.io.save_json(path .. "/config.json", config)
  ty.io.save_safetensors(path .. "/model.safetensors", state)
  return path
end

check.test("a head that is not known is an error that names it and its tensors, and stands in the report", function()
  local choice = folder("bert_sequence", { architectures = { "BertForMultipleChoice" } })
  local message = check.fails(function() hub.load(choice) end,
    "architecture is BertForMultipleChoice, which is not known")
  check.ok(message:find("the model is a Bert\n", 1, true) and message:find("classifier.weight", 1, true), message)
  local report = hub.load(choice, { strict = false }).report
  check.equal({ report.unknown, report.unexpected },
    { "BertForMultipleChoice", { "classifier.bias", "classifier.weight" } })
  check.fails(function() hub.load(folder("llama_sequence", { architectures = { "LlamaForQuestionAnswering" } })) end,
    "architecture is LlamaForQuestionAnswering, which is not known; the model is a Llama")
  -- The encoder alone, which is asked for: what is left out is noted.
  report = hub.load(folder("bert_sequence", { architectures = { "BertModel" } })).report
  check.equal({ report.left_out, report.unexpected }, { { "classifier.bias", "classifier.weight" }, {} })
  -- A name that is not known, and nothing that would not fit.
  check.equal(hub.load(folder("llama_dynamic", { architectures = { "LLaMAForCausalLM" } })).report.unexpected, {})
  check.fails(function() hub.load(folder("bert_decoder", { add_cross_attention = true })) end, "add_cross_attention")
  check.fails(function() hub.load(folder("bert_sequence", { id2label = { ["0"] = "a" } })) end, "misshapen (2)")
  local labels = folder("bert_sequence", { id2label = ty.io.null, num_labels = "x" })
  check.fails(function() hub.load(labels) end, "num_labels")
end)

check.test("a head beside an embedding that it differs from is not tied, whatever the config says", function()
  local tokens = ty.tensor { { 5, 9, 2 } }
  local function same(path, want)
    local model = hub.load(path, { dtype = "f32" })
    check.equal(model.report.unexpected, {})
    compare(model(tokens), want(tokens), path)
    return model
  end
  for name, key in pairs { gpt2_untied = "lm_head.weight", bert_untied = "cls.predictions.decoder.weight" } do
    local want = hub.load(root .. name, { dtype = "f32" })
    local model = same(folder(name, { tie_word_embeddings = true }), want)
    check.equal(model.config.tie_word_embeddings, false)
    local embedding = hub.weights(root .. name)[name:find "gpt2" and "transformer.wte.weight"
      or "bert.embeddings.word_embeddings.weight"]
    check.equal(hub.load(folder(name, { tie_word_embeddings = true }, { [key] = embedding }))
      .config.tie_word_embeddings, true)
  end
  -- The bias of an untied head of BERT as older files have it.
  local state = hub.weights(root .. "bert_untied")
  same(folder("bert_untied", {}, { ["cls.predictions.bias"] = state["cls.predictions.decoder.bias"],
    ["cls.predictions.decoder.bias"] = false }), hub.load(root .. "bert_untied", { dtype = "f32" }))
  local model = models.GPT2 { vocabulary = 40, context = 16, width = 16, layers = 1, heads = 2, tie = false }
  check.equal(model(tokens).shape, { 1, 3, 40 })
  check.ok(model.lm_head and model:published_config().tie_word_embeddings == false)
end)

scratch.clean()
check.finish()
