-- The language models: published sizes and names, decoding with a cache, training.
local here = (arg and arg[0]:match ".*/" or "tests/modules/models/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local llm = require "tycho.llm"

local function small(options)
  ty.manual_seed(1)
  local o = { vocabulary = 50, context = 16, width = 32, layers = 2, heads = 4 }
  for key, value in pairs(options or {}) do o[key] = value end
  return llm.GPT2(o)
end

check.test("GPT-2 has the size and the names of the public checkpoint", function()
  local model = ty.nn.with_defaults({ device = "meta" }, llm.GPT2)
  check.equal(model:count_parameters(), 124439808)
  local state, count = model:state_dict(), 0
  for _ in pairs(state) do count = count + 1 end
  check.equal(count, 148)
  check.equal(state["wte.weight"].shape, { 50257, 768 })
  check.equal(state["wpe.weight"].shape, { 1024, 768 })
  check.equal(state["h.0.ln_1.weight"].shape, { 768 })
  check.equal(state["h.11.attn.c_attn.weight"].shape, { 768, 2304 })
  check.equal(state["h.11.attn.c_proj.bias"].shape, { 768 })
  check.equal(state["h.5.mlp.c_fc.weight"].shape, { 768, 3072 })
  check.equal(state["h.5.mlp.c_proj.weight"].shape, { 3072, 768 })
  check.equal(state["ln_f.bias"].shape, { 768 })
end)

check.test("a cache gives the logits of the whole sequence", function()
  local model = small()
  for _, p in ipairs(model:parameters()) do p:detach():normal_(0, 0.3) end
  local tokens = ty.randint(0, 50, { 2, 9 })
  ty.no_grad(function()
    local whole = model(tokens)
    check.ok(whole:std():item() > 0.1, "the logits differ")
    for _, pieces in ipairs { { 9 }, { 5, 1, 1, 1, 1 }, { 1, 8 }, { 4, 3, 2 } } do
      local cache, past = model:cache(), 0
      for _, length in ipairs(pieces) do
        local logits = model(tokens:narrow(1, past, length), { cache = cache })
        check.close(logits:tolist(), whole:narrow(1, past, length):tolist(), 1e-4, table.concat(pieces, "+"))
        past = past + length
      end
    end
  end)
end)

check.test("a token sees only what is before it", function()
  local model = small()
  for _, p in ipairs(model:parameters()) do p:detach():normal_(0, 0.3) end
  local a = ty.randint(0, 50, { 1, 8 })
  local b = ty.concat({ a:narrow(1, 0, 5), (a:narrow(1, 5, 3) + 7) % 50 }, 1)
  ty.no_grad(function()
    local x, y = model(a), model(b)
    check.close(x:narrow(1, 0, 5):tolist(), y:narrow(1, 0, 5):tolist(), 1e-5)
    check.ok((x:narrow(1, 5, 3) - y:narrow(1, 5, 3)):abs():max():item() > 1e-2)
  end)
end)

check.test("it learns a sequence and then continues it", function()
  local model = small { dropout = 0.05 }
  check.close(model:loss(ty.randint(0, 50, { 4, 16 }), ty.randint(0, 50, { 4, 16 })):item(), math.log(50), 0.1)
  local sequence = (ty.arange(16) * 3 % 50):unsqueeze(0)
  local opt = ty.optim.AdamW(model:parameters(), { lr = 1e-2 })
  local loss
  for _ = 1, 80 do
    ty.scope(function()
      loss = model:loss(sequence:narrow(1, 0, 15), sequence:narrow(1, 1, 15))
      opt:step(loss)
      loss = loss:item()
    end)
  end
  check.ok(loss < 0.1, "loss " .. loss)
  model:eval()
  local continued = model:generate(sequence:narrow(1, 0, 4), 8, { temperature = 0 })
  check.equal(continued:tolist(), sequence:narrow(1, 0, 12):tolist())
  check.equal(model:generate(sequence:narrow(1, 0, 4), 3, { top_k = 1 }):tolist(),
    sequence:narrow(1, 0, 7):tolist(), "of one candidate there is no choice")
  check.equal(model:generate(ty.zeros({ 3, 2 }, { dtype = "i64" }), 5).shape, { 3, 7 })
end)

check.test("mistakes are named", function()
  local model = small()
  check.fails(function() llm.GPT2 { heads = 5 } end, "heads 5 must divide width 768")
  check.fails(function() llm.GPT2 { depth = 3 } end, "no option 'depth'")
  check.fails(function() model(ty.zeros({ 1, 17 }, { dtype = "i64" })) end, "room for 16")
  local cache = model:cache()
  ty.no_grad(model.forward, model, ty.zeros({ 1, 16 }, { dtype = "i64" }), { cache = cache })
  check.fails(function()
    ty.no_grad(model.forward, model, ty.zeros({ 1, 1 }, { dtype = "i64" }), { cache = cache })
  end, "17 tokens, but there is room for 16")
  check.fails(function() model:cache(1) end, "Cache: options: expected a table, got 1")
end)

check.finish()
