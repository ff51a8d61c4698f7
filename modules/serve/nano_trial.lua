--- What nano-batches are measured by: the same requests served by tensor parallel ranks with whole steps, with steps in
-- halves, and with steps as they were found to be best, in turn.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local dist = require "tycho.dist"

local M = {}

--- What is served. options: width (384), layers (4), vocabulary (512), requests (24), prompt (32: the longest one),
-- count (12: the most tokens), batch (64: tokens of a step), seed (0).
---@param options? table
---@return table work
function M.open(options)
  local o = arguments.read("serve.nano_trial.open", options, { width = 384, layers = 4, vocabulary = 512,
    requests = 24, prompt = 32, count = 12, batch = 64, seed = 0 }, { width = "an integer >= 32",
    layers = "an integer >= 1", vocabulary = "an integer >= 2", requests = "an integer >= 1",
    prompt = "an integer >= 2", count = "an integer >= 2", batch = "an integer >= 2", seed = "an integer" })
  o.config = { vocab_size = o.vocabulary, hidden_size = o.width, intermediate_size = o.width * 8 // 3 // 16 * 16,
    num_hidden_layers = o.layers, num_attention_heads = math.max(4, o.width // 64 // 4 * 4),
    max_position_embeddings = 2 * (o.prompt + o.count) }
  ty.manual_seed(o.seed)
  o.texts, o.counts = {}, {}
  for i = 1, o.requests do
    o.texts[i] = ty.randint(0, o.vocabulary, { o.prompt // 2 + i * 7 % (o.prompt // 2) + 1 }):tolist()
    o.counts[i] = o.count // 2 + i * 5 % (o.count // 2) + 1
  end
  return o
end

--- The model, the same on all ranks.
---@param work table
---@return LanguageModel
function M.model(work)
  arguments.expect("serve.nano_trial.model", "work", work, "a table")
  ty.manual_seed(work.seed)
  return require("tycho.llm").Llama(work.config):eval()
end

-- The ways of a rank in turn: seconds of each by round, tokens, events of the last round.
local function on_rank(group, work, rounds)
  local t, trial = require "tycho", require "tycho.serve.nano_trial"
  local Engine = require "tycho.serve.engine"
  local model = trial.model(work)
  require("tycho.dist").tensor_parallel(model, group)
  local nano = require "tycho.serve.nano_batches" (model, group)
  local ways = { { "whole", off = true }, { "halves", shares = { 0.5, 0.5 } }, { "sought" } }
  local result = { seconds = {}, tokens = {}, events = {}, waited = {}, host = {} }
  for round = 0, rounds do -- the first does not count: it seeks
    for _, way in ipairs(ways) do
      nano.off, nano.shares = way.off, way.shares
      local within, began = 0, 0
      local engine = Engine.new(model, { requests = work.requests, batch = work.batch, prefixes = false,
        timing = function(_, done)
          if done then within = within + group:clock() - began else began = group:clock() end
        end })
      local list = {}
      for i, text in ipairs(work.texts) do
        list[i] = engine:submit(text, { count = work.counts[i], stop_tokens = false })
      end
      group:barrier()
      local events, from = group:record(), group:clock()
      t.no_grad(engine.run, engine)
      group:barrier()
      local name, texts = way[1], {}
      for i, request in ipairs(list) do texts[i] = table.concat(request.tokens, " ") end
      result.tokens[name] = table.concat(texts, "\n")
      if round > 0 then
        result.seconds[name] = result.seconds[name] or {}
        result.seconds[name][round] = group:clock() - from
        local waits = 0
        for _, e in ipairs(events) do
          if e.name == "all_reduce" then waits = waits + e.to - e.from end
        end
        result.waited[name] = waits / (group:clock() - from)
        result.host[name] = 1 - within / (group:clock() - from)
      end
      for _, e in ipairs(events) do e.from, e.to, e.begun = e.from - from, e.to - from, e.begun and e.begun - from end
      result.events[name] = table.move(events, 1, #events, 1, {}) -- the next turn's first barrier goes there too
    end
  end
  result.chosen, result.found = nano.chosen, nano.found
  return result
end

--- Serves the requests by ranks whose link is that of dist.run. Of rank 0: seconds (lists by way: "whole", "halves" and
-- "sought"), tokens (a text by way), waited (the share of the time in which it waited for sums), host (the share of
-- what is no step of the model: forming batches, choosing tokens), events (of the last
-- round), chosen and found (see NanoBatches).
---@param work table
---@param ranks integer
---@param link { latency?: number, bandwidth?: number }
---@param rounds integer
---@return table
function M.run(work, ranks, link, rounds)
  local who = "serve.nano_trial.run"
  arguments.expect(who, "work", work, "a table")
  arguments.expect(who, "ranks", ranks, "an integer >= 1")
  arguments.expect(who, "rounds", rounds, "an integer >= 1")
  return dist.run(ranks, on_rank, link, work, rounds)[1]
end

--- What one engine on one rank gives the requests, in the form of run().tokens.
---@param work table
---@return string
function M.alone(work)
  arguments.expect("serve.nano_trial.alone", "work", work, "a table")
  local engine, list, texts = require("tycho.serve.engine").new(M.model(work), { prefixes = false }), {}, {}
  for i, text in ipairs(work.texts) do
    list[i] = engine:submit(text, { count = work.counts[i], stop_tokens = false })
  end
  engine:run()
  for i, request in ipairs(list) do texts[i] = table.concat(request.tokens, " ") end
  return table.concat(texts, "\n")
end

--- How many of the requests have other tokens in one text of run() than in another.
---@param a string
---@param b string
---@return integer
function M.differ(a, b)
  arguments.expect("serve.nano_trial.differ", "a", a, "a string")
  arguments.expect("serve.nano_trial.differ", "b", b, "a string")
  local count, next_line = 0, b:gmatch "[^\n]+"
  for line in a:gmatch "[^\n]+" do
    if line ~= next_line() then count = count + 1 end
  end
  return count
end

return M
