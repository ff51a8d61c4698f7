--- What a server of a model answers, in the formats of OpenAI's API: texts to go on from and chats, whole or as a
-- stream, and what llama.cpp's server has beside them. modules/serve/http.lua calls it and drives the engine; what is
-- asked is read by modules/serve/fields.lua.
--
--   GET /health, /v1/models     POST /v1/completions, /v1/chat/completions, /tokenize, /detokenize
local ty = require "tycho"
local arguments = require "tycho.arguments"
local fields = require "tycho.serve.fields"
local text = require "tycho.serve.text"

local encode, null, array = ty.io.json_encode, fields.null, fields.array

local M = {}

local Api = {}
Api.__index = Api

-- Prompts times answers to each in one request at most; tokens of an answer that says nothing of them: 16 as OpenAI has
-- it for texts, of chats what the server's option says.
local MOST_CHOICES, FEW = 128, 16

--- What a server of an engine answers. options: those of serve.http.
function M.new(engine, options)
  local self = setmetatable({ engine = engine, tokenizer = engine.tokenizer, options = options, calls = {}, ending = {},
    created = math.floor(ty.system.time()), context = options.context or engine.model.context }, Api)
  self.json_headers = { ["Content-Type"] = "application/json" }
  self.stream_headers = { ["Content-Type"] = "text/event-stream; charset=utf-8", ["Cache-Control"] = "no-cache",
    ["X-Accel-Buffering"] = "no" } -- the last one tells nginx not to collect what it passes on
  if options.allow_origin then
    for _, headers in ipairs { self.json_headers, self.stream_headers } do
      headers["Access-Control-Allow-Origin"], headers.Vary = options.allow_origin, "Origin"
    end
  end
  return self
end

local function id(prefix)
  return ("%s-%016x%016x"):format(prefix, math.random(0), math.random(0))
end

-- The set of tokens that end a text by the model's files.
local function ends(self)
  if not self.ends then self.ends = require("tycho.llm.generate").ends(self.engine.model) end
  return self.ends
end

-- ---- the answer to a request ----

-- The parts in which texts and chats differ.
local completion = { prefix = "cmpl", object = "text_completion", chunk_object = "text_completion" }

function completion.whole(choice) return { text = table.concat(choice.parts) } end

function completion.piece(_, new) return { text = new } end

local chat = { prefix = "chatcmpl", object = "chat.completion", chunk_object = "chat.completion.chunk", begins = true }

function chat.whole(choice)
  return { message = { role = "assistant", content = table.concat(choice.parts), refusal = null } }
end

function chat.piece(first, new)
  return { delta = first and { role = "assistant", content = "" } or { content = new } }
end

local function usage(call)
  local count = 0
  for _, choice in ipairs(call.choices) do count = count + choice.count end
  return { prompt_tokens = call.prompt_tokens, completion_tokens = count, total_tokens = call.prompt_tokens + count }
end

local function event(call, value) return call.answer:write(("data: %s\n\n"):format(encode(value))) end

local function chunk(call, choices, counts)
  return event(call, { id = call.id, object = call.kind.chunk_object, created = call.created, model = call.model,
    choices = array(choices), usage = call.include_usage and (counts or null) or nil })
end

local function with_index(value, choice, reason)
  value.index, value.logprobs, value.finish_reason = choice.index, null, reason or null
  return value
end

-- A piece of a stream; with a reason the last one of its choice.
local function say(call, choice, new, reason)
  if not call.stream then
    if new ~= "" then choice.parts[#choice.parts + 1] = new end
    return
  end
  if new ~= "" then chunk(call, { with_index(call.kind.piece(false, new), choice) }) end
  if reason then
    local last = call.kind.piece(false, "")
    if last.delta then last.delta = {} end
    chunk(call, { with_index(last, choice, reason) })
  end
end

local function over(self, call, status)
  self.calls[call] = nil
  if self.options.log then
    local counts = usage(call)
    self.options.log(("POST %s %d, %d + %d tokens in %.2f s"):format(call.path, status, counts.prompt_tokens,
      counts.completion_tokens, ty.system.clock() - call.began))
  end
end

local function close(self, call)
  if call.stream then
    if call.include_usage then chunk(call, {}, usage(call)) end
    call.answer:write "data: [DONE]\n\n"
    call.answer:close()
  else
    local choices = {}
    for i, choice in ipairs(call.choices) do choices[i] = with_index(call.kind.whole(choice), choice, choice.reason) end
    call.answer:finish(200, self.json_headers, encode { id = call.id, object = call.kind.object, created = call.created,
      model = call.model, choices = array(choices), usage = usage(call) })
  end
  over(self, call, 200)
end

-- The requests of a call are cancelled before the next step: the engine may be in the middle of one.
local function cancel(self, call)
  for _, choice in ipairs(call.choices) do
    if not choice.reason then
      choice.reason = "cancelled"
      if choice.request then self.ending[#self.ending + 1] = choice.request end
    end
  end
end

local function fail(self, call, status, message)
  cancel(self, call)
  local value = fields.error(status, message)
  if call.answer.gone then
    status = 499
  elseif call.stream and call.opened then
    event(call, value)
    call.answer:write "data: [DONE]\n\n"
    call.answer:close()
  else
    call.answer:finish(status, self.json_headers, encode(value))
  end
  over(self, call, status)
end

local function finish(self, call, choice, new, reason)
  choice.reason = reason
  say(call, choice, new, reason)
  call.left = call.left - 1
  if call.left == 0 then close(self, call) end
end

-- What the engine tells of a choice.
local function on_token(self, call, choice, request, token)
  if choice.reason then return end
  choice.count = choice.count + 1
  if not choice.ignore_eos and ends(self)[token] or choice.stop_set[token] then return end
  if not self.tokenizer:token(token) then return end -- models may have more tokens than their tokenizer
  local new, stopped = choice.text:put(token)
  if stopped then
    self.ending[#self.ending + 1] = request
    finish(self, call, choice, new, "stop")
  else
    say(call, choice, new)
  end
end

local function on_end(self, call, choice, request, reason)
  if choice.reason then return end
  if reason == "failed" then return fail(self, call, 500, fields.plain(request.error)) end
  if reason ~= "stop" and reason ~= "length" then
    return fail(self, call, 503, "the answer was " .. tostring(reason))
  end
  local new, stopped = choice.text:finish()
  finish(self, call, choice, new, stopped and "stop" or reason)
end

-- ---- from a request to the engine ----

-- Raises where a text cannot fit the context, however well its tokens hold it: the tokens of megabytes take seconds, in
-- which nobody else is answered.
local function check_length(self, words, at)
  if not self.context or #words <= self.context then return end
  if not self.longest then
    self.longest = 1
    for token = 0, self.tokenizer.size - 1 do
      self.longest = math.max(self.longest, #(self.tokenizer:token(token) or ""))
    end
  end
  if #words > self.context * self.longest then
    fields.refuse(400, at, "context_length_exceeded",
      "%s: expected at most the %d tokens of the model's context, got a text of %d bytes", at, self.context, #words)
  end
end

-- How many tokens may follow a prompt: what is asked for, or what there is room for.
local function room_for(self, prompt, asked, otherwise, at)
  local room = self.context and self.context - #prompt or math.huge
  if room < 1 then
    fields.refuse(400, at, "context_length_exceeded",
      "%s: expected at most the %d tokens that the model's context of %d leaves room for, got %d", at, self.context - 1,
      self.context, #prompt)
  end
  if asked and asked > room then
    fields.refuse(400, "max_tokens", "context_length_exceeded",
      "max_tokens: expected at most %d, since the prompt has %d tokens and the model's context %d, got %d", room,
      #prompt, self.context, asked)
  end
  return asked or math.min(otherwise, room)
end

local function named(self, body)
  local name = fields.get(body, "model", "a string")
  if name and name ~= self.options.name then
    fields.refuse(404, "model", "model_not_found", "model: expected %s, got %s",
      arguments.describe(self.options.name), arguments.describe(name))
  end
  return self.options.name
end

local function submit(self, call, choice, prompt, o, k)
  local seed = o.seed and o.seed + k or math.random(0)
  choice.request = self.engine:submit(prompt, { count = choice.most, temperature = o.temperature, top_k = o.top_k,
    top_p = o.top_p, min_p = o.min_p, repetition_penalty = o.repetition_penalty, seed = seed & 0x7fffffff,
    stop_tokens = choice.stop_tokens,
    on_token = function(request, token) on_token(self, call, choice, request, token) end,
    on_end = function(request, reason) on_end(self, call, choice, request, reason) end })
end

-- Begins the answers to prompts, lists of tokens. kind: completion or chat. later: makes the answer of HTTP.
local function begin(self, kind, body, prompts, o, otherwise, later, path)
  local waiting = self.engine:usage().waiting
  if waiting >= self.options.most_waiting then
    fields.refuse(503, nil, "overloaded", "%d requests are waiting already; try again later", waiting)
  end
  if #prompts * o.n > MOST_CHOICES then
    fields.refuse(400, "n", "invalid_value", "n: expected at most %d answers in all, got %d to each of %d prompts",
      MOST_CHOICES, o.n, #prompts)
  end
  local stop_tokens, stop_set = o.stop_tokens, {}
  for _, token in ipairs(stop_tokens or {}) do stop_set[token] = true end
  if o.ignore_eos then
    stop_tokens = stop_tokens or false
  elseif stop_tokens then
    stop_tokens = { table.unpack(stop_tokens) }
    for token in pairs(ends(self)) do stop_tokens[#stop_tokens + 1] = token end
  end
  local call = { kind = kind, id = id(kind.prefix), created = math.floor(ty.system.time()), path = path,
    model = self.options.name, stream = o.stream, include_usage = o.include_usage, choices = {}, prompt_tokens = 0,
    began = ty.system.clock() }
  for i, prompt in ipairs(prompts) do
    local most = room_for(self, prompt, o.count, otherwise, kind == chat and "messages" or "prompt")
    call.prompt_tokens = call.prompt_tokens + #prompt
    for k = 1, o.n do
      call.choices[#call.choices + 1] = { index = (i - 1) * o.n + k - 1, prompt = i, parts = {}, count = 0, most = most,
        text = text.new(self.tokenizer, prompt, o.stop), stop_set = stop_set, stop_tokens = stop_tokens,
        ignore_eos = o.ignore_eos }
    end
  end
  call.left = #call.choices
  call.answer = later()
  for _, choice in ipairs(call.choices) do
    local fine, problem = pcall(submit, self, call, choice, prompts[choice.prompt], o, choice.index % o.n)
    if not fine then
      cancel(self, call)
      if arguments.interrupted(problem) then error(problem, 0) end
      fields.refuse(400, nil, nil, "%s", fields.plain(problem))
    end
  end
  self.calls[call] = true
  if call.stream then
    call.opened = call.answer:stream(200, self.stream_headers)
    for _, choice in ipairs(kind.begins and call.choices or {}) do
      chunk(call, { with_index(kind.piece(true), choice) })
    end
  end
  if o.echo then
    for _, choice in ipairs(call.choices) do say(call, choice, self.tokenizer:decode(prompts[choice.prompt])) end
  end
end

-- Tokens of a prompt: of a text by the tokenizer, with what it puts around texts.
local function tokens_of(self, prompt)
  if type(prompt) == "string" then
    check_length(self, prompt, "prompt")
    local list = self.tokenizer:encode(prompt):tolist()
    local fallback = ty.tokenizer.fields(self.tokenizer)
    if #list == 0 then list[1] = fallback.bos or fallback.eos end
    if #list > 0 then return list end
  end
  if #prompt == 0 then
    fields.refuse(400, "prompt", "invalid_value", "prompt: expected at least one token, got none")
  end
  local size = self.engine.model.config and self.engine.model.config.vocab_size or self.tokenizer.size
  local list = {}
  for i, token in ipairs(prompt) do
    if token < 0 or token >= size then
      fields.refuse(400, "prompt", "invalid_value", "prompt: expected tokens in [0, %d), got %d", size,
        math.tointeger(token))
    end
    list[i] = math.tointeger(token)
  end
  return list
end

function Api:completions(body, later, path)
  named(self, body)
  local o, prompts = fields.sampling(body), fields.prompts(body)
  for i, prompt in ipairs(prompts) do prompts[i] = tokens_of(self, prompt) end
  begin(self, completion, body, prompts, o, FEW, later, path)
end

function Api:chats(body, later, path)
  named(self, body)
  local o, messages = fields.sampling(body), fields.messages(body)
  if not self.options.chat then
    fields.refuse(400, "messages", "no_chat_template",
      "messages: %s has no template of chats; /v1/completions goes on from texts", self.options.name)
  end
  local with = {}
  for key, value in pairs(fields.get(body, "chat_template_kwargs", "a table") or {}) do with[key] = value end
  with.messages, with.add_generation_prompt = nil, fields.get(body, "add_generation_prompt", "a boolean")
  local fine, rendered = pcall(self.options.chat.render, self.options.chat, messages, with)
  if not fine then
    if arguments.interrupted(rendered) then error(rendered, 0) end
    fields.refuse(400, "messages", "invalid_value", "messages: %s", fields.plain(rendered))
  end
  check_length(self, rendered, "messages")
  -- As transformers and vLLM have it, the template says all: the tokenizer adds nothing around its text.
  local prompt = self.tokenizer:encode(rendered, { special = false }):tolist()
  if #prompt == 0 then fields.refuse(400, "messages", "invalid_value", "messages: expected some text, got none") end
  begin(self, chat, body, { prompt }, o, self.options.max_tokens, later, path)
end

-- ---- the rest ----

function Api:health() return { status = "ok" } end

function Api:models()
  return { object = "list", data = array { { id = self.options.name, object = "model", created = self.created,
    owned_by = "tycho", max_model_len = self.context or null } } }
end

function Api:tokenize(body)
  local content = fields.get(body, "content", "a string") or fields.get(body, "prompt", "a string")
  if not content then fields.refuse(400, "content", "invalid_value", "content: expected a string, got nil") end
  local special = fields.get(body, "add_special", "a boolean") or false
  local plain = fields.get(body, "parse_special", "a boolean") == false
  if fields.get(body, "with_pieces", "a boolean") then
    fields.refuse(400, "with_pieces", "unsupported_parameter", "with_pieces: expected false, got true")
  end
  return { tokens = array(self.tokenizer:encode(content, { special = special, plain = plain }):tolist()) }
end

function Api:detokenize(body)
  local tokens = fields.get(body, "tokens", "a list of integers")
  if not tokens then fields.refuse(400, "tokens", "invalid_value", "tokens: expected a list of integers, got nil") end
  local fine, content = pcall(self.tokenizer.decode, self.tokenizer, tokens, { skip_special = false })
  if not fine then fields.refuse(400, "tokens", "invalid_value", "tokens: %s", fields.plain(content)) end
  return { content = content }
end

--- What is asked, by path: the method, the function of it, and whether its answer comes later.
M.routes = {
  ["/health"] = { "GET", "health" },
  ["/v1/models"] = { "GET", "models" },
  ["/v1/completions"] = { "POST", "completions" },
  ["/v1/chat/completions"] = { "POST", "chats" },
  ["/tokenize"] = { "POST", "tokenize" },
  ["/detokenize"] = { "POST", "detokenize" },
}

--- After a step: cancels what ended before the engine ended it, and what nobody waits for any more.
function Api:settle()
  for call in pairs(self.calls) do
    if call.answer.gone then
      cancel(self, call)
      over(self, call, 499)
    end
  end
  local list = self.ending
  self.ending = {}
  for _, request in ipairs(list) do request:cancel() end
end

--- Ends all calls with an error.
function Api:fail(status, message)
  for call in pairs(self.calls) do fail(self, call, status, message) end
  self:settle()
end

return M
