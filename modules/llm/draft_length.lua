--- How many tokens a draft should propose at a time: as many as make the most tokens a second, by how often its tokens
-- held so far and by what a drafted token and a pass of the large model over so many cost, wherever either runs.
--
--     local length = llm.draft_length { draft = 2e-4, model = { 2e-3, 2.1e-3, 2.3e-3, 2.6e-3, 3e-3 } }
--     model:generate({ prompt }, 100, { temperature = 0, draft = draft, draft_tokens = length })
local arguments = require "tycho.arguments"

--- Chooses the number of tokens to draft.
---@class DraftLength
---@field held number[]     by place behind the known tokens: how often a token there held, when those before it did
---@field tried number[]    how often one was there
local DraftLength = {}
DraftLength.__index = DraftLength

--- The tokens that a round with `count` drafted ones gives, on average; shares: by place, how often one holds that is
-- behind such.
---@param shares number[]
---@param count integer
---@return number tokens
function DraftLength.expected(shares, count)
  local tokens, reached = 1.0, 1.0
  for i = 1, count do
    reached = reached * shares[i]
    tokens = tokens + reached
  end
  return tokens
end

--- The count with which there are the most tokens a second.
---@return integer
function DraftLength:choose()
  local shares, best, most = {}, 0, 0.0
  for i = 1, #self.model - 1 do shares[i] = self.held[i] / self.tried[i] end
  for count = 0, #self.model - 1 do
    local speed = self.expected(shares, count) / (count * self.draft + self.model[count + 1])
    if speed > most then best, most = count, speed end
  end
  return math.max(1, best)
end

--- A round drafted so many tokens, of which the first `held` held.
function DraftLength:see(drafted, held)
  for i = 1, math.min(drafted, held + 1) do
    self.tried[i] = self.decay * self.tried[i] + 1
    self.held[i] = self.decay * self.held[i] + (i <= held and 1 or 0)
  end
end

--- rates: draft (seconds of a drafted token), model (seconds of the large model's pass over 1, 2, ... tokens, of which
-- one is no drafted one, so that at most one fewer are drafted). options: first (0.7: how often tokens hold at first),
-- decay (0.98: what a round counts in the next).
---@param rates { draft: number, model: number[] }
---@param options? { first?: number, decay?: number }
---@return DraftLength
return function(rates, options)
  local who = "llm.draft_length"
  arguments.expect(who, "rates", rates, "a table")
  arguments.expect(who, "rates.draft", rates.draft, "a number >= 0")
  arguments.expect(who, "rates.model", rates.model, "a list of numbers")
  if #rates.model < 2 then arguments.fail("%s: rates.model: expected two at least, got %d", who, #rates.model) end
  local o = arguments.read(who, options, { first = 0.7, decay = 0.98 }, { first = "a number in [0, 1]",
    decay = "a number in [0, 1]" })
  local self = setmetatable({ draft = rates.draft, model = rates.model, decay = o.decay, held = {}, tried = {} },
    DraftLength)
  for i = 1, #rates.model - 1 do self.held[i], self.tried[i] = 4 * o.first, 4 end
  return self
end
