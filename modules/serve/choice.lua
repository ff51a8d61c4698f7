--- The next tokens of requests that were computed together but ask for different things: each has its own temperature
-- and filters, and its own stream of random numbers, so that what it gets does not depend on its company.
local ty = require "tycho"
local sampling = require "tycho.llm.sampling"

local M = {}

-- The finalizer of SplitMix64 (Steele et al. 2014): a number in [0, 1) of a seed and a place.
local function uniform(seed, place)
  local z = seed + 0x9E3779B97F4A7C15 * (place + 1)
  z = (z ~ (z >> 30)) * 0xBF58476D1CE4E5B9
  z = (z ~ (z >> 27)) * 0x94D049BB133111EB
  z = z ~ (z >> 31)
  return (z >> 11) * 2.0 ^ -53
end
M.uniform = uniform

-- The tokens of rows [n, vocabulary] of probabilities at the shares u of their sums.
local function at_shares(p, u)
  local sums = p:to("f64"):cumsum(-1)
  local total = sums:narrow(-1, sums.shape[2] - 1, 1)
  local wanted = ty.tensor(u, { dtype = "f64", device = p.device }):unsqueeze(1) * total
  -- The first token whose sum is above: one without probability is never taken.
  return sums:le(wanted):to("i64"):sum(-1):clamp(0, p.shape[2] - 1)
end

--- The next token of each request. logits [n, vocabulary]; requests: n tables with options (those of
-- tycho.llm.sampling), seed, tokens (those it has got) and prompt.
---@param logits Tensor
---@param requests table[]
---@return integer[] tokens
function M.choose(logits, requests)
  local greedy, groups, order, result = {}, {}, {}, {}
  for i, request in ipairs(requests) do
    local o = request.options
    local penalty = o.repetition_penalty ~= 1
    if o.temperature == 0 and not penalty then
      greedy[#greedy + 1] = i
    else
      local key = penalty and i or ("%g %d %g %g"):format(o.temperature, o.top_k, o.top_p, o.min_p)
      if not groups[key] then
        groups[key] = {}
        order[#order + 1] = key
      end
      table.insert(groups[key], i)
    end
  end
  local function rows(list)
    if #list == #requests then return logits end
    local places = {}
    for j, i in ipairs(list) do places[j] = i - 1 end
    return logits:index_select(0, ty.tensor(places, { dtype = "i64", device = logits.device }))
  end
  local function take(list, tokens)
    for j, token in ipairs(tokens:tolist()) do result[list[j]] = token end
  end
  if #greedy > 0 then take(greedy, rows(greedy):argmax(-1)) end
  for _, key in ipairs(order) do
    local list = groups[key]
    local first, seen = requests[list[1]], nil
    if first.options.repetition_penalty ~= 1 then
      local all = table.move(first.prompt, 1, #first.prompt, 1, {})
      table.move(first.tokens, 1, #first.tokens, #all + 1, all)
      seen = ty.zeros({ 1, logits.shape[2] }, { dtype = "u8", device = logits.device })
      seen = seen:scatter(1, ty.tensor({ all }, { dtype = "i64", device = logits.device }), 1):to "bool"
    end
    local filtered = sampling.filter(rows(list), first.options, seen)
    if first.options.temperature == 0 then
      take(list, filtered:argmax(-1))
    else
      local u = {}
      for j, i in ipairs(list) do u[j] = uniform(requests[i].seed, #requests[i].tokens) end
      take(list, at_shares(filtered:softmax(-1), u))
    end
  end
  return result
end

return M
