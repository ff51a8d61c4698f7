-- Rotary embeddings: frequencies by every scaling against transformers' (tests/fixtures/llm/rotary.json), how tables
-- grow, and decoding far past the context of the dynamic scaling.
local here = (arg and arg[0]:match ".*/" or "tests/modules/models/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local llm = require "tycho.llm"
local rotary = require "tycho.models.rotary"

local root = check.root .. "tests/fixtures/llm/"

-- The reference's frequencies are f32.
local function close(got, want, what)
  local wrong = #got == #want and 0 or 1
  for i = 1, #want do
    if math.abs(got[i] - want[i]) > 1e-5 * math.abs(want[i]) then wrong = wrong + 1 end
  end
  check.equal(wrong, 0, what)
end

check.test("frequencies", function()
  for i, case in ipairs(ty.io.load_json(root .. "rotary.json")) do
    local config = { rope_parameters = case.rope_parameters, max_position_embeddings = case.max_position_embeddings }
    local turned = rotary.new("Llama", config, case.head_dim)
    for length, want in pairs(case.lengths) do
      local list, scale = turned:frequencies(tonumber(length))
      local what = ("case %d, %s, length %s"):format(i, case.rope_parameters.rope_type, length)
      close(list, want[1], what)
      check.close(scale, want[2], 1e-6, what)
    end
  end
end)

local function new(kind, context)
  return rotary.new("Llama", { max_position_embeddings = context,
    rope_parameters = { rope_type = kind, factor = 2, rope_theta = 10000 } }, 8)
end

-- cos and sin of the positions from 0 by the frequencies for that length.
local function reference(turned, length)
  local cos, sin = {}, {}
  for position = 0, length - 1 do
    cos[position + 1], sin[position + 1] = {}, {}
    for i, f in ipairs((turned:frequencies(length))) do
      cos[position + 1][i], sin[position + 1][i] = math.cos(position * f), math.sin(position * f)
    end
  end
  return cos, sin
end

check.test("tables of the dynamic scaling are those of the length, and have no more rows than that takes", function()
  local turned = new("dynamic", 32)
  for _, length in ipairs { 3, 30, 32, 33, 34, 35, 60, 61, 200, 40, 20, 33 } do
    local cos, sin = turned:table(length, "cpu")
    local want_cos, want_sin = reference(turned, length)
    check.close(cos:narrow(0, 0, length):tolist(), want_cos, 1e-5, "cos " .. length)
    check.close(sin:narrow(0, 0, length):tolist(), want_sin, 1e-5, "sin " .. length)
  end
  turned = new("dynamic", 100)
  for length = 1, 1000 do
    local cos = turned:table(length, "cpu")
    if not (cos.shape[1] >= length and cos.shape[1] <= math.max(100, length)) then
      check.equal(cos.shape[1], length, "rows for " .. length)
    end
  end
end)

check.test("tables of the others grow by doubling", function()
  local turned, made, before = new("linear", 16), 0, nil
  for length = 1, 3000 do
    local cos = turned:table(length, "cpu")
    if cos ~= before then made, before = made + 1, cos end
    if cos.shape[1] < length or cos.shape[1] > math.max(64, 2 * length) then
      check.equal(cos.shape[1], length, "rows for " .. length)
    end
  end
  check.equal(made, 7) -- 64 to 4096 rows
end)

check.test("LongRoPE's lists fit the head", function()
  local function llama(rope)
    rope.rope_type, rope.original_max_position_embeddings = "longrope", 16
    return function()
      llm.Llama { vocab_size = 9, hidden_size = 16, intermediate_size = 8, num_hidden_layers = 1,
        num_attention_heads = 2, rope_scaling = rope }
    end
  end
  llama { short_factor = { 1, 1, 1, 1 }, long_factor = { 1, 2, 3, 4 } }()
  check.fails(llama { short_factor = { 1, 1, 1, 1 } }, "rope_type 'longrope' needs 'long_factor'")
  for _, list in ipairs { { 1, 2, 3 }, { 1, 2, 3, 0 }, { 1, 2, 3, "x" }, "long" } do
    check.fails(llama { short_factor = { 1, 1, 1, 1 }, long_factor = list },
      "rope setting 'long_factor' must be a list of 4 positive numbers")
  end
end)

check.test("decoding past the context", function()
  local want = ty.io.load_safetensors(root .. "llama_dynamic/expected.safetensors")
  local model = llm.load(root .. "llama_dynamic", { dtype = "f32" })
  local cache, rows = model:cache(), {}
  ty.no_grad(function()
    for i = 0, want.tokens.shape[2] - 1 do rows[i + 1] = model(want.tokens:narrow(1, i, 1), { cache = cache }) end
  end)
  local scale = want.logits:abs():max():item()
  check.close((ty.concat(rows, 1) / scale):tolist(), (want.logits / scale):tolist(), 1e-4)
end)

check.finish()
