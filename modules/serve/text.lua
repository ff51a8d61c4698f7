--- The text of an answer as its tokens come: never half a character, and nothing of a text that ends it.
local M = {}

-- Tokens of the prompt that the first ones of the answer are decoded behind; tokens without a text after which no more
-- of the character is waited for.
local BEFORE, SILENT = 8, 64

local Text = {}
Text.__index = Text

--- The text of an answer. prompt: the tokens before it, since some decoders do something of their own where a text
-- begins. stops: texts that end it.
---@param tokenizer Tokenizer
---@param prompt integer[]
---@param stops? string[]
function M.new(tokenizer, prompt, stops)
  local self = setmetatable({ stream = tokenizer:stream(), stops = stops or {}, held = "", silent = 0 }, Text)
  local before = table.move(prompt, math.max(1, #prompt - BEFORE + 1), #prompt, 1, {})
  -- Where the prompt ends within a character, the answer begins a text of its own.
  if #before > 0 and self.stream:put(before) ~= tokenizer:decode(before) then self.stream = tokenizer:stream() end
  return self
end

-- What may be said of what was held back and what came, and whether a stop text came to an end in it. What could yet
-- become one is held back, unless it is the last.
local function pass(self, new, last)
  local text, first, over = self.held .. new, nil, nil
  for _, stop in ipairs(self.stops) do -- the one that is over first, however the text comes in pieces
    local from, to = text:find(stop, 1, true)
    if from and (not first or to < over or to == over and from < first) then first, over = from, to end
  end
  if first then
    self.held = ""
    return text:sub(1, first - 1), true
  end
  local kept = 0
  for _, stop in ipairs(last and {} or self.stops) do
    for n = math.min(#stop - 1, #text), kept + 1, -1 do
      if text:sub(-n) == stop:sub(1, n) then
        kept = n
        break
      end
    end
  end
  self.held = text:sub(#text - kept + 1)
  return text:sub(1, #text - kept), false
end

--- What the next token adds, perhaps nothing, and whether the answer ends there, before a stop text.
---@param token integer
---@return string text
---@return boolean stopped
function Text:put(token)
  local new = self.stream:put { token }
  self.silent = new == "" and self.silent + 1 or 0
  if self.silent == SILENT then new, self.silent = self.stream:finish(), 0 end
  return pass(self, new, false)
end

--- What is left when no token comes any more, and whether there was a stop text in it.
---@return string text
---@return boolean stopped
function Text:finish() return pass(self, self.stream:finish(), true) end

return M
