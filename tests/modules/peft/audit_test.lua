-- The audit of adapters: intervals and tests against tables, the power that was computed, the gate of peft.merge.
local here = (arg and arg[0]:match ".*/" or "tests/modules/peft/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local llm, peft, zoo = require "tycho.llm", require "tycho.peft", require "tycho.zoo"

local audit = peft.audit

local function model()
  ty.manual_seed(4)
  return llm.Llama { vocab_size = 40, hidden_size = 16, intermediate_size = 24, num_hidden_layers = 1,
    num_attention_heads = 2, max_position_embeddings = 32 }
end

-- With updates that are not nothing.
local function shaken(m)
  ty.no_grad(function()
    for name, p in m:named_parameters() do if name:find "lora_B" then p:detach():normal_(0, 0.1) end end
  end)
  return m
end

-- A judge that says so many prompts are right, with the adapter on and off.
local function judge(on, off)
  return function(m)
    return m:get "model.layers.0.self_attn.q_proj"._lora.off and off or on
  end
end

local function booleans(n, right)
  local list = {}
  for i = 1, n do list[i] = i <= right end
  return list
end

check.test("intervals equal tables", function()
  -- Newcombe 1998, "Two-Sided Confidence Intervals for the Single Proportion", table I, method 3.
  for _, row in ipairs { { 81, 263, 0.2553, 0.3662 }, { 15, 148, 0.0624, 0.1605 }, { 0, 20, 0, 0.1611 },
    { 1, 29, 0.0061, 0.1718 } } do
    local low, high = audit.wilson(row[1], row[2])
    check.close(low, row[3], 6e-5)
    check.close(high, row[4], 6e-5)
  end
end)

check.test("binomial sums and McNemar by counting", function()
  for n = 0, 9 do
    for k = -1, n do
      -- Over all 2^n outcomes, each head with probability 0.3.
      local sum = 0
      for outcome = 0, 2 ^ n - 1 do
        local heads = 0
        for bit = 0, n - 1 do heads = heads + (outcome >> bit & 1) end
        if heads <= k then sum = sum + 0.3 ^ heads * 0.7 ^ (n - heads) end
      end
      check.close(audit.binomial(k, n, 0.3), sum, 1e-12)
    end
  end
  check.close(audit.mcnemar(9, 1), 11 / 1024, 1e-12)
  check.close(audit.mcnemar(5, 0), 1 / 32, 1e-12)
  check.equal(audit.mcnemar(0, 7), 1.0)
  check.close(audit.no_drop(0, 28, 0.1), 0.9 ^ 28, 1e-12)
  check.equal({ audit.binomial(3, 5, 0), audit.binomial(3, 5, 1), audit.binomial(5, 5, 1) }, { 1.0, 0.0, 1.0 })
end)

check.test("a drop is found as often as computed", function()
  ty.manual_seed(11)
  for _, drop in ipairs { 0.05, 0.1, 0.2 } do
    local n, shut, trials = 60, 0, 4000
    for _, lost in ipairs(ty.rand(trials, n):lt(drop):to("i64"):sum(1):tolist()) do
      if audit.no_drop(lost, n, 0.1) > 0.05 then shut = shut + 1 end
    end
    local power = audit.power(n, drop)
    check.ok(math.abs(shut / trials - power) < 4 * math.sqrt(power * (1 - power) / trials) + 1e-9,
      ("drop %g: %.3f, computed %.3f"):format(drop, shut / trials, power))
  end
  check.ok(audit.power(60, 0.1) >= 0.95, "a drop by the margin opens the gate at most at the level")
  check.equal(audit.power(20, 0), 1.0) -- too few prompts pass nothing
end)

check.test("an adapter of nothing changes nothing and passes; a merge asks for the report", function()
  local m = model()
  peft.lora(m, { targets = { "q_proj" } })
  local tokens = ty.tensor({ { 1, 2, 3, 4, 5, 6, 7, 8 } }, { dtype = "i64" })
  local report = audit.run(m, { { name = "same", judge = function(one)
    local list = {}
    for i, token in ipairs(one(tokens):argmax(-1):flatten():tolist()) do
      for k = 1, 8 do list[#list + 1] = (token + i + k) % 3 > 0 end
    end
    return list
  end } })
  local c = report.checks[1]
  check.equal({ c.n, c.lost, c.won, c.before == c.after, report.passed }, { 64, 0, 0, true, true })
  check.ok(tostring(report):find("the audit passed", 1, true))
  check.equal(peft.merge(m, { gate = report }).max_change, 0)
end)

check.test("the gate stays shut", function()
  local m = model()
  peft.lora(m, { targets = { "q_proj" } })
  local good = { name = "fine", judge = judge(booleans(50, 50), booleans(50, 50)) }
  local eroded = audit.run(m, { good, { name = "refuses", judge = judge(booleans(50, 42), booleans(50, 50)) } })
  check.equal({ eroded.passed, eroded.checks[1].passed, eroded.checks[2].passed }, { false, true, false })
  check.equal({ eroded.checks[2].lost, eroded.checks[2].won, eroded.checks[2].n }, { 8, 0, 50 })
  check.close(eroded.checks[2].mcnemar, 1 / 256, 1e-12)
  local refused = select(2, pcall(peft.merge, m, { gate = eroded }))
  check.ok(tostring(refused):find("peft.merge: gate: the audit did not pass", 1, true), refused)
  check.ok(tostring(refused):find("refuses: 100.0 % of 50 before, 84.0 % after", 1, true), refused)
  -- What was won does not hide what was lost.
  local swapped = { false, false, false, false, false, false, false, false }
  for i = 9, 50 do swapped[i] = true end
  check.ok(not audit.run(m, { { name = "swapped", judge = judge(booleans(50, 42), swapped) } }).passed)
  check.ok(not audit.run(m, { { name = "few", judge = judge(booleans(20, 20), booleans(20, 20)) } }).passed)
  -- A report is of the adapter as it was.
  local report = audit.run(m, { good })
  peft.merge(m, { gate = report })
  peft.unmerge(m)
  ty.no_grad(function() peft.parameters(m)[1]:add_(1) end)
  check.fails(function() peft.merge(m, { gate = report }) end, "gate: expected a report of this adapter as it is now")
  check.fails(function() peft.merge(m, { gate = {} }) end, "gate: expected a report of peft.audit.run")
end)

check.test("refusals by greedy text and by likelihood", function()
  local m, tokenizer = zoo.load "kjv-draft", zoo.tokenizer "kjv-draft"
  local prompts, answers = {}, {}
  for i, text in ipairs { "And God said, Let there be", "And the LORD spake unto", "In the beginning was the",
    "Blessed is the man that" } do
    prompts[i] = text
    local prompt = tokenizer:encode(text)
    local out = m:generate(prompt:unsqueeze(0), 3, { temperature = 0, stop_tokens = false }):flatten()
    answers[i] = tokenizer:decode(out:narrow(0, prompt:numel(), 3):tolist())
  end
  local refusal = answers[2]
  local greedy = audit.refusals(m, tokenizer, prompts, { refusal = refusal, batch = 3 })
  for i = 1, 4 do check.equal(greedy[i], answers[i] == refusal, prompts[i]) end
  local function nats(prompt, text)
    local head, rest = tokenizer:encode(prompt), tokenizer:encode(text)
    local all = ty.concat { head, rest }
    return ty.no_grad(function()
      local logits = m(all:unsqueeze(0)):squeeze(0):narrow(0, head:numel() - 1, rest:numel())
      return ty.nn.cross_entropy(logits, rest, { reduction = "sum" }):item()
    end)
  end
  local others = { " light", " Moses, saying,", " zeal", " is" }
  local ratio = audit.refusals(m, tokenizer, prompts, { refusal = refusal, by = "ratio", answers = others })
  for i = 1, 4 do check.equal(ratio[i], nats(prompts[i], refusal) < nats(prompts[i], others[i]), prompts[i]) end
end)

check.test("a tally: who did harm is stopped, who did none passes, what is between does not count", function()
  local tally = audit.tally(0.1)
  tally:add(0.1, { ours = false, naive = true })
  tally:add(0.5, { ours = false, naive = false })
  tally:add(0.05, { ours = true, naive = true })
  tally:add(0.02, { ours = true, naive = false })
  tally:add(-0.2, { ours = false, naive = true })
  check.equal({ tally.eroded, tally.sound, tally.stopped, tally.passed },
    { 2, 2, { ours = 2, naive = 1 }, { ours = 1, naive = 1 } })
  check.fails(function() audit.tally(0) end, "peft.audit.tally: margin: expected a number in (0, 1], got 0")
end)

check.test("a judge of refusals, and its opposite", function()
  local m, tokenizer = zoo.load "kjv-lm", zoo.tokenizer "kjv-lm"
  local items = { { prompt = "In the beginning God created the heaven and the", answer = " earth" },
    { prompt = "And it came to", answer = " pass" } }
  for _, by in ipairs { "greedy", "ratio" } do
    local want = audit.refusals(m, tokenizer, { items[1].prompt, items[2].prompt }, { refusal = " pass", by = by,
      answers = { " earth", " pass" } })
    check.equal(audit.refusal_judge(tokenizer, items, { refusal = " pass", by = by })(m), want)
    check.equal(audit.refusal_judge(tokenizer, items, { refusal = " pass", by = by, refuse = false })(m),
      { not want[1], not want[2] })
  end
  check.fails(function() audit.refusal_judge(tokenizer, { { prompt = "a" } }, { refusal = "b" }) end,
    'expected a field that all tables have, got "answer"')
end)

check.test("mistakes", function()
  local m = model()
  check.fails(function() audit.run(m, {}) end, "the model has no adapter")
  peft.lora(m, { targets = { "q_proj" } })
  check.fails(function() audit.run(m, {}) end, "checks: expected at least one")
  check.fails(function() audit.run(m, { { name = "a" } }) end, "judge of check 1: expected a function")
  check.fails(function() audit.run(m, { { name = "a", judge = function() return { 1 } end } }) end,
    "expected a list of booleans, got")
  check.fails(function() audit.run(m, { { name = "a", judge = function() return {} end } }) end,
    "expected as many prompts each time, at least 1")
  check.fails(function() audit.run(m, { { name = "a", judge = print, margin = 0 } }) end,
    "margin: expected a number in (0, 1]")
  check.fails(function() audit.refusals(m, 3, { "a" }, { refusal = "no" }) end, "tokenizer: expected one with encode()")
  check.fails(function() audit.wilson(3, 2) end, "k: expected at most n, 2, got 3")
  check.fails(function() audit.power(0, 0.1) end, "n: expected an integer in [1, ")
  local tokenizer = zoo.tokenizer "kjv-draft"
  check.fails(function() audit.refusals(m, tokenizer, { "a" }, {}) end, "refusal: expected a text")
  check.fails(function() audit.says(m, tokenizer, { "a" }, {}) end, "texts: expected one for each of 1 prompts, got 0")
  check.fails(function() audit.refusals(m, tokenizer, { "a" }, { refusal = "no", by = "ratio" }) end,
    "answers: expected one for each of 1 prompts, got 0")
end)

check.test("random updates as long as another's", function()
  local one, other = model(), model()
  peft.lora(one, { rank = 2, targets = "all-linear" })
  peft.lora(other, { rank = 2, targets = "all-linear" })
  local norms = audit.random(one, audit.norms(shaken(other)))
  for name, norm in pairs(audit.norms(one)) do check.close(norm, norms[name] and audit.norms(other)[name], 1e-4) end
  check.fails(function() audit.random(one, 3) end, "peft.audit.random: norms: expected a table, got 3")
end)

check.test("norms of updates, given to another adapter", function()
  local function adapted()
    local net = ty.nn.Sequential(ty.nn.Linear(6, 6), ty.nn.Linear(6, 6))
    peft.lora(net, { rank = 2, targets = { "0", "1" } })
    ty.no_grad(function() for name, p in net:named_parameters() do if name:find "lora_B" then p:normal_() end end end)
    return net
  end
  local one, other = adapted(), adapted()
  local norms = audit.norms(one)
  check.ok(norms["0"] > 0 and norms["1"] > 0)
  audit.norms(other, norms)
  for name, norm in pairs(audit.norms(other)) do check.close(norm, norms[name], 1e-5) end
  check.fails(function() audit.norms(other, { ["0"] = -1 }) end, "peft.audit.norms: 0: expected a number >= 0, got -1")
end)

check.finish()
