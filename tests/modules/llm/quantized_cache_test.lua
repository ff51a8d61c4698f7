-- A cache in few bits: exact while nothing is rounded, near afterwards, what is in its blocks, rows and positions.
local here = (arg and arg[0]:match ".*/" or "tests/modules/llm/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local llm = require "tycho.llm"

local function llama()
  ty.manual_seed(3)
  local model = llm.Llama { vocab_size = 50, hidden_size = 128, intermediate_size = 64, num_hidden_layers = 2,
    num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 256 }
  ty.no_grad(function()
    for _, p in ipairs(model:parameters()) do p:add_(ty.randn(p.shape) * 0.05) end
  end)
  return model:eval()
end

local function gpt2()
  ty.manual_seed(4)
  return llm.GPT2({ vocabulary = 50, context = 256, width = 64, layers = 2, heads = 2 }):eval()
end

local function off(a, b) return ((a - b):abs():max() / b:abs():max()):item() end

local function streamed(model, tokens, cache, sizes, mask)
  local parts, at = {}, 0
  ty.no_grad(function()
    for i, n in ipairs(sizes) do
      parts[i] = ty.scope(function()
        return model(tokens:narrow(1, at, n), { cache = cache, mask = mask and mask:narrow(1, at, n) })
      end)
      at = at + n
    end
  end)
  return ty.concat(parts, 1)
end

local function ones(n)
  local list = {}
  for i = 1, n do list[i] = 1 end
  return list
end

ty.manual_seed(1)
local tokens = ty.randint(0, 50, { 2, 150 })

check.test("exact while nothing is rounded, near when it is, nearer in 8 bits", function()
  for _, model in ipairs { llama(), gpt2() } do
    local want = ty.no_grad(model.forward, model, tokens)
    local whole = streamed(model, tokens, model:cache { quantized = true, window = 256 }, { 60, 1, 1, 88 })
    check.ok(off(whole, want) < 1e-5, off(whole, want))
    -- The tokens of one call attend to each other as they are.
    check.ok(off(streamed(model, tokens, model:cache { quantized = true, window = 0 }, { 150 }), want) < 1e-5)
    local found = {}
    for _, bits in ipairs { 8, 4 } do
      local cache = model:cache { quantized = true, bits = bits, window = 16 }
      found[bits] = off(streamed(model, tokens, cache, ones(150)), want)
      check.equal({ cache.past, cache.rounded }, { 150, 128 })
    end
    check.ok(found[8] < 0.01 and found[4] < 0.15 and found[8] < found[4] / 4, ("%g %g"):format(found[8], found[4]))
  end
end)

check.test("bytes are those of blocks and of the last tokens", function()
  local model = llama()
  for bits, block in pairs { [8] = 34, [4] = 18 } do
    local cache = model:cache { quantized = true, bits = bits, window = 16 }
    streamed(model, tokens, cache, { 100, 50 })
    local numbers = 2 * 2 * 2 * 32 -- batch, keys and values, heads, width
    check.equal(cache:nbytes(), 2 * numbers * (128 // 32 * block + 22 * 4))
  end
end)

check.test("keys are rounded by channel over tokens, values by token over channels", function()
  local cache = llm.Cache.new(1, { quantized = true, bits = 8, window = 0 })
  ty.manual_seed(2)
  local k, v = ty.randn(1, 1, 32, 64), ty.randn(1, 1, 32, 64)
  cache:append(1, k, v)
  cache:advance(32)
  local one = ty.zeros(1, 1, 1, 64)
  local keys, values = cache:append(1, one, one)
  local function rounded(x, dim)
    local scale = x:abs():amax(dim, true) / 127 -- which is stored in half precision
    return (x / scale):round() * scale:to("f16"):to "f32"
  end
  check.close((keys:narrow(2, 0, 32) - rounded(k, 2)):abs():max():item(), 0, 1e-6)
  check.close((values:narrow(2, 0, 32):narrow(3, 0, 32) - rounded(v:narrow(3, 0, 32), 3)):abs():max():item(), 0, 1e-6)
end)

check.test("rows that are kept, positions that are taken back, rows of different lengths", function()
  local model = llama()
  local function cache() return model:cache { quantized = true, bits = 8, window = 8 } end
  local a, b = cache(), cache()
  streamed(model, tokens:narrow(1, 0, 90), a, { 80, 10 })
  streamed(model, tokens:narrow(1, 0, 90):narrow(0, 1, 1), b, { 80, 10 })
  a:select(ty.tensor { 1 })
  local next = tokens:narrow(1, 90, 20):narrow(0, 1, 1)
  check.close(off(streamed(model, next, a, ones(20)), streamed(model, next, b, ones(20))), 0, 1e-5)
  -- Back to 70 positions, of which 64 are in whole blocks: as if the rest had never come, but for what was rounded.
  local c, d = cache(), cache()
  streamed(model, tokens:narrow(1, 0, 120), c, { 120 })
  c:truncate(70)
  check.equal({ c.past, c.rounded }, { 70, 64 })
  streamed(model, tokens:narrow(1, 0, 70), d, { 70 })
  local again = tokens:narrow(1, 70, 12)
  check.ok(off(streamed(model, again, c, { 12 }), streamed(model, again, d, { 12 })) < 0.02)
  -- A row that begins with padding gives what it gives alone.
  local mask = ty.ones({ 2, 100 }, { dtype = "bool" })
  mask:narrow(0, 1, 1):narrow(1, 0, 37):fill_(0)
  local both = streamed(model, tokens:narrow(1, 0, 100), cache(), { 90, 10 }, mask)
  local alone = model(tokens:narrow(1, 37, 63):narrow(0, 1, 1))
  check.ok(off(both:narrow(0, 1, 1):narrow(1, 90, 10), alone:narrow(1, 53, 10)) < 0.02)
end)

check.test("generation with it, and drafts that are taken back", function()
  local model = llama()
  local prompt = tokens:narrow(1, 0, 60)
  local want = model:generate(prompt, 40, { temperature = 0, stop_tokens = false })
  local got = model:generate(prompt, 40, { temperature = 0, stop_tokens = false,
    cache = model:cache { quantized = true, window = 128 } })
  check.equal(got:tolist(), want:tolist())
  local memory = ty.memory.stats().live
  for _ = 1, 3 do
    model:generate(prompt, 40, { temperature = 0, cache = model:cache { quantized = true, bits = 4, window = 8 } })
  end
  collectgarbage()
  collectgarbage()
  check.ok(ty.memory.stats().live - memory < 1e6)
end)

check.test("wrong arguments", function()
  local model = llama()
  check.fails(function() model:cache { quantized = true, bits = 3 } end, "QuantizedCache: bits: expected 8 or 4, got 3")
  check.fails(function() model:cache { quantized = true, window = -1 } end, "window: expected an integer >= 0")
  local narrow = llm.GPT2 { vocabulary = 50, context = 32, width = 32, layers = 1, heads = 4 }
  check.fails(function() narrow(tokens:narrow(1, 0, 4), { cache = narrow:cache { quantized = true } }) end,
    "QuantizedCache: expected heads of a multiple of 32 numbers, got 8")
  check.fails(function() model:cache({ quantized = true }):truncate(3) end, "expected at most the 0 positions")
end)

check.finish()
