--- Speculative decoding: a small model drafts a few tokens, the large one checks them in one pass. What comes out is
-- distributed exactly as the large model's own text. Leviathan et al. 2023, "Fast Inference from Transformers via
-- Speculative Decoding".
local ty = require "tycho"
local sampling = require "tycho.llm.sampling"

local M = {}

-- Runs the model on the tokens of `sequence` that the cache lacks; returns the logits after the last `wanted` of them.
local function next_logits(model, cache, sequence, wanted, device)
  local rest = table.move(sequence, cache.past + 1, #sequence, 1, {})
  local input = ty.tensor({ rest }, { dtype = "i64", device = device })
  return model:head(model:hidden(input, { cache = cache, last = wanted }):flatten(0, 1))
end

-- Up to `count` drafted tokens, appended to the sequence; where tokens are drawn, the probabilities of each as well.
local function draft(model, cache, sequence, count, o, device)
  local shares = {}
  for i = 1, count do
    local token
    token, shares[i] = ty.scope(function()
      local logits = next_logits(model, cache, sequence, 1, device)
      if o.temperature == 0 then return logits:argmax(-1):item() end
      local p = sampling.filter(logits, o):softmax(-1)
      return ty.multinomial(p, 1, true):item(), p
    end)
    sequence[#sequence + 1] = token
  end
  return shares
end

-- How many of the drafted tokens hold, and the token that comes after them.
local function judge_greedy(logits, drafted)
  local best = logits:argmax(-1):tolist()
  for i, token in ipairs(drafted) do
    if best[i] ~= token then return i - 1, best[i] end
  end
  return #drafted, best[#drafted + 1]
end

--- For drawn tokens: logits [count + 1, vocabulary] of the large model, the `count` drafted tokens, the probabilities
-- [1, vocabulary] that each was drawn by, options of sampling.filter(). Returns how many hold and the token after them.
function M.judge(logits, drafted, shares, o)
  local p = sampling.filter(logits, o):softmax(-1)
  local count = #drafted
  if count == 0 then return 0, ty.multinomial(p, 1, true):item() end
  local q = ty.concat(shares, 0)
  local index = ty.tensor(drafted, { dtype = "i64", device = p.device }):unsqueeze(1)
  local ratio = (p:narrow(0, 0, count):gather(1, index) / q:gather(1, index)):flatten():tolist()
  local draws = ty.rand(count):tolist()
  for i = 1, count do
    if draws[i] >= ratio[i] then
      -- The tokens that the draft offers too rarely make up for those that it offers too often.
      local rest = (p:select(0, i - 1) - q:select(0, i - 1)):clamp(0)
      if rest:sum():item() == 0 then rest = p:select(0, i - 1) end
      return i - 1, ty.multinomial(rest, 1, true):item()
    end
  end
  return count, ty.multinomial(p:select(0, count), 1, true):item()
end

--- Continues one row of tokens by up to `count`. o: options of generate() with draft and draft_tokens; ended(1, token)
-- says whether a token is the last; o.stats, a table, gets rounds, drafted and accepted.
---@return integer[] tokens  the new ones
function M.run(model, prompt, count, o, ended)
  local device, stats = prompt.device, o.stats or {}
  if not (o.draft.hidden and o.draft.head) or model.encode then
    error("generate: draft must be a decoder, for a decoder", 4)
  end
  local sequence = prompt:flatten():tolist()
  local first = #sequence
  local cache, other = model:cache { room = first + count }, o.draft:cache { room = first + count }
  stats.rounds, stats.drafted, stats.accepted = 0, 0, 0
  while #sequence - first < count do
    local known = #sequence
    local ahead_of = math.min(o.draft_tokens, count - (known - first) - 1)
    local shares = draft(o.draft, other, sequence, ahead_of, o, device)
    local drafted = table.move(sequence, known + 1, #sequence, 1, {})
    local held, token = ty.scope(function()
      local logits = next_logits(model, cache, sequence, #drafted + 1, device)
      if shares[1] and shares[1].shape[2] ~= logits.shape[2] then
        error(("generate: the draft has %d tokens, the model %d"):format(shares[1].shape[2], logits.shape[2]), 0)
      end
      if o.temperature == 0 then return judge_greedy(logits, drafted) end
      return M.judge(logits, drafted, shares, o)
    end)
    stats.rounds, stats.drafted, stats.accepted = stats.rounds + 1, stats.drafted + #drafted, stats.accepted + held
    for i = #sequence, known + held + 1, -1 do sequence[i] = nil end
    cache:truncate(known + held)
    other:truncate(math.min(other.past, known + held))
    sequence[#sequence + 1] = token
    for i = known + 1, #sequence do
      if ended(1, sequence[i]) then return table.move(sequence, first + 1, i, 1, {}) end
    end
  end
  return table.move(sequence, first + 1, #sequence, 1, {})
end

return M
