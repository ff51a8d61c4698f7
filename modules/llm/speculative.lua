--- Speculative decoding: a small model drafts a few tokens, the large one checks them in one pass. What comes out is
-- distributed exactly as the large model's own text. Leviathan et al. 2023, "Fast Inference from Transformers via
-- Speculative Decoding".
local ty = require "tycho"
local sampling = require "tycho.llm.sampling"

local M = {}

-- The tokens of `sequence` that the cache lacks, [1, n].
local function unseen(cache, sequence, device)
  return ty.tensor({ table.move(sequence, cache.past + 1, #sequence, 1, {}) }, { dtype = "i64", device = device })
end

-- A model with a text of its own as what drafts.
local Drafter = {}
Drafter.__index = Drafter

local function drafter_of(draft, room)
  return setmetatable({ draft = draft, cache = draft:cache { room = room }, device = draft:device() }, Drafter)
end

--- The large model's pass over tokens; wanted: of how many, the last ones, its states are.
function Drafter:run(model, tokens, cache, wanted) -- luacheck: ignore self
  return model:hidden(tokens, { cache = cache, last = wanted })
end

--- Up to `count` drafted tokens, appended to the sequence by choose(logits), which returns one.
function Drafter:propose(sequence, count, choose)
  for _ = 1, count do
    sequence[#sequence + 1] = ty.scope(function()
      local hidden = self.draft:hidden(unseen(self.cache, sequence, self.device), { cache = self.cache, last = 1 })
      return choose(self.draft:head(hidden:flatten(0, 1)))
    end)
  end
end

--- Of the tokens of the last run() the first `count` stay; the last of them is number `past` of the sequence.
function Drafter:keep(_, past) self.cache:truncate(math.min(self.cache.past, past)) end

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
-- says whether a token is the last; o.stats, a table, gets rounds, drafted, accepted and passes (how many there were of
-- the large model over 1, 2, ... tokens behind the known ones, the one that was not drafted included). A draft is a
-- decoder, or has drafter(model, room), which returns an object with run, propose and keep: see llm.FeatureDraft.
---@return integer[] tokens  the new ones
function M.run(model, prompt, count, o, ended)
  local device, stats, length = prompt.device, o.stats or {}, o.draft_tokens
  if not (o.draft.drafter or o.draft.hidden and o.draft.head) or model.encode then
    error("generate: draft must be a decoder, for a decoder", 4)
  end
  local sequence = prompt:flatten():tolist()
  local first = #sequence
  local cache = model:cache { room = first + count }
  local drafter = o.draft.drafter and o.draft:drafter(model, first + count) or drafter_of(o.draft, first + count)
  stats.rounds, stats.drafted, stats.accepted, stats.passes = 0, 0, 0, {}
  while #sequence - first < count do
    local known, shares = #sequence, {}
    local ahead_of = math.min(type(length) == "number" and length or length:choose(), count - (known - first) - 1)
    drafter:propose(sequence, ahead_of, function(logits)
      if o.temperature == 0 then return logits:argmax(-1):item() end
      local p = sampling.filter(logits, o):softmax(-1)
      shares[#shares + 1] = ty.keep(p:to { device = device })
      return ty.multinomial(p, 1, true):item()
    end)
    local drafted = table.move(sequence, known + 1, #sequence, 1, {})
    local begun = cache.past
    local held, token = ty.scope(function()
      local hidden = drafter:run(model, unseen(cache, sequence, device), cache, #drafted + 1)
      local logits = model:head(hidden:narrow(1, hidden.shape[2] - #drafted - 1, #drafted + 1):flatten(0, 1))
      if shares[1] and shares[1].shape[2] ~= logits.shape[2] then
        error(("generate: the draft has %d tokens, the model %d"):format(shares[1].shape[2], logits.shape[2]), 0)
      end
      if o.temperature == 0 then return judge_greedy(logits, drafted) end
      return M.judge(logits, drafted, shares, o)
    end)
    for _, p in ipairs(shares) do p:free() end
    stats.rounds, stats.drafted, stats.accepted = stats.rounds + 1, stats.drafted + #drafted, stats.accepted + held
    stats.passes[#drafted + 1] = (stats.passes[#drafted + 1] or 0) + 1
    if type(length) ~= "number" then length:see(#drafted, held) end
    for i = #sequence, known + held + 1, -1 do sequence[i] = nil end
    cache:truncate(known + held)
    drafter:keep(known + held - begun, known + held)
    sequence[#sequence + 1] = token
    for i = known + 1, #sequence do
      if ended(1, sequence[i]) then return table.move(sequence, first + 1, i, 1, {}) end
    end
  end
  return table.move(sequence, first + 1, #sequence, 1, {})
end

return M
