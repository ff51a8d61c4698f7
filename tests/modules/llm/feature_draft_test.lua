-- Drafts that read the large model's states: whatever they draft the text is the model's own; what they draft is what
-- they would without a cache; the fusions and the loss by hand; how much to draft against all choices. Where there is a
-- GPU, or the emulated device, the draft is there and the model on the CPU.
local here = (arg and arg[0]:match ".*/" or "tests/modules/llm/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local llm = require "tycho.llm"

local function llama(tied, depth)
  ty.manual_seed(3)
  local model = llm.Llama { vocab_size = 48, hidden_size = 32, intermediate_size = 64, num_hidden_layers = depth or 4,
    num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 64, tie_word_embeddings = tied }
  for _, p in ipairs(model:parameters()) do ty.no_grad(function() p:mul_(p.ndim > 1 and 4 or 1) end) end
  return model:eval()
end

local function prompt(i)
  ty.manual_seed(50 + i)
  return ty.randint(0, 48, { 5 + i })
end

local makes = { {}, { layers = 1 }, { layers = 2, fusion = "linear" }, { layers = 3, taps = { 1, 3 } },
  { layers = 2, taps = { 2 }, fusion = "linear" } }

check.test("the text is the model's own", function()
  for _, tied in ipairs { true, false } do
    local model = llama(tied)
    for _, make in ipairs(makes) do
      local draft = llm.FeatureDraft(model, make):eval()
      for i = 1, 3 do
        local want = model:generate({ prompt(i) }, 20, { temperature = 0 })[1]:tolist()
        for _, ahead in ipairs { 1, 3, 6, llm.draft_length { draft = 1, model = { 4, 4, 4, 5 } } } do
          local stats = {}
          local got = model:generate({ prompt(i) }, 20, { temperature = 0, draft = draft, draft_tokens = ahead,
            stats = stats })[1]:tolist()
          check.equal(got, want)
          local passes, tokens = 0, 0
          for n, count in pairs(stats.passes) do passes, tokens = passes + count, tokens + n * count end
          check.equal({ passes, tokens }, { stats.rounds, stats.rounds + stats.drafted })
          check.equal(stats.accepted + stats.rounds >= 20, true)
        end
      end
    end
  end
end)

check.test("drawn texts are possible, and end where they should", function()
  local model = llama(true)
  local draft = llm.FeatureDraft(model, { layers = 2 }):eval()
  local text = model:generate({ prompt(1) }, 15, { seed = 1, draft = draft, top_k = 5 })[1]
  check.equal(text:numel(), prompt(1):numel() + 15)
  local full = model:generate({ prompt(2) }, 12, { temperature = 0 })[1]:tolist()
  local stop = full[prompt(2):numel() + 4]
  local o = { temperature = 0, stop_tokens = stop }
  local want = model:generate({ prompt(2) }, 12, o)[1]:tolist()
  o.draft = draft
  check.equal(model:generate({ prompt(2) }, 12, o)[1]:tolist(), want)
end)

check.test("what is drafted is what whole passes say", function()
  local model = llama(true)
  for _, make in ipairs(makes) do
    local draft = llm.FeatureDraft(model, make):eval()
    ty.no_grad(function() -- so that features matter
      for name, p in draft:named_parameters() do
        if name:find "^feature" or name:find "^joined.w" or name:find "^gate" or name:find "^others" then
          p:add_(ty.randn_like(p) * 0.2)
        end
      end
      local drafter, cache = draft:drafter(model, 64), model:cache()
      local sequence = prompt(4):tolist()
      local function choose(logits) return logits:argmax(-1):item() end
      drafter:propose(sequence, 3, choose)
      check.equal(sequence, prompt(4):tolist(), "nothing before the model has seen anything")
      for round = 1, 4 do
        local tokens = { table.unpack(sequence, cache.past + 1) }
        local hidden = drafter:run(model, ty.tensor({ tokens }, { dtype = "i64" }), cache)
        local held = round == 3 and 1 or #tokens -- in one round what was drafted does not hold
        local past = cache.past - (#tokens - held)
        cache:truncate(past)
        drafter:keep(held, past)
        for i = #sequence, past + 1, -1 do sequence[i] = nil end
        sequence[#sequence + 1] = model:head(hidden:narrow(1, held - 1, 1)):argmax(-1):item()
        local known = #sequence
        drafter:propose(sequence, 3, choose)
        -- The same without caches.
        local all = ty.tensor({ { table.unpack(sequence, 1, known) } }, { dtype = "i64" })
        local features = draft:observe(model, all:narrow(1, 0, known - 1))
        local behind = all:narrow(1, 1, known - 1)
        for i = 1, 3 do
          local predicted, state = draft(features, behind)
          local token = choose(draft:head(state:select(1, -1)))
          check.equal(sequence[known + i], token, ("round %d, token %d"):format(round, i))
          features = ty.concat({ features, predicted:select(1, -1):unsqueeze(1) }, 1)
          behind = ty.concat({ behind, ty.tensor({ { token } }, { dtype = "i64" }) }, 1)
        end
      end
    end)
  end
end)

check.test("features and fusions by hand", function()
  local model = llama(true)
  local tokens = ty.randint(0, 48, { 2, 7 })
  ty.no_grad(function()
    local taps = { [2] = true, [4] = true }
    local hidden = model:hidden(tokens, { taps = taps })
    check.ok(hidden:equal(model:hidden(tokens)), "taps change nothing")
    check.close(model.model.norm(taps[4]):tolist(), hidden:tolist(), 1e-5)
    local half = llama(true, 2) -- the first two layers of the same
    local given = {}
    for name, p in model:named_parameters() do given[name] = p end
    for name, p in half:named_parameters() do p:copy_(given[name]) end
    check.close(half.model.norm(taps[2]):tolist(), half:hidden(tokens):tolist(), 1e-5)

    local draft = llm.FeatureDraft(model, { layers = 2, taps = { 2 } })
    local features = draft:observe(model, tokens)
    check.equal(features.shape, { 2, 7, 64 })
    check.ok(features:narrow(-1, 32, 32):equal(hidden))
    check.close(features:narrow(-1, 0, 32):square():mean(-1):tolist(), ty.ones(2, 7):tolist(), 1e-3)
    for _, name in ipairs { "feature", "gate" } do
      draft[name].weight:copy_(ty.randn_like(draft[name].weight) * 0.1)
    end
    local e = model.model.embed_tokens(tokens)
    local f = features:matmul(draft.feature.weight:transpose(0, 1))
    local n = e / (e:square():mean(-1, true) + 1e-6):sqrt()
    local t = n:matmul(draft.token.weight:transpose(0, 1)):silu()
    local z = ty.concat({ f, t }, -1):matmul(draft.gate.weight:transpose(0, 1)):sigmoid()
    local want = draft.body:hidden(tokens, { embeddings = z * f + (1 - z) * t })
    local _, state = draft(features, tokens)
    check.close(state:tolist(), want:tolist(), 1e-4)
    -- It begins as the model without the layers between the first and the last.
    local begun = llm.FeatureDraft(model, { layers = 2, fusion = "linear" })
    for name, p in half:named_parameters() do
      p:copy_(given[(name:gsub("layers%.1", "layers.3"))])
    end
    local _, first = begun(hidden, tokens)
    check.close(first:tolist(), half:hidden(tokens):tolist(), 1e-4)
  end)
end)

check.test("the loss by hand, and training", function()
  local model = llama(true)
  ty.manual_seed(9)
  local tokens = ty.randint(0, 48, { 3, 9 })
  for _, make in ipairs { { layers = 2 }, { layers = 2, taps = { 1 }, fusion = "linear" } } do
    local draft = llm.FeatureDraft(model, make)
    local features, hidden = ty.no_grad(draft.observe, draft, model, tokens)
    local want = 0
    local input = features
    for pass = 1, 2 do
      local n = 9 - pass
      local predicted, state = draft(input:narrow(1, 0, n), tokens:narrow(1, pass, n))
      local d = (predicted - features:narrow(1, pass, n)):abs()
      local smooth = ty.where(d:lt(1), d:square() * 0.5, d - 0.5):mean()
      local p = model:head(hidden:narrow(1, pass, n)):softmax(-1)
      local q = draft:head(state):softmax(-1)
      want = want + (smooth:item() - 0.3 * (p * q:log()):sum(-1):mean():item()) / 2
      input = predicted
    end
    local loss, agreed = draft:loss(tokens, features, hidden, { weight = 0.3, passes = 2, noise = 0 })
    check.close(loss:item(), want, 1e-4)
    check.ok(agreed:item() >= 0 and agreed:item() <= 1)
    loss:backward()
    check.equal(draft.body.model.embed_tokens.weight.grad, nil)
    for _, p in ipairs(model:parameters()) do check.equal(p.grad, nil) end
    local before = draft.body.model.embed_tokens.weight:clone()
    local losses = draft:fit(model, { next = function() return { tokens = tokens } end }, { steps = 60, lr = 3e-3,
      noise = 0, passes = 2, quiet = true })
    check.ok(losses[#losses] < 0.93 * losses[1], ("from %g to %g"):format(losses[1], losses[#losses]))
    check.ok(draft.body.model.embed_tokens.weight:equal(before))
  end
end)

check.test("how much is drafted", function()
  local length = llm.draft_length({ draft = 1, model = { 10, 11, 12, 20, 21 } }, { first = 0.5, decay = 1 })
  check.close(length.expected({ 0.5, 0.5, 0.5 }, 3), 1.875, 1e-12)
  -- Tokens a second with 1 to 4: 1.5 / 12, 1.75 / 14, 1.875 / 23, 1.9375 / 25.
  check.equal(length:choose(), 1)
  for _ = 1, 50 do length:see(4, 4) end
  check.equal(length:choose(), 2) -- nearly 3 / 14, before 5 / 25
  check.close(length.held[2] / length.tried[2], 52 / 54, 1e-12)
  for _ = 1, 400 do length:see(4, 0) end
  check.equal(length:choose(), 1)
  check.equal(length.tried[2], 54.0, "a place that was not reached says nothing")
  ty.manual_seed(1)
  local draw = ty.rand(300):tolist()
  for _ = 1, 20 do
    local model, shares = { 1 }, {}
    for n = 2, 6 do model[n] = model[n - 1] + table.remove(draw) * 0.5 end
    local one = llm.draft_length { draft = table.remove(draw) * 0.2, model = model }
    for n = 1, 5 do
      shares[n] = table.remove(draw)
      one.held[n], one.tried[n] = shares[n], 1
    end
    local best, most = 1, 0
    for count = 1, 5 do
      local speed = one.expected(shares, count) / (count * one.draft + model[count + 1])
      if speed > most then best, most = count, speed end
    end
    if most * model[1] >= 1 then check.equal(one:choose(), best) end
  end
end)

if ty.cuda.count() > 0 then
  check.test("the draft on a GPU, the model on the CPU", function()
    local model = llama(true)
    local want = model:generate({ prompt(1) }, 20, { temperature = 0 })[1]:tolist()
    local draft = llm.FeatureDraft(model, { layers = 2, taps = { 2 } }):eval():to "cuda"
    local stats = {}
    check.equal(model:generate({ prompt(1) }, 20, { temperature = 0, draft = draft, stats = stats })[1]:tolist(), want)
    check.equal(tostring(model:device()), "cpu")
    check.equal(model:generate({ prompt(1) }, 20, { temperature = 0, draft = llama(true):to "cuda" })[1]:tolist(),
      want, "a model of its own")
    check.equal(model:generate({ prompt(1) }, 8, { seed = 1, draft = draft })[1]:numel(), prompt(1):numel() + 8)
  end)
end

check.test("errors", function()
  local model = llama(true)
  local draft = llm.FeatureDraft(model, { layers = 1 })
  check.fails(function() llm.FeatureDraft(ty.nn.Linear(2, 2)) end, "FeatureDraft: model: expected a decoder")
  check.fails(function() llm.FeatureDraft(model, { layers = 5 }) end, "an integer in [1, 4]")
  check.fails(function() llm.FeatureDraft(model, { taps = { 9 } }) end, "taps: expected an integer in [1, 4], got 9")
  check.fails(function() llm.FeatureDraft(model, { fusion = "sum" }) end, 'fusion: expected "gate" or "linear"')
  check.fails(function() llm.draft_length { draft = 1, model = { 1 } } end, "rates.model: expected two at least")
  check.fails(function() llm.draft_length { draft = -1, model = { 1, 2 } } end, "rates.draft: expected a number >= 0")
  check.fails(function() model:generate({ prompt(1) }, 5, { draft = draft, draft_tokens = {} }) end, "draft_tokens")
  local other = llm.Llama { vocab_size = 48, hidden_size = 16, intermediate_size = 32, num_hidden_layers = 2,
    num_attention_heads = 2, num_key_value_heads = 2 }
  check.fails(function() other:generate({ prompt(1) }, 5, { draft = draft }) end,
    "of a model of width 32, this one has 16")
end)

check.finish()
