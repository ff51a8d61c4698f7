-- The GLA family: the layer against its recurrence, states passed on in pieces, generation, padding, packed sequences,
-- names and files.
local here = (arg and arg[0]:match ".*/" or "tests/modules/models/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local llm = require "tycho.llm"

local function model_of(more)
  ty.manual_seed(3)
  local config = { vocab_size = 40, hidden_size = 32, intermediate_size = 48, num_hidden_layers = 2, num_heads = 2 }
  for key, value in pairs(more or {}) do config[key] = value end
  local model = llm.GLA(config)
  -- Large weights, so that what a token sees makes a difference.
  for _, p in ipairs(model:parameters()) do if p.ndim >= 2 then p:detach():normal_(0, 0.3) end end
  return model
end

local function near(got, want, what, bar)
  check.equal(got.shape, want.shape, what .. " shape")
  local off = (got:to "f64" - want:to "f64"):abs():max():item() / math.max(want:abs():max():item(), 1e-30)
  check.ok(off <= (bar or 1e-5), ("%s: relative error %.2g"):format(what, off))
end

-- The layer as the paper writes it, one token after the other.
local function by_hand(layer, x)
  local heads, group = layer.heads, layer.group
  local function split(y, n) return y:reshape(y.shape[1], y.shape[2], n, -1) end
  local function shared(y)
    return group == 1 and y or ty.concat({ y:narrow(2, 0, 1), y:narrow(2, 0, 1) }, 2)
  end
  local q, k = split(layer.q_proj(x), heads), shared(split(layer.k_proj(x), layer.kv_heads))
  local v = shared(split(layer.v_proj(x), layer.kv_heads))
  local gate = shared(split(layer.gk_proj(x):sigmoid():pow(1 / 16), layer.kv_heads))
  local state, rows = 0, {}
  for t = 0, x.shape[2] - 1 do
    local kt, vt = k:select(1, t):unsqueeze(-1), v:select(1, t):unsqueeze(-2)
    state = gate:select(1, t):unsqueeze(-1) * state + kt * vt
    rows[t + 1] = (q:select(1, t):unsqueeze(-1) * state):sum(-2) / math.sqrt(q.shape[4])
  end
  local y = layer[layer.norm_name](ty.stack(rows, 1)):flatten(2)
  return layer.o_proj(y * layer.g_proj(x):silu())
end

for _, more in ipairs { {}, { num_kv_heads = 1 }, { expand_k = 1, expand_v = 2 } } do
  check.test("the layer is the recurrence", function()
    local layer = model_of(more).model.layers[1].attn:to "f64"
    local x = ty.randn({ 2, 37, 32 }, { dtype = "f64" }):requires_grad_()
    local y, want = layer(x, {}), by_hand(layer, x)
    near(y, want, "result", 1e-12)
    local weight = ty.randn_like(y)
    local inputs = { x, layer.gk_proj[2].bias, layer.k_proj.weight, layer.v_proj.weight }
    local grads, expected = ty.grad((y * weight):sum(), inputs), ty.grad((want * weight):sum(), inputs)
    for i, g in ipairs(grads) do near(g, expected[i], "gradient " .. i, 1e-11) end
  end)
end

check.test("pieces of a text give what the whole gives", function()
  local model = model_of():eval()
  local tokens = ty.randint(0, 40, { 2, 75 })
  local whole = model(tokens)
  for _, cuts in ipairs { { 1 }, { 40, 41, 44 }, { 16, 32, 64 } } do
    local cache, rows, from = model:cache(), {}, 0
    cuts[#cuts + 1] = 75
    if #cuts == 2 then for t = 2, 75 do cuts[t] = t end end
    ty.no_grad(function()
      for i, to in ipairs(cuts) do
        -- States outlive the scope that they were made in.
        rows[i] = ty.scope(function() return model(tokens:narrow(1, from, to - from), { cache = cache }) end)
        from = to
      end
    end)
    check.equal(cache.past, 75)
    near(ty.concat(rows, 1), whole, "in pieces")
  end
end)

check.test("generation is the full forward, in batches with padding and with states that outlive scopes", function()
  local model = model_of():eval()
  local prompts, alone = {}, {}
  for i, n in ipairs { 7, 3, 19 } do
    prompts[i] = ty.randint(0, 40, { n })
    local tokens = prompts[i]:unsqueeze(0)
    for _ = 1, 12 do tokens = ty.concat({ tokens, model(tokens):narrow(1, tokens.shape[2] - 1, 1):argmax(-1) }, 1) end
    alone[i] = tokens:select(0, 0):tolist()
    local got = model:generate(prompts[i]:unsqueeze(0), 12, { temperature = 0 })
    check.equal(got:select(0, 0):tolist(), alone[i], "generate " .. i)
  end
  for i, row in ipairs(model:generate(prompts, 12, { temperature = 0 })) do
    check.equal(row:tolist(), alone[i], "in a batch " .. i)
  end
end)

check.test("a state can be emptied and thinned out, not taken back", function()
  local model = model_of():eval()
  local tokens, cache = ty.randint(0, 40, { 3, 9 }), model:cache()
  ty.no_grad(function()
    model(tokens, { cache = cache })
    check.fails(function() cache:truncate(4) end, "cannot be taken back")
    cache:select(ty.tensor({ 2, 0 }, { dtype = "i64" }))
    local more = ty.randint(0, 40, { 2, 1 })
    local got = model(more, { cache = cache })
    local rows = ty.concat({ tokens:index_select(0, ty.tensor({ 2, 0 }, { dtype = "i64" })), more }, 1)
    near(got, model(rows):narrow(1, 9, 1), "after select")
    cache:truncate(0)
    near(model(tokens, { cache = cache }), model(tokens), "after truncate(0)")
  end)
end)

check.test("packed sequences and checkpointing", function()
  local model = model_of()
  local parts = { ty.randint(0, 40, { 1, 5 }), ty.randint(0, 40, { 1, 21 }), ty.randint(0, 40, { 1, 1 }) }
  local cu = ty.tensor({ 0, 5, 26, 27 }, { dtype = "i64" })
  local packed, alone = ty.concat(parts, 1), {}
  for i, part in ipairs(parts) do alone[i] = model(part) end
  near(model(packed, { cu_seqlens = cu }), ty.concat(alone, 1), "packed")
  local targets, grads = ty.randint(0, 40, { 1, 27 }), {}
  for i, checkpoint in ipairs { false, true } do
    model:zero_grad()
    model:loss(packed, targets, { cu_seqlens = cu, checkpoint = checkpoint }):backward()
    grads[i] = {}
    for k, p in ipairs(model:parameters()) do grads[i][k] = p.grad:flatten():clone() end
    grads[i] = ty.concat(grads[i], 0)
  end
  near(grads[2], grads[1], "gradients with checkpointing")
  local mask = ty.ones { 1, 27 }
  check.fails(function() model(packed, { cu_seqlens = cu, mask = mask }) end, "neither a cache nor a mask")
end)

check.test("names are the published ones, and files come back", function()
  local model, names = model_of(), {}
  for name in model:named_parameters() do names[#names + 1] = name end
  local has = {}
  for _, name in ipairs(names) do has[name] = true end
  for name in ([[model.embeddings.weight model.norm.weight lm_head.weight model.layers.1.attn_norm.weight
    model.layers.1.mlp_norm.weight model.layers.1.attn.q_proj.weight model.layers.1.attn.k_proj.weight
    model.layers.1.attn.v_proj.weight model.layers.1.attn.g_proj.weight model.layers.1.attn.o_proj.weight
    model.layers.1.attn.gk_proj.0.weight model.layers.1.attn.gk_proj.1.weight model.layers.1.attn.gk_proj.1.bias
    model.layers.1.attn.g_norm_swish_gate.weight model.layers.1.mlp.gate_proj.weight model.layers.1.mlp.up_proj.weight
    model.layers.1.mlp.down_proj.weight]]):gmatch "%S+" do
    check.ok(has[name], "no parameter " .. name)
  end
  check.equal(#names, 3 + 2 * 14)
  local folder = os.tmpname()
  os.remove(folder)
  model:save(folder)
  local tokens = ty.randint(0, 40, { 1, 9 })
  local config = ty.io.load_json(folder .. "/config.json")
  check.equal(config.architectures, { "GLAForCausalLM" })
  check.equal(config.key_dim, nil)
  near(llm.load(folder, { dtype = "f32" })(tokens), model(tokens), "loaded", 0)
  for _, file in ipairs { "config.json", "model.safetensors" } do os.remove(folder .. "/" .. file) end
  os.remove(folder)
  config = llm.GLA({ vocab_size = 40, hidden_size = 192, num_hidden_layers = 1 }).config
  check.equal({ config.intermediate_size, config.key_dim, config.value_dim }, { 512, 96, 192 })
end)

check.test("what is not there is refused", function()
  check.fails(function() model_of { use_short_conv = true } end, "use_short_conv = true is not supported")
  check.fails(function() model_of { attn = { layers = { 1 } } } end, "attn = a table is not supported")
  check.fails(function() model_of { num_heads = 5 } end, "num_heads 5 must divide key_dim 16")
  check.fails(function() model_of { num_kv_heads = 3 } end, "num_kv_heads 3 must divide num_heads 2")
  check.fails(function() model_of { expand_k = 0.001 } end, "leaves key_dim no width")
end)

check.test("halves train by autocast, gates in f32", function()
  local model = model_of { intermediate_size = 64 }
  local tokens = ty.randint(0, 40, { 2, 33 })
  local want = model:loss(tokens):item()
  local loss = ty.autocast("bf16", function() return model:loss(tokens) end)
  check.ok(math.abs(loss:item() - want) < 0.05 * want, ("%.4f, in f32 %.4f"):format(loss:item(), want))
  loss:backward()
  check.ok(model.model.layers[1].attn.gk_proj[1].weight.grad:abs():max():item() > 0, "the gates learn")
end)

check.finish()
