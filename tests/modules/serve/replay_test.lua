-- serve.replay: times of a trace by a clock of our own, against those that follow from how long a step takes.
local here = (arg and arg[0]:match ".*/" or "tests/modules/serve/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local llm = require "tycho.llm"
local serve = require "tycho.serve"

-- An engine whose steps take a second each on the clock, and give a token to each request.
local function stand_in(clock)
  local engine = { list = {}, running = {}, waiting = {} }
  function engine:submit(tokens, options)
    local request = { prompt = tokens, tokens = {}, count = options.count, options = options }
    self.list[#self.list + 1], self.running[#self.running + 1] = request, request
    return request
  end
  function engine:step()
    clock.now = clock.now + 1
    self.running = {}
    for _, request in ipairs(self.list) do
      if not request.reason then
        request.tokens[#request.tokens + 1] = 7
        request.options.on_token(request, 7)
        if #request.tokens == request.count then
          request.reason = "length"
          request.options.on_end(request, "length")
        else
          self.running[#self.running + 1] = request
        end
      end
    end
    return #self.running > 0
  end
  return engine
end

check.test("waiting is what the steps take", function()
  local clock = { now = 100 }
  local trace = { { at = 0.5, prompt = { 1 }, count = 2 },
    { at = 1, prompt = { 1 }, count = 1 }, { at = 10, prompt = { 1 }, count = 3 } }
  local times = serve.replay.run(stand_in(clock), trace, { clock = function() return clock.now end })
  -- Steps end at 1.5 (the first), 2.5 (the first two), and from 10 on at 11, 12 and 13.
  check.equal(times.first, { 1, 1.5, 1 })
  check.equal(times.done, { 2, 1.5, 3 })
  check.equal(times.each, { 1, 1.5, 1 })
  check.equal({ times.tokens, times.ended, times.busy, #times.requests }, { 6, 13, 5, 3 })
  check.close(times.throughput, 6 / 13, 1e-12)
end)

check.test("batches end together; texts are the model's", function()
  ty.manual_seed(1)
  local model = llm.Llama { vocab_size = 31, hidden_size = 16, intermediate_size = 24, num_hidden_layers = 1,
    num_attention_heads = 2 }:eval()
  local ticks = 0
  local function clock()
    ticks = ticks + 1
    return ticks
  end
  local trace = {}
  for i = 1, 5 do
    trace[i] = { at = i < 4 and 0 or 1000, prompt = { i, 2 * i }, count = 2 * i }
  end
  local times = serve.replay.batches(model, trace, 2, clock)
  check.equal(times.tokens, 2 + 4 + 6 + 8 + 10)
  local alone = serve.replay.alone(model, trace)
  for i, x in ipairs(trace) do
    local all = model:generate({ x.prompt }, 2 * i, { temperature = 0, stop_tokens = false })[1]:tolist()
    check.equal(alone[i], table.move(all, 3, #all, 1, {}), "text " .. i)
    check.equal(times.texts[i], alone[i], "text " .. i .. " in a batch")
    check.equal(times.first[i] > 0 and times.done[i] >= times.first[i], true)
  end
  check.equal(times.first[3] > times.done[2], true, "the third waited for the batch before it")
  check.equal(serve.replay.run(serve.engine(model), trace).texts, alone, "by an engine")
  check.equal(serve.replay.same(times.texts, alone), 1)
  alone[2][1], alone[4] = alone[2][1] + 1, { 1 }
  check.equal(serve.replay.same(times.texts, alone), 3 / 5)
  check.equal(serve.replay.same({ { 1, 2 } }, { { 1 } }), 0)
end)

check.test("arrivals", function()
  local list = serve.traces.arrivals(4000, 2.5, 3)
  check.close(list[4000] / 4000, 0.4, 0.03)
  check.equal(list, serve.traces.arrivals(4000, 2.5, 3))
  local long = 0
  for i = 2, #list do long = long + (list[i] - list[i - 1] > 0.4 and 1 or 0) end
  check.close(long / #list, math.exp(-1), 0.03, "gaps are exponential")
end)

check.test("wrong arguments", function()
  local engine = stand_in { now = 0 }
  local later, sooner = { at = 2, prompt = { 1 }, count = 1 }, { at = 1, prompt = { 1 }, count = 1 }
  check.fails(function() serve.replay.run(engine, { later, sooner }) end,
    "replay.run: request 2: at: expected no time before that of the request before, got 1 after 2")
  check.fails(function() serve.replay.run(engine, { { } }) end, "replay.run: request 1: at: expected a number >= 0")
  check.fails(function() serve.traces.arrivals(3, 0, 1) end, "traces.arrivals: rate: expected a number > 0, got 0")
end)

check.finish()
