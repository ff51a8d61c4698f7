-- An engine with the interface of tycho.serve's that makes no tokens of its own: it gives what it was told to, so many
-- per step. fake.script(request) returns the list for a request; after it comes what ends it.
local Engine = {}
Engine.__index = Engine

local Request = {}
Request.__index = Request

function Request:cancel() self.cancelled = true end

function Engine:submit(tokens, options)
  if #tokens > 1000 then error("submit: tokens: the prompt can never fit", 2) end
  local request = setmetatable({ prompt = tokens, options = options, tokens = {}, at = 0 }, Request)
  request.script = self.script(request)
  self.running[#self.running + 1] = request
  self.submitted[#self.submitted + 1] = request
  return request
end

local function finish(request, reason)
  request.reason = reason
  request.options.on_end(request, reason)
end

function Engine:step()
  if self.broken then
    local text = self.broken
    self.broken = nil
    error(text, 0)
  end
  local left = {}
  for _, request in ipairs(self.running) do
    if request.cancelled then
      finish(request, "cancelled")
    elseif request.script.error then
      request.error = request.script.error
      finish(request, "failed")
    else
      for _ = 1, request.script.speed or 1 do
        request.at = request.at + 1
        local token = request.script[request.at]
        if request.reason or request.cancelled then break end
        if token == nil or token == self.eos and request.options.stop_tokens ~= false then
          finish(request, "stop")
        else
          request.tokens[#request.tokens + 1] = token
          request.options.on_token(request, token)
          if #request.tokens == request.options.count then finish(request, "length") end
        end
      end
      if not request.reason then left[#left + 1] = request end
    end
  end
  self.running = left
  return #left > 0
end

function Engine:usage()
  return { running = #self.running, waiting = self.waiting or 0, pages = 100, pages_used = #self.running }
end

local M = {}

function M.new(model, tokenizer, script)
  return setmetatable({ model = model, tokenizer = tokenizer, script = script, running = {}, submitted = {},
    eos = tokenizer:id "<|end|>" }, Engine)
end

return M
