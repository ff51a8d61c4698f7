-- Attention as a state space model: the scan, the recurrence and the matrix that attention would be, what a seeded
-- layer begins with, decoding with its state, questions packed about one picture, what learns in which stage.
local here = arg and arg[0]:match ".*/" or "tests/modules/distill/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local distill, vlm = require "tycho.distill", require "tycho.vlm"
local mamba = distill.mamba

local small = dofile(here .. "../small_llava.lua")
local FEATURES, rows, tokens, pictures, apart = small.features, small.rows, small.tokens, small.pictures, small.apart

local function model(more)
  local text = { num_attention_heads = 4 }
  for key, value in pairs(more or {}) do text[key] = value end
  return small.model(text)
end

-- New parameters away from where they begin, so that all of them matter.
local function shake(m)
  ty.manual_seed(5)
  for name, p in m:named_parameters() do
    if name:find(".mixer.", 1, true) then ty.no_grad(function() p:add_(ty.randn(p.shape) * 0.3) end) end
  end
  return m
end

check.test("a layer is its recurrence, token by token, and the matrix that attention would be, in f64", function()
  for _, group in ipairs { 1, 2 } do
    local m = shake(mamba.student(model { num_key_value_heads = 4 // group })):to "f64"
    local layer = m.language_model.model.layers[1].self_attn
    local mixer, t = layer.mixer, 150 -- more than a chunk of the scan
    local x = ty.randn(1, t, 16, { dtype = "f64" })
    local y = ty.no_grad(function() return layer(x, { layer = 1 }) end)
    ty.no_grad(function()
      local q, k, v = mamba.project(layer, x)
      local u = ty.concat({ q, k, v }, 2):select(0, 0)
      local earlier = ty.concat({ ty.zeros(1, u.shape[2], { dtype = "f64" }), u:narrow(0, 0, t - 1) }, 0)
      local mixed = ty.silu(earlier * mixer.conv_weight:select(0, 0) + u * mixer.conv_weight:select(0, 1)
        + mixer.conv_bias)
      local kv = 16 // group
      local dt = ty.log(mixer.dt_proj(x):add(mixer.dt_bias):exp() + 1):select(0, 0)
      local decay = (-(mixer.A_log:exp()) * dt):exp()
      local by_steps, by_matrix = {}, {}
      for h = 0, 3 do
        local c = mixed:narrow(1, h * 4, 4)
        local b, value = mixed:narrow(1, 16 + h // group * 4, 4), mixed:narrow(1, 16 + kv + h // group * 4, 4)
        local state, list = ty.zeros(4, 4, { dtype = "f64" }), {}
        for i = 0, t - 1 do
          state = state * decay:select(0, i):select(0, h)
            + b:select(0, i):unsqueeze(1) * value:select(0, i):unsqueeze(0) * dt:select(0, i):select(0, h)
          list[i + 1] = c:select(0, i):unsqueeze(0):matmul(state)
        end
        by_steps[h + 1] = ty.concat(list, 0)
        -- M[i, j] = C_i . B_j prod of the decays behind j up to i, times d_j.
        local along = decay:select(1, h):log():cumsum(0)
        local matrix = (c:matmul(b:transpose(0, 1)) * (along:unsqueeze(1) - along:unsqueeze(0)):exp()):tril()
        by_matrix[h + 1] = matrix:matmul(value * dt:select(1, h):unsqueeze(1))
      end
      for _, heads in ipairs { by_steps, by_matrix } do
        local normed = {}
        for h = 1, 4 do
          normed[h] = heads[h] * (heads[h]:square():mean({ 1 }, true) + 1e-5):rsqrt() * mixer.g_norm.weight
        end
        local want = layer.o_proj(ty.concat(normed, 1) * ty.silu(mixer.g_proj(x):select(0, 0)))
        check.ok(apart(y:select(0, 0), want) < 1e-9)
      end
    end)
  end
end)

check.test("a seeded layer begins with the attention's queries, keys and values; others do not", function()
  local m = model()
  local student = mamba.student(m)
  local theirs, ours = m.language_model.model.layers[2].self_attn, student.language_model.model.layers[2].self_attn
  local x = ty.randn(2, 5, 16)
  local c, b, v = mamba.project(ours, x)
  check.equal(apart(c, theirs.q_proj(x)), 0)
  check.equal(apart(b, theirs.k_proj(x)), 0)
  check.equal(apart(v, theirs.v_proj(x)), 0)
  -- The convolution is the identity at first, so these go into the scan.
  local dt = ty.softplus(ours.mixer.dt_bias):tolist()
  for h = 1, 4 do check.ok(dt[h] >= 0.00099 and dt[h] <= 0.101) end
  local heads = {}
  for i, part in ipairs { c, b, v } do heads[i] = ty.silu(ty.nn.split_heads(part, 4)) end
  local step = ty.softplus(ours.mixer.dt_bias):reshape(1, 4, 1, 1)
  local y = ty.gated_linear_attention(heads[1], heads[2], heads[3] * step,
    (step * -math.exp(1)):expand(2, 4, 5, 1), nil, 1)
  local want = ours.o_proj(ty.nn.join_heads(ours.mixer.g_norm(y)) * ty.silu(ours.mixer.g_proj(x)))
  check.ok(apart(ours(x, { layer = 2 }), want) < 1e-5)
  local other = mamba.student(m, { seeded = false })
  check.ok(apart((mamba.project(other.language_model.model.layers[2].self_attn, x)), c) > 0.1)
end)

check.test("all layers kept, or taken back: the teacher", function()
  local m = model()
  local want = ty.no_grad(function() return m(tokens, { pictures = pictures }) end)
  local same = mamba.student(m, { keep = { 1, 2, 3 } })
  check.equal(apart(ty.no_grad(function() return same(tokens, { pictures = pictures }) end), want), 0)
  local student = mamba.student(m)
  check.ok(apart(ty.no_grad(function() return student(tokens, { pictures = pictures }) end), want) > 0.01)
  mamba.remove(student)
  check.equal(apart(ty.no_grad(function() return student(tokens, { pictures = pictures }) end), want), 0)
  check.equal(apart(ty.no_grad(function() return m(tokens, { pictures = pictures }) end), want), 0)
end)

check.test("decoding with states is computing all anew, and a state does not grow", function()
  for _, keep in ipairs { {}, { 2 } } do
    local m = shake(mamba.student(model(), { keep = keep }))
    local cache = m:cache()
    local logits = ty.no_grad(function() return m(tokens, { pictures = pictures, cache = cache }) end)
    logits = logits:narrow(1, 19, 1)
    local size, all = cache[1].state:numel(), tokens
    -- A state of each head and the last token before the convolution; keys and values of all tokens.
    local of_state, of_keys = 4 * (2 * 4 * 16 + 2 * 48), 4 * (2 * 2 * 20 * 16)
    check.equal(cache:bytes(), #keep > 0 and 2 * of_state + of_keys or 3 * of_state)
    for _ = 1, 4 do
      local step = logits:argmax(-1):clamp(0, 18)
      all = ty.concat({ all, step }, 1)
      logits = ty.no_grad(function() return m(step, { cache = cache }) end)
      local want = ty.no_grad(function() return m(all, { pictures = pictures }) end)
      check.ok(apart(logits, want:narrow(1, all.shape[2] - 1, 1)) < 1e-4)
    end
    check.equal(cache[1].state:numel(), size)
    check.equal(cache:held(), { 0, #keep > 0 and 24 or 0, 0 })
    check.fails(function() cache:truncate(3) end, "expected layers that hold all 24 positions, got 0 in layer 1")
    cache:select(ty.tensor { 1 })
    local one = ty.no_grad(function() return m(ty.tensor { { 3 } }, { cache = cache }) end)
    local whole = ty.concat({ all:narrow(0, 1, 1), ty.tensor { { 3 } } }, 1)
    local want = ty.no_grad(function() return m(whole, { pictures = pictures:narrow(0, 1, 1) }) end)
    check.ok(apart(one, want:narrow(1, 24, 1)) < 1e-4)
  end
end)

check.test("a context that nobody read weighs what one that was read does, and a token goes on from it", function()
  for _, keep in ipairs { {}, { 2 }, { 1, 2, 3 } } do
    local m = mamba.student(model(), { keep = keep }).language_model
    local read, drawn = m:cache { room = 30 }, mamba.context(m, 20, 30)
    ty.no_grad(function() return m:hidden(ty.randint(0, 19, { 1, 20 }), { cache = read }) end)
    check.equal(drawn:bytes(), read:bytes())
    check.equal(drawn:held(), read:held())
    local hidden = ty.no_grad(function() return m:hidden(ty.tensor { { 3 } }, { cache = drawn }) end)
    check.equal(hidden.shape, { 1, 1, 16 })
    check.equal(drawn.past, 21)
  end
  check.fails(function() mamba.context(ty.nn.Linear(2, 2), 4, 8) end, "model: expected a decoder")
  check.fails(function() mamba.context(model(), 4, 3) end, "room: expected an integer >= 4, got 3")
end)

check.test("prompts of different lengths, padded on the left, decode as each does by itself", function()
  local m = shake(mamba.student(model(), { keep = { 2 } }))
  local prompts = { rows({ 1, 2 }):select(0, 0), rows({ 5, 6, 7, 8 }):select(0, 0) }
  local together = m:generate(prompts, 5, { temperature = 0, pictures = pictures, stop_tokens = false })
  for i, prompt in ipairs(prompts) do
    local alone = m:generate({ prompt }, 5, { temperature = 0, pictures = pictures:narrow(0, i - 1, 1),
      stop_tokens = false })
    check.equal(together[i]:tolist(), alone[1]:tolist())
  end
end)

check.test("questions packed about one picture go on from its state, sequences in a row see none other", function()
  local m = shake(mamba.student(model()))
  local turns = { { { 1, 2, 3 }, { 4, 5 } }, { { 6, 7, 8, 9 } } }
  local list = {}
  for i, of_row in ipairs(turns) do
    list[i] = { shared = rows({}):select(0, 0):tolist(), turns = {} }
    for k, words in ipairs(of_row) do
      local learnt = {}
      for j = 1, #words do learnt[j] = j > 1 end
      list[i].turns[k] = { ids = words, learnt = learnt }
    end
  end
  local batch = vlm.packing.turns(list, 0)
  local packed = ty.no_grad(function()
    return m(batch.tokens, { pictures = pictures, mask = batch.options.mask, positions = batch.options.positions })
  end)
  for i, of_row in ipairs(turns) do
    local at = FEATURES
    for _, words in ipairs(of_row) do
      local alone = ty.no_grad(function() return m(rows(words), { pictures = pictures:narrow(0, i - 1, 1) }) end)
      check.ok(apart(packed:narrow(0, i - 1, 1):narrow(1, at, #words), alone:narrow(1, FEATURES, #words)) < 1e-4)
      at = at + #words
    end
  end
  local text = m.language_model
  local row = ty.tensor { { 1, 2, 3, 4, 5 } }
  local both = ty.no_grad(function() return text(row, { cu_seqlens = ty.tensor { 0, 2, 5 } }) end)
  for _, part in ipairs { { 0, 2 }, { 2, 3 } } do
    local alone = ty.no_grad(function() return text(row:narrow(1, part[1], part[2])) end)
    check.ok(apart(both:narrow(1, part[1], part[2]), alone) < 1e-4)
  end
end)

check.test("gradients through packed questions are those of finite differences", function()
  local m = shake(mamba.student(model { num_hidden_layers = 1 })):to "f64"
  local batch = vlm.packing.turns({ { shared = { 1, 2, 3 }, turns = { { ids = { 4, 5, 6 }, learnt = { false, true,
    true } }, { ids = { 7, 8 }, learnt = { false, true } } } } }, 0)
  local text = m.language_model
  local function loss()
    return ty.nn.cross_entropy(text(batch.tokens, batch.options):flatten(0, 1), batch.targets:flatten())
  end
  m:zero_grad()
  loss():backward()
  for name, p in text:named_parameters() do
    if name:find ".mixer." or name:find "k_proj" then
      check.gradient(loss, p, { table.unpack({ 1, 2, 3, 4 }, 1, math.min(4, p:numel())) })
    end
  end
end)

check.test("each stage teaches what it is to teach, and the student comes nearer", function()
  local m = model()
  local student = mamba.student(m)
  local function draw() return tokens, { pictures = pictures }, ty.tensor { 16, 17, 18, 36, 37 } end
  local function snapshot()
    local state = {}
    for name, p in student:named_parameters() do state[name] = p:detach():clone() end
    return state
  end
  local function moved(before)
    local groups = {}
    for name, p in student:named_parameters() do
      if apart(p:detach(), before[name]) > 0 then
        groups[name:find ".mixer." and "new" or name:find ".self_attn." and "attention"
          or name:find "vision" and "vision" or "rest"] = true
      end
    end
    return groups
  end
  local function far()
    return ty.no_grad(function() return mamba.alignment(m, student, tokens, { pictures = pictures }):item() end)
  end
  local at_first, before = far(), snapshot()
  mamba.fit(m, student, draw, { { steps = 10, lr = 1e-2 } })
  check.equal(moved(before), { new = true })
  local after_one = far()
  check.ok(after_one < at_first)
  before = snapshot()
  local losses = mamba.fit(m, student, draw, { { steps = 0, lr = 0 }, { steps = 10, lr = 1e-2 } })
  check.equal(moved(before), { new = true, attention = true })
  check.ok(far() < after_one)
  check.equal(losses[1], nil)
  local function divergence()
    local with = { pictures = pictures }
    return ty.no_grad(function()
      return mamba.divergence(m(tokens, with):flatten(0, 1), student(tokens, with):flatten(0, 1))
    end):item()
  end
  local apart_before = divergence()
  before = snapshot()
  mamba.fit(m, student, draw, { { steps = 0, lr = 0 }, { steps = 0, lr = 0 }, { steps = 20, lr = 2e-3 } })
  check.equal(moved(before), { new = true, attention = true, rest = true })
  check.ok(divergence() < apart_before)
  check.close(mamba.divergence(ty.tensor { { 0, 1 } }, ty.tensor { { 0, 1 } }):item(), 0, 1e-6)
end)

check.test("what cannot become one is one clear error", function()
  check.fails(function() mamba.student(ty.nn.Linear(2, 2)) end, "expected a decoder whose attention has q_proj")
  check.fails(function() mamba.student(model(), { keep = { 4 } }) end, "keep: expected integers in [1, 3], got 4")
end)

check.finish()
