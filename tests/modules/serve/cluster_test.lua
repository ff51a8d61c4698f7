-- A cluster in events against a plain loop over steps, and against times by hand; traces, step times, designs.
local here = (arg and arg[0]:match ".*/" or "tests/modules/serve/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local serve = require "tycho.serve"

-- Every kind of content costs something else.
local time = { token_bytes = 100, bandwidth = 1e4, latency = 0.5,
  of = function(prompt, pair, decodes, context) return 1 + prompt + pair / 64 + decodes / 4 + context / 128 end }

-- One machine that mixes, step by step and request by request.
local function one_by_one(trace, limit, chunk, room)
  local now, waiting, running, all = 0, {}, {}, {}
  for i, r in ipairs(trace) do
    all[i] = { arrival = r.arrival, prompt = r.prompt, count = r.count, done = 0, tokens = 0 }
  end
  local coming = table.move(all, 1, #all, 1, {})
  while true do
    while coming[1] and coming[1].arrival <= now do waiting[#waiting + 1] = table.remove(coming, 1) end
    if #waiting == 0 and #running == 0 then
      if not coming[1] then break end
      now = coming[1].arrival
    else
      local prompt, pairs_sum, decodes, context, used = 0, 0, 0, 0, 0
      local stepping = table.move(running, 1, #running, 1, {})
      for _, r in ipairs(running) do
        decodes, context, used = decodes + 1, context + r.prompt + r.tokens, used + r.prompt + r.count
      end
      local left, ready = chunk and chunk - decodes or limit, {}
      for _, r in ipairs(waiting) do
        if r.done > 0 then used = used + r.prompt + r.count end
      end
      while waiting[1] and left > 0 do
        local r = waiting[1]
        if r.done == 0 then
          if used + r.prompt + r.count > room and used > 0 then break end
          used = used + r.prompt + r.count
        end
        local n = r.prompt - r.done
        if chunk then n = math.min(n, left) elseif prompt > 0 and n > left then break end
        prompt, left, pairs_sum = prompt + n, left - n, pairs_sum + n * r.done + n * (n + 1) / 2
        r.done = r.done + n
        if r.done < r.prompt then break end
        ready[#ready + 1] = table.remove(waiting, 1)
      end
      now = now + time.of(prompt, pairs_sum, decodes, context)
      for _, r in ipairs(ready) do
        r.first, r.tokens = now, 1
        running[#running + 1] = r
      end
      for _, r in ipairs(stepping) do r.tokens = r.tokens + 1 end
      for i = #running, 1, -1 do
        if running[i].tokens == running[i].count then table.remove(running, i).over = now end
      end
    end
  end
  return all
end

check.test("one machine that mixes, with whole prompts and with parts, as step by step", function()
  for seed = 1, 4 do
    local trace = serve.services.draw("conversation", 60, 0.02, { seed = seed, prompts = 1 / 32, counts = 1 / 16 })
    for _, way in ipairs { { 40 }, { 40, nil, 300 }, { 40, 16 }, { 40, 16, 250 }, { 1 } } do
      local limit, chunk, room = way[1], way[2], way[3] or math.huge
      local machine = { room = room, of = time.of }
      local outcome = serve.cluster.simulate({ machines = { { time = machine, pool = "mixed" } }, limit = limit,
        chunk = chunk }, trace)
      for i, r in ipairs(one_by_one(trace, limit, chunk, room)) do
        check.close(outcome.requests[i].first, r.first, 1e-6 * r.first, "first token")
        check.close(outcome.requests[i].over, r.over, 1e-6 * r.over, "last token")
      end
    end
  end
end)

check.test("a prompt here and its tokens there, by hand", function()
  local machines = { { time = time, pool = "prompt" }, { time = time, pool = "token" } }
  local trace = { { arrival = 1, prompt = 20, count = 3 } }
  local step = time.of(20, 210, 0, 0)
  local tokens = time.of(0, 0, 1, 21) + time.of(0, 0, 1, 22)
  -- In one piece, 20 tokens of 100 bytes take 0.2 seconds, and half of one on their way.
  local one = serve.cluster.simulate({ machines = machines, layers = 4, serial_below = 100 }, trace)
  check.close(one.requests[1].first, 1 + step, 1e-9)
  check.close(one.requests[1].over, 1 + step + 0.2 + 0.5 + tokens, 1e-9)
  check.equal({ one.bytes, one.requests[1].place }, { 2000, { 1, 2 } })
  -- Layer by layer the last of four parts is left.
  local layers = serve.cluster.simulate({ machines = machines, layers = 4, serial_below = 0 }, trace)
  check.close(layers.requests[1].over, 1 + step + 0.05 + 0.5 + tokens, 1e-9)
  -- On a link that is slower than the prompt it is the link that counts, from the first layer on.
  local slow = setmetatable({ bandwidth = 20 }, { __index = time })
  machines = { { time = slow, pool = "prompt" }, { time = slow, pool = "token" } }
  layers = serve.cluster.simulate({ machines = machines, layers = 4, serial_below = 0 }, trace)
  check.close(layers.requests[1].over, 1 + step / 4 + 100 + 0.5 + tokens, 1e-9)
  -- Two prompts of one step share the link: they wait for a third one's, and have their tokens on two machines.
  machines = { { time = time, pool = "prompt" }, { time = time, pool = "token" }, { time = time, pool = "token" } }
  trace = { { arrival = 0, prompt = 3, count = 1 }, { arrival = 1, prompt = 20, count = 2 },
    { arrival = 1, prompt = 20, count = 2 } }
  one = serve.cluster.simulate({ machines = machines, layers = 4, serial_below = 100 }, trace)
  local both = time.of(3, 6, 0, 0) + time.of(40, 420, 0, 0)
  check.close(one.requests[3].first, both, 1e-9)
  check.close(one.requests[2].over, both + 0.2 + 0.5 + time.of(0, 0, 1, 21), 1e-9)
  check.close(one.requests[3].over, both + 0.4 + 0.5 + time.of(0, 0, 1, 21), 1e-9)
  machines[3] = nil
  -- Where queues are too long, a machine for tokens takes a request whole.
  trace = {}
  for i = 1, 6 do trace[i] = { arrival = 0.001 * i, prompt = 50, count = 2 } end
  local many = serve.cluster.simulate({ machines = machines, layers = 4, overflow = 120 }, trace)
  check.equal(many.overflowed > 0, true)
  local alone = 0
  for _, r in ipairs(many.requests) do if r.place[1] == 2 and r.place[2] == 2 then alone = alone + 1 end end
  check.equal(alone, many.overflowed)
  check.equal(many.bytes, (6 - alone) * 50 * 100)
end)

check.test("queues are joined where they are shortest, and everybody is served", function()
  local machines = {}
  for i = 1, 5 do machines[i] = { time = time, pool = i <= 2 and "prompt" or "token" } end
  local trace = serve.services.draw("coding", 300, 0.05, { prompts = 1 / 64, counts = 1 / 8 })
  local outcome = serve.cluster.simulate({ machines = machines, layers = 4, overflow = math.huge }, trace)
  local counts = { 0, 0, 0, 0, 0 }
  for _, r in ipairs(outcome.requests) do
    check.equal(r.over >= r.first and r.first > r.arrival, true)
    for _, at in ipairs(r.place) do counts[at] = counts[at] + 1 end
  end
  check.equal(counts[1] + counts[2], 300)
  for i, least in ipairs { 100, 100, 60, 60, 60 } do check.equal(counts[i] >= least, true, "machine " .. i) end
  check.fails(function() serve.cluster.simulate({ machines = { { time = time, pool = "token" } } }, trace) end,
    "expected all mixed, or some for prompts and some for tokens, got 0, 0 and 1")
end)

check.test("what users wait for", function()
  local alone = { of = function(prompt) return prompt > 0 and prompt or 2 end }
  local list = {}
  for i = 1, 100 do list[i] = { arrival = 0, prompt = 10, count = 5, first = 10 + i, over = 10 + i + 8 * i / 50 } end
  local l = serve.cluster.latencies(list, alone)
  check.equal({ l.ttft.p50, l.ttft.p90, l.ttft.p99 }, { 60, 100, 109 })
  check.close(l.slow_ttft.p99, 10.9, 1e-9)
  check.close(l.tbt.p50, 2, 1e-9)
  check.close(l.slow_tbt.p90, 1.8, 1e-9)
  check.close(l.slow_e2e.p50, 68 / 18, 1e-9)
  local keeps, worst, where = serve.cluster.keeps(l, { slow_ttft = { p50 = 20 }, slow_tbt = { p90 = 1.5, p99 = 5 } })
  check.equal({ keeps, where }, { false, "slow_tbt p90" })
  check.close(worst, 1.2, 1e-9)
end)

check.test("requests have the lengths of the services", function()
  for service, wanted in pairs { coding = { 1469, 7302, 13 }, conversation = { 1020, 4083, 129 } } do
    local trace = serve.services.draw(service, 4000, 5)
    local prompts, counts = {}, {}
    for i, r in ipairs(trace) do prompts[i], counts[i] = r.prompt, r.count end
    table.sort(prompts)
    table.sort(counts)
    check.close(prompts[2000] / wanted[1], 1, 0.08)
    check.close(prompts[3800] / wanted[2], 1, 0.05)
    check.close(counts[2000] / wanted[3], 1, 0.1)
    check.close(trace[4000].arrival, 800, 40)
    local faster = serve.services.faster(trace, 2)
    check.equal(faster[7].arrival, trace[7].arrival / 2)
  end
  check.fails(function() serve.services.draw("music", 3, 1) end, 'service: expected "coding" or "conversation"')
end)

check.test("step times come back from steps, with some that are off", function()
  local steps = {}
  local function add(prompt, decodes, sent, taken)
    local s = { prompt = prompt, pairs = prompt * prompt / 2, decodes = decodes, context = 50 * decodes, sent = sent,
      taken = taken }
    if prompt > 0 then s.seconds = 2 + 0.1 * prompt + 1e-3 * s.pairs + 0.2 * decodes + 0.01 * s.context + 1e-3 * sent
    else s.seconds = 1 + 0.1 * decodes + 0.02 * s.context + 2e-3 * taken end
    if #steps % 25 == 3 then s.seconds = s.seconds * 20 end
    steps[#steps + 1] = s
  end
  for i = 1, 40 do
    add(5 + 7 * i % 60, i % 4, 10 * (i % 3), 0)
    add(0, 1 + i % 9, 0, 100 * (i % 5))
  end
  for _, s in ipairs(steps) do s.context = s.context + s.decodes % 3 end
  local fitted = serve.step_time.fit(steps)
  check.close(fitted.of(100, 5000, 0, 0) / (2 + 10 + 5), 1, 0.02)
  check.close(fitted.of(0, 0, 8, 400) / (1 + 0.8 + 8), 1, 0.02)
  check.close(fitted.send / 1e-3, 1, 0.1)
  check.close(fitted.take / 2e-3, 1, 0.1)
  -- Steps that take now more and now less take their mean.
  local noisy = {}
  for i = 1, 80 do
    for k, much in ipairs { 0.5, 1, 1.5 } do
      noisy[#noisy + 1] = { prompt = k == 1 and i or 0, pairs = 0, decodes = i, context = 9 * i % 7,
        seconds = much * (1 + i) }
      if k > 1 then noisy[#noisy + 1] = { prompt = 0, pairs = 0, decodes = i, context = 9 * i % 7, seconds = 1 + i } end
    end
  end
  check.close(serve.step_time.fit(noisy).of(0, 0, 40, 3) / (41 * 1.125), 1, 0.02)
  check.fails(function() serve.step_time.fit { steps[1] } end, "expected at least 8 of kind")
end)

check.test("published machines and what a budget buys", function()
  local a, h = serve.step_time.published("dgx-a100", "llama2-70b"), serve.step_time.published("dgx-h100", "llama2-70b")
  check.close(a.of(1024, 0, 0, 0), 0.1609, 1e-9)
  check.close(a.of(1536, 0, 0, 0), (0.1609 + 0.2827) / 2, 1e-9)
  check.close(a.of(0, 0, 4, 4096), 0.04647, 1e-9)
  check.close(a.of(1020, 0, 4, 4096), 0.1609 + 0.04647 - 0.04303, 1e-9)
  check.close(h.of(0, 0, 1, 65536), 1e-3 * (50.16 + 2 * (50.16 - 38.62)), 1e-9)
  check.close(h.cost / a.cost, 4.76 / 2.21, 1e-9)
  local list = serve.designs.within(4 * h.cost, "cost", { kinds = { a = a, h = h }, mixed = { "h", "a" },
    chunks = { 512 }, pairs = { { "h", "a" }, { "h", "h" } }, shares = { 0.25, 0.5, 0.52 } })
  local names = {}
  for i, d in ipairs(list) do
    names[i] = d.name
    check.equal(d.cost <= 4 * h.cost + 1e-9, true)
  end
  check.equal(names, { "4 h, whole prompts", "4 h, 512 tokens a step", "8 a, whole prompts", "8 a, 512 tokens a step",
    "1 h for prompts, 6 a for tokens", "2 h for prompts, 4 a for tokens", "1 h for prompts, 3 h for tokens",
    "2 h for prompts, 2 h for tokens" })
  -- The rate that is found is served, and a tenth more is not.
  local trace = serve.services.draw("coding", 150, 1)
  local rate = serve.designs.throughput(list[2], trace, a, { from = 0.5 })
  check.equal(serve.designs.serves(list[2], trace, rate, a), true)
  check.equal(serve.designs.serves(list[2], trace, rate * 1.1, a), false)
  local best = serve.designs.best(list, trace, a, { from = 0.5 })
  check.equal(best["mixed in parts"].rate >= rate, true)
  check.equal({ best["mixed whole"].design.kind, best.split.design.kind }, { "mixed whole", "split" })
end)

check.test("rates by trace, and how many times they are others'", function()
  local machine = serve.step_time.published("dgx-h100", "llama2-70b")
  local list = serve.designs.within(2 * machine.cost, "cost", { kinds = { H100 = machine }, mixed = { "H100" },
    chunks = {}, shares = { 0.5 }, pairs = { { "H100", "H100" } }, overflow = {} })
  local traces = {}
  for i = 1, 2 do traces[i] = serve.services.draw("coding", 60, 1, { seed = i }) end
  local rates, best = serve.designs.rates(list, traces, machine, { from = 0.2 })
  for kind, own in pairs(best) do
    check.equal(rates[1][kind], own.rate, kind)
    check.equal(rates[2][kind], serve.designs.throughput(own.design, traces[2], machine, { from = own.rate / 2 }), kind)
  end
  check.equal(next(best) ~= nil, true)
  local own = { { { split = 2 }, { split = 3 } }, { { split = 8 }, {} } }
  local other = { { { mixed = 1 }, { mixed = 1 } }, { { mixed = 2 }, { mixed = 1 } } }
  local gains = serve.designs.gains(own, other, "mixed")
  check.close(gains[1], math.sqrt(2 * 4), 1e-12)
  check.equal(gains[2], 0)
  check.fails(function() serve.designs.gains(own, {}, "mixed") end, "other: expected 2 services, got 0")
end)

check.finish()
