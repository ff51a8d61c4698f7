-- The language model families against transformers: logits, loss, gradients and greedy text of the small models of
-- tests/fixtures/llm (make_llm.py), loaded from the folders that transformers wrote.
local here = (arg and arg[0]:match ".*/" or "tests/modules/models/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local llm = require "tycho.llm"

local root = check.root .. "tests/fixtures/llm/"
local TOLERANCE = 1e-4

local function load(name, options)
  local o = { dtype = "f32" }
  for key, value in pairs(options or {}) do o[key] = value end
  return llm.load(root .. name, o)
end

local function expected(name)
  local tensors, notes = ty.io.load_safetensors(root .. name .. "/expected.safetensors")
  return tensors, ty.io.json_decode(notes.variants)
end

-- Largest difference relative to the largest magnitude.
local function compare(got, want, what)
  check.equal(got.shape, want.shape, what .. " shape")
  local scale = math.max(want:abs():max():item(), 1e-30)
  local off = (got:to "f64" - want:to "f64"):abs():max():item() / scale
  check.ok(off <= TOLERANCE, ("%s: relative error %.2g"):format(what, off))
end

local function wave(t) return (ty.arange(t:numel(), { dtype = "f64" }) * 0.37 + 1):sin():reshape(t.shape) end

-- Norms and products with a wave of all gradients; every one that the reference has must be there.
local function compare_gradients(model, loss, want, prefix)
  local parameters, left = {}, {}
  for name, p in model:named_parameters() do
    parameters[name] = p
    left[name] = true
  end
  model:zero_grad()
  loss:backward()
  local largest = 0
  for name, pair in pairs(want) do
    if name:match "^grad" then largest = math.max(largest, pair:tolist()[1]) end
  end
  local floor = 1e-6 * largest -- some gradients are 0 but for rounding: those of the biases of BERT's keys
  for name, pair in pairs(want) do
    local key = name:match "^grad%.(.*)$"
    if key then
      key = key:gsub("^" .. (prefix or "$"), "")
      local p = parameters[key]
      left[key] = nil
      if check.ok(p, "a parameter " .. key) then
        local g = p.grad:to "f64"
        local norm, product = pair:tolist()[1], pair:tolist()[2]
        local got = g:square():sum():sqrt():item()
        check.ok(math.abs(got - norm) <= TOLERANCE * norm + floor,
          ("gradient of %s: norm %.8g, not %.8g"):format(key, got, norm))
        got = (g * wave(g)):sum():item()
        check.ok(math.abs(got - product) <= TOLERANCE * norm + floor,
          ("gradient of %s: product %.8g, not %.8g"):format(key, got, product))
      end
    end
  end
  return left
end

local function compare_greedy(model, want, name)
  local prompts, alone = {}, {}
  for i, length in ipairs { 7, 3, 11 } do
    local all = want["greedy." .. (i - 1)]
    prompts[i] = all:narrow(0, 0, length)
    local got = model:generate(prompts[i]:unsqueeze(0), 200, { temperature = 0 })
    check.equal(got:select(0, 0):tolist(), all:tolist(), name .. " greedy " .. i)
    alone[i] = all:tolist()
  end
  local together = model:generate(prompts, 200, { temperature = 0 })
  for i, row in ipairs(together) do check.equal(row:tolist(), alone[i], name .. " in a batch " .. i) end
end

for _, name in ipairs { "gpt2", "llama", "llama3", "mistral", "qwen2", "qwen3", "mixtral" } do
  check.test(name, function()
    local want, variants = expected(name)
    local model = load(name)
    compare(model(want.tokens), want.logits, name .. " logits")
    local t = want.tokens.shape[2]
    local loss = model:loss(want.tokens, ty.concat({ want.labels:narrow(1, 1, t - 1),
      ty.full({ 2, 1 }, -100, { dtype = "i64" }) }, 1))
    check.close(loss:item(), want.loss:item(), TOLERANCE, name .. " loss")
    local left = compare_gradients(model, loss, want, name == "gpt2" and "transformer%." or nil)
    check.equal(left, {}, name .. " gradients left")
    for i, change in ipairs(variants) do
      compare(ty.no_grad(load(name, { config = change }).forward, load(name, { config = change }), want.tokens),
        want["variant." .. (i - 1)], ("%s variant %d"):format(name, i))
    end
    compare_greedy(model, want, name)
  end)
end

check.test("bert", function()
  local want = expected "bert"
  local model = load "bert"
  local options = { mask = want.mask, types = want.types }
  local seen = want.mask:to("bool"):unsqueeze(-1):to "f32"
  local logits = model(want.tokens, options)
  compare(logits * seen, want.logits * seen, "bert logits")
  local loss = model:loss(want.tokens, want.labels, options)
  check.close(loss:item(), want.loss:item(), TOLERANCE, "bert loss")
  check.equal(compare_gradients(model, loss, want), {}, "bert gradients left")
  local encoder = llm.Bert(ty.io.load_json(root .. "bert/config.json"), false)
  llm.assign(encoder, llm.weights(root .. "bert"), { dtype = "f32" })
  encoder:eval()
  compare(encoder(want.tokens, options) * seen, want.hidden * seen, "bert hidden states")
  compare(encoder:embed(want.tokens, options), want.embedding, "bert embeddings")
  check.close(encoder:embed(want.tokens, options):square():sum(1):tolist(), { 1, 1 }, 1e-5)
end)

for _, name in ipairs { "t5", "t5_v1_1" } do
  check.test(name, function()
    local want = expected(name)
    local model = load(name)
    local loss = model:loss(want.tokens, want.labels, { mask = want.mask })
    check.close(loss:item(), want.loss:item(), TOLERANCE, name .. " loss")
    local inputs = ty.concat({ ty.zeros({ 2, 1 }, { dtype = "i64" }), want.labels:narrow(1, 0, 12) }, 1)
    inputs = inputs:masked_fill(inputs:eq(-100), 0)
    compare(model(want.tokens, inputs, { mask = want.mask }), want.logits, name .. " logits")
    check.equal(compare_gradients(model, loss, want), {}, name .. " gradients left")
    for i = 0, 1 do
      local got = model:generate(want["source." .. i]:unsqueeze(0), 200, { temperature = 0 })
      check.equal(got:select(0, 0):tolist(), want["greedy." .. i]:tolist(), name .. " greedy " .. i)
    end
    local rows = model:generate({ want["source.0"], want["source.1"] }, 200, { temperature = 0 })
    for i = 0, 1 do check.equal(rows[i + 1]:tolist(), want["greedy." .. i]:tolist(), name .. " in a batch " .. i) end
  end)
end

check.finish()
