--- What a prompt and the tokens after it take by the clock of a rank, and what the rank does meanwhile.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local Group = require "tycho.dist.group"

local expect, fail = arguments.expect, arguments.fail
local M = {}

--- Seconds of the rank's clock for a prompt, for each token that is decoded after it with a cache, and for all of it:
-- medians of rounds, after one that does not count. Tokens are those of the prompt again, which take as long as others.
-- events: of the last round, as RankGroup:record() has them, from its beginning on.
---@param group RankGroup
---@param model LanguageModel
---@param prompt Tensor  i64 [n, t]
---@param options? { tokens?: integer, rounds?: integer }  tokens to decode (16), rounds (5)
---@return { prefill: number, decode: number, whole: number, events: table[] }
function M.measure(group, model, prompt, options)
  local who = "decoding.measure"
  Group.expect(who, group)
  expect(who, "model", model, "a module")
  if not ty.is_tensor(prompt) or prompt.ndim ~= 2 or prompt:numel() == 0 then
    fail("%s: prompt: expected i64 [n, t], got %s", who, arguments.describe(prompt))
  end
  local o = arguments.read(who, options, { tokens = 16, rounds = 5 },
    { tokens = "an integer >= 1", rounds = "an integer >= 1" })
  local prefill, decode, events, began = {}, {}, nil, 0
  local function go()
    local cache = model:cache()
    group:barrier()
    began = group:clock()
    model:head(model:hidden(prompt, { cache = cache, last = 1 }))
    local between = group:clock()
    for i = 0, o.tokens - 1 do
      local token = prompt:narrow(1, i % prompt.shape[2], 1):contiguous()
      model:head(model:hidden(token, { cache = cache, last = 1 }))
    end
    return between - began, (group:clock() - between) / o.tokens
  end
  for round = 0, o.rounds do
    if round == o.rounds then events = group:record() end
    local a, b = ty.no_grad(ty.scope, go)
    if round > 0 then prefill[round], decode[round] = a, b end
  end
  for _, e in ipairs(events) do
    e.from, e.to, e.begun = e.from - began, e.to - began, e.begun and e.begun - began
  end
  local first, each = ty.stats.median(prefill), ty.stats.median(decode)
  return { prefill = first, decode = each, whole = first + o.tokens * each, events = events }
end

--- Of the time that all-reduces took, the share in which the rank did not wait for them. cost(event): seconds of one.
---@param events table[]
---@param cost fun(event: table): number
---@return number
function M.unwaited(events, cost)
  expect("decoding.unwaited", "events", events, "a list of tables")
  expect("decoding.unwaited", "cost", cost, "a function")
  local all, waited = 0, 0
  for _, e in ipairs(events) do
    if e.name == "all_reduce" then
      local takes = cost(e)
      all, waited = all + takes, waited + math.min(e.to - e.from, takes)
    end
  end
  return all > 0 and 1 - waited / all or 1
end

--- Two rows for dist.timeline: when a rank computed, which is when it did not wait, and when all-reduces were on their
-- way.
---@param events table[]
---@param cost fun(event: table): number
---@param ends? number  seconds: what began later is left out (math.huge)
---@return table[][] rows
function M.rows(events, cost, ends)
  expect("decoding.rows", "events", events, "a list of tables")
  expect("decoding.rows", "cost", cost, "a function")
  expect("decoding.rows", "ends", ends, "a number or nil")
  local computes, sums, last = {}, {}, 0
  for _, e in ipairs(events) do
    if e.name == "all_reduce" and e.begun and e.begun < (ends or math.huge) then
      computes[#computes + 1] = { name = "compute", from = last, to = e.from }
      last = e.to
      -- One that was waited for ended then; of others it is not known when the last rank came.
      local waited = e.to - e.from > 0.1 * cost(e)
      sums[#sums + 1] = { name = "sum", from = e.begun, to = waited and e.to or math.min(e.to, e.begun + cost(e)) }
    end
  end
  return { computes, sums }
end

return M
