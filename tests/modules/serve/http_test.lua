-- The server of models: the formats of OpenAI's API, streams, stop texts, errors, clients that leave. The engine is one
-- that says what it is told; the clients are processes.
local here = (arg and arg[0]:match ".*/") or "tests/modules/serve/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local hub, llm, serve = require "tycho.hub", require "tycho.llm", require "tycho.serve"
local text = require "tycho.serve.text"
local clients = dofile(here .. "../../lua/http_client.lua")
local fake = dofile(here .. "fake_engine.lua")
local encode, decode, null = ty.io.json_encode, ty.io.json_decode, ty.io.null

local tokenizer = ty.tokenizer.train(
  { "the quick brown fox jumps over the lazy dog, and then the fox sleeps. " },
  { vocabulary = 290, special = { "<|end|>", "<|user|>", "<|model|>" } })
local function tokens(words) return tokenizer:encode(words):tolist() end

-- ---- text as it comes ----

-- What comes of tokens, each piece checked; second whether a stop text ended it.
local function spoken(list, stops, prompt)
  local state, parts = text.new(tokenizer, prompt or {}, stops), {}
  for _, token in ipairs(list) do
    local new, stopped = state:put(token)
    check.ok(utf8.len(new), "whole characters")
    parts[#parts + 1] = new
    if stopped then return table.concat(parts), true end
  end
  local rest, stopped = state:finish()
  return table.concat(parts) .. rest, stopped
end

check.test("text is never half a character", function()
  for _, words in ipairs { "the fox 🦊 and 火 é", "🦊🦊🦊", "", "a\u{FFFD}b", "👩‍👩‍👧 x" } do
    check.equal(spoken(tokens(words)), words)
    check.equal(spoken(tokens(words), nil, tokens "the quick"), words)
  end
  local fox = tokens "🦊"
  check.ok(#fox == 4, "a token a byte")
  check.equal(spoken(table.move(fox, 1, 3, 1, {})), "\u{FFFD}", "half of one at the end")
  check.equal(spoken({ fox[3], fox[4], table.unpack(tokens "dog") }, nil, { fox[1], fox[2] }), "\u{FFFD}\u{FFFD}dog",
    "of a prompt that ends in half a character")
  local state, said = text.new(tokenizer, {}), 0
  for _ = 1, 1000 do said = said + #state:put(fox[2]) end
  check.ok(said >= 3 * 900, "bytes that are nothing do not pile up")
  local random = 1
  for _ = 1, 30 do
    local list = {}
    for i = 1, 40 do
      random = (random * 1103515245 + 12345) & 0x7fffffff
      list[i] = 3 + (random >> 8) % (tokenizer.size - 3)
    end
    check.equal(spoken(list), tokenizer:decode(list))
  end
end)

check.test("stop texts do not leak", function()
  local words = "the lazy fox sleeps. 🦊 the end"
  for _, stops in ipairs { { "fox" }, { "lazy fox sleeps.", "fox" }, { "zzz" }, { "the end" }, { "e end" }, { "🦊" },
    { " ", "the" }, { "the end of it" }, { "d" }, { "sl", "sleeps. 🦊 tha" } } do
    local first, over
    for _, stop in ipairs(stops) do
      local from, to = words:find(stop, 1, true)
      if from and (not first or to < over) then first, over = from, to end
    end
    local got, stopped = spoken(tokens(words), stops)
    check.equal({ got, stopped }, { first and words:sub(1, first - 1) or words, first ~= nil }, stops[1])
  end
end)

-- ---- the server ----

do
  local fine, problem = pcall(ty.core.http_core.listen, "127.0.0.1", 0)
  if fine then problem:close() end
  if not fine or not clients.works then
    print("skipped: " .. (fine and "there is no bash to ask a server" or tostring(problem)))
    check.finish()
    return
  end
end

local model = llm.Llama { vocab_size = 300, hidden_size = 8, intermediate_size = 8, num_hidden_layers = 1,
  num_attention_heads = 1, max_position_embeddings = 128, eos_token_id = 0 }:eval()
local template = "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
  .. "<|user|>{{ m.role }}:{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|model|>{% endif %}{{ tail }}"
local say = "the quick fox"
local engine = fake.new(model, tokenizer, function() return tokens(say) end)
local server = serve.http(engine, { port = 0, name = "tiny", chat = hub.chat.new(template), most_waiting = 4 })
local port = server.port

local function drive(...) return clients.drive(function() server:step(5) end, ...) end

local function post(path, value, headers)
  return clients.start(port, clients.request("POST", path, type(value) == "string" and value or encode(value), headers))
end

-- What POST answers: the status, and the value of its JSON.
local function ask(path, value, headers)
  local client = post(path, value, headers)
  check.ok(drive(client), path)
  local status, head, body = client:reply()
  check.ok(head:find("Content-Type: application/json", 1, true), head)
  return status, decode(body), head
end

-- The same of one that is to be answered.
local function answered(path, value)
  local status, reply = ask(path, value)
  check.equal(status, 200, path)
  return reply
end

-- The events of a stream, decoded, and whether it ended as streams do.
local function events(client)
  local status, head, body, complete = client:reply()
  check.equal(status, 200)
  check.ok(head:find("Content-Type: text/event-stream", 1, true), head)
  local list, done = {}, false
  for line in body:gmatch "([^\n]*)\n\n" do
    local data = line:match "^data: (.*)$"
    if data == "[DONE]" then done = true
    else list[#list + 1] = decode(data) end
  end
  return list, done and complete
end

check.test("what is served, and how it is", function()
  check.equal(server.address, "http://127.0.0.1:" .. port)
  local health, models = clients.start(port, clients.request("GET", "/health")),
    clients.start(port, clients.request("GET", "/v1/models"))
  local head = clients.start(port, clients.request("HEAD", "/health"))
  check.ok(drive(health, models, head))
  check.equal(decode((select(3, health:reply()))), { status = "ok" })
  local list = decode((select(3, models:reply())))
  check.equal({ list.object, #list.data, list.data[1].id, list.data[1].object, list.data[1].max_model_len },
    { "list", 1, "tiny", "model", 128 })
  check.equal({ (head:reply()), (select(3, head:reply())) }, { 200, "" })
end)

check.test("a text to go on from", function()
  local status, value = ask("/v1/completions", { model = "tiny", prompt = "the lazy", max_tokens = 50 })
  check.equal(status, 200)
  check.ok(value.id:find "^cmpl%-%x+$" and math.abs(value.created - os.time()) < 100)
  check.equal({ value.object, value.model }, { "text_completion", "tiny" })
  check.equal(value.choices, { { text = "the quick fox", index = 0, logprobs = null, finish_reason = "stop" } })
  local prompt, made = #tokens "the lazy", #tokens(say)
  check.equal(value.usage, { prompt_tokens = prompt, completion_tokens = made, total_tokens = prompt + made })
  local last = engine.submitted[#engine.submitted]
  check.equal(last.prompt, tokens "the lazy")
  check.equal({ last.options.count, last.options.temperature }, { 50, 1 })
  value = answered("/v1/completions", { prompt = tokens "dog", max_tokens = 2, temperature = 0, top_p = 0.5, top_k = 7,
    min_p = 0.1, repetition_penalty = 1.5, seed = 3 })
  check.equal({ value.choices[1].finish_reason, value.usage.completion_tokens, value.choices[1].text },
    { "length", 2, tokenizer:decode(table.move(tokens(say), 1, 2, 1, {})) })
  last = engine.submitted[#engine.submitted].options
  check.equal({ last.temperature, last.top_p, last.top_k, last.min_p, last.repetition_penalty, last.seed, last.count },
    { 0, 0.5, 7, 0.1, 1.5, 3, 2 })
  ask("/v1/completions", { prompt = "x" })
  check.equal(engine.submitted[#engine.submitted].options.count, 16, "as OpenAI has it")
  value = answered("/v1/completions", { prompt = { "the", "dog" }, n = 2, echo = true, seed = 5 })
  local seen = {}
  for i, choice in ipairs(value.choices) do seen[i] = choice.index .. choice.text end
  check.equal(seen, { "0thethe quick fox", "1thethe quick fox", "2dogthe quick fox", "3dogthe quick fox" })
  local seeds = {}
  for i = 0, 3 do seeds[i + 1] = engine.submitted[#engine.submitted - 3 + i].options.seed end
  check.equal(seeds, { 5, 6, 5, 6 })
  value = answered("/v1/completions", { prompt = { tokens "the", tokens "dog" }, stop = null, n = 1, logprobs = false,
    logit_bias = {}, presence_penalty = 0, user = "me" })
  check.equal(#value.choices, 2)
end)

check.test("what ends an answer", function()
  local value = answered("/v1/completions", { prompt = "x", stop = "qui", max_tokens = 60 })
  check.equal({ value.choices[1].text, value.choices[1].finish_reason }, { "the ", "stop" })
  local request = engine.submitted[#engine.submitted]
  server:step()
  check.ok(request.cancelled and #engine.running == 0, "the engine does no more for it")
  value = answered("/v1/completions", { prompt = "x", stop = { "zebra", "fox" }, max_tokens = 60 })
  check.equal({ value.choices[1].text, value.choices[1].finish_reason }, { "the quick ", "stop" })
  value = answered("/v1/completions", { prompt = "x", stop = "ox jumps", max_tokens = 60 })
  check.equal(value.choices[1].text, "the quick fox", "what was held back comes in the end")
  ask("/v1/completions", { prompt = "x", ignore_eos = true })
  check.equal(engine.submitted[#engine.submitted].options.stop_tokens, false)
  ask("/v1/completions", { prompt = "x", stop_token_ids = { 7, 8 } })
  check.equal(engine.submitted[#engine.submitted].options.stop_tokens, { 7, 8, 0 })
end)

check.test("a chat", function()
  local messages = { { role = "system", content = "be kind" }, { role = "user",
    content = { { type = "text", text = "one" }, { type = "text", text = "two" } } } }
  local status, value = ask("/v1/chat/completions", { model = "tiny", messages = messages, max_completion_tokens = 9,
    chat_template_kwargs = { tail = "!", messages = "mine" } })
  check.equal(status, 200)
  check.ok(value.id:find "^chatcmpl%-")
  check.equal(value.object, "chat.completion")
  check.equal(value.choices, { { index = 0, logprobs = null, finish_reason = "stop",
    message = { role = "assistant", content = "the quick fox", refusal = null } } })
  local last = engine.submitted[#engine.submitted]
  check.equal(tokenizer:decode(last.prompt, { skip_special = false }),
    "<|user|>system:be kind<|user|>user:one\ntwo<|model|>!")
  check.equal(last.options.count, 9)
  ask("/v1/chat/completions", { messages = messages })
  last = engine.submitted[#engine.submitted]
  check.equal(last.options.count, 128 - #last.prompt, "what the context leaves")
end)

check.test("streams", function()
  local client = post("/v1/completions", { prompt = "x", stream = true, max_tokens = 60,
    stream_options = { include_usage = true } })
  check.ok(drive(client))
  local list, done = events(client)
  check.ok(done)
  local words, finish, usage = "", nil, nil
  for i, chunk in ipairs(list) do
    check.equal({ chunk.object, chunk.id, chunk.model }, { "text_completion", list[1].id, "tiny" })
    if i < #list then
      check.equal(chunk.usage, null)
      words = words .. chunk.choices[1].text
      if chunk.choices[1].finish_reason ~= null then finish = chunk.choices[1].finish_reason end
    else
      check.equal(#chunk.choices, 0)
      usage = chunk.usage
    end
  end
  check.equal({ words, finish, usage and usage.completion_tokens }, { "the quick fox", "stop", #tokens(say) })
  check.ok(#list >= #tokens(say) + 2, "a piece for each token")
  say = "🦊 the quick fox 🦊 jumps"
  client = post("/v1/chat/completions", { messages = { { role = "user", content = "hi" } }, stream = true, n = 2,
    stop = "jum" })
  check.ok(drive(client))
  list, done = events(client)
  say = "the quick fox"
  check.ok(done)
  local said, roles, ends = { [0] = "", "" }, {}, {}
  for _, chunk in ipairs(list) do
    check.equal({ chunk.object, chunk.usage, #chunk.choices }, { "chat.completion.chunk", nil, 1 })
    local choice = chunk.choices[1]
    local delta = choice.delta
    if delta.role then roles[choice.index] = delta.role .. delta.content
    elseif choice.finish_reason ~= null then
      ends[choice.index] = choice.finish_reason
      check.equal(next(delta), nil)
    else
      said[choice.index] = said[choice.index] .. delta.content
      check.ok(utf8.len(delta.content) and delta.content ~= "")
    end
  end
  check.equal(said, { [0] = "🦊 the quick fox 🦊 ", "🦊 the quick fox 🦊 " })
  check.equal({ roles, ends }, { { [0] = "assistant", "assistant" }, { [0] = "stop", "stop" } })
end)

check.test("tokens of texts and back", function()
  local status, value = ask("/tokenize", { content = "the fox<|end|> é" })
  check.equal({ status, value.tokens }, { 200, tokens "the fox<|end|> é" })
  value = answered("/tokenize", { content = "a<|end|>", parse_special = false })
  check.equal(tokenizer:decode(value.tokens), "a<|end|>")
  check.equal((ask("/tokenize", { content = "the é", with_pieces = true })), 400)
  value = answered("/tokenize", { content = "" })
  check.equal(#value.tokens, 0)
  value = answered("/detokenize", { tokens = tokens "the fox<|end|>" })
  check.equal(value, { content = "the fox<|end|>" })
  check.equal((ask("/detokenize", { tokens = { 1 << 40 } })), 400)
  check.equal((ask("/detokenize", { tokens = "x" })), 400)
  check.equal((ask("/detokenize", {})), 400)
  check.equal((ask("/tokenize", {})), 400)
end)

check.test("requests that are wrong", function()
  local function refused(path, value, status, param, words, code)
    local got, reply = ask(path, value)
    local e = reply.error
    local label = type(value) == "string" and value or encode(value)
    check.equal({ got, e.param }, { status, param or null }, label)
    check.ok(e.message:find(words, 1, true), label .. ": " .. e.message)
    check.ok(type(e.type) == "string" and e.code ~= nil, label)
    if code then check.equal(e.code, code) end
  end
  local function text_of(more)
    local value = { prompt = "x" }
    for name, field in pairs(more) do value[name] = field end
    return value
  end
  local function wrong(field, value, words)
    refused("/v1/completions", text_of { [field] = value }, 400, field, words)
  end
  wrong("temperature", "hot", 'temperature: expected a finite number >= 0, got "hot"')
  wrong("temperature", -1, "got -1")
  wrong("temperature", { 1 }, "temperature: expected a finite number >= 0, got a list")
  wrong("tools", { { type = "function" } }, "got a list")
  wrong("top_p", 0, "top_p: expected a number in (0, 1], got 0")
  wrong("top_k", 1.5, "top_k: expected an integer >= -1, got 1.5")
  wrong("min_p", 2, "min_p: expected a number in [0, 1], got 2")
  wrong("n", 0, "n: expected an integer in [1, 16], got 0")
  wrong("n", 1000, "got 1000")
  wrong("seed", "x", "seed: expected an integer")
  wrong("max_tokens", 0, "max_tokens: expected an integer >= 1, got 0")
  wrong("max_tokens", 1000, "max_tokens: expected at most 127, since the prompt has 1 tokens and the model's context")
  wrong("stream", "yes", "stream: expected a boolean")
  wrong("stop", { 1 }, "stop: expected a string or a list of strings, got 1 as element 1")
  wrong("stop", "", "stop: text 1: expected 1 to 1024 bytes, got 0")
  wrong("stop", { x = 1 }, "got an object")
  wrong("stop_token_ids", { "a" }, "stop_token_ids: expected a list of integers")
  wrong("stream_options", { include_usage = true }, "stream_options: expected together with stream = true")
  wrong("logprobs", 3, "logprobs: expected none, which is not supported here, got 3")
  wrong("presence_penalty", 0.5, "presence_penalty: expected none")
  wrong("tools", { { type = "function" } }, "tools: expected none")
  wrong("response_format", { type = "json_object" }, "response_format: expected none")
  wrong("prompt", null, "expected a text, a list of texts, a list of tokens or a list of lists of tokens, got null")
  wrong("prompt", ty.io.array {}, "got an empty list")
  wrong("prompt", { "x", 1 }, "got 1 as element 1")
  wrong("prompt", { 1, "x" }, 'got "x" as element 1')
  wrong("prompt", { 1.5 }, "got 1.5 as element 0")
  wrong("prompt", { 1, 300 }, "prompt: expected tokens in [0, 300), got 300")
  wrong("prompt", { -1 }, "got -1")
  wrong("prompt", ("the "):rep(200), "prompt: expected at most the 127 tokens that the model's context of 128 leaves")
  wrong("prompt", ("the "):rep(100000), "the model's context, got a text of 400000 bytes")
  refused("/v1/completions", {}, 400, "prompt", "got nil")
  refused("/v1/completions", { prompt = "x", model = "gpt-5" }, 404, "model", 'model: expected "tiny", got "gpt-5"',
    "model_not_found")
  local many = {}
  for i = 1, 40 do many[i] = "x" end
  refused("/v1/completions", { prompt = many, n = 4 }, 400, "n", "at most 128 answers in all, got 4 to each of 40")
  local chats = "/v1/chat/completions"
  refused(chats, {}, 400, "messages", "messages: expected a list of at least one message, got nil")
  refused(chats, { messages = {} }, 400, "messages", "got an object")
  refused(chats, { messages = { 1 } }, 400, "messages[0]", "expected an object with role and content, got 1")
  refused(chats, { messages = { { content = "x" } } }, 400, "messages[0].role", "expected a string, got nil")
  refused(chats, { messages = { { role = "user", content = null } } }, 400, "messages[0].content",
    "messages[0].content: expected a string or a list of parts, got null")
  refused(chats, { messages = { { role = "user", content = { { type = "image_url" } } } } }, 400,
    "messages[0].content[0].type", 'expected "text", got "image_url"')
  refused(chats, { messages = { { role = "user", content = { { type = "text" } } } } }, 400,
    "messages[0].content[0].text", "expected a string, got nil")
  refused(chats, { messages = { { role = "bad", content = "x" } } }, 400, "messages", "no such role")
  for _, body in ipairs { "", "{", "[]", "[1]", "null", "1", '"x"', '{"prompt":"\255"}', ("["):rep(100000),
    '{"prompt":"x","prompt":"y"}' } do
    refused("/v1/completions", body, 400, nil, "expected an object of JSON as the body", "invalid_json")
  end
  refused("/nothing", {}, 404, nil, "there is nothing at \"/nothing\"; there are GET /health, GET /v1/models, POST")
  local status, value, head = ask("/health", {})
  check.equal({ status, value.error.message }, { 405, '/health takes GET, got "POST"' })
  check.ok(head:find("Allow: GET", 1, true))
  engine.waiting = 4
  refused("/v1/completions", { prompt = "x" }, 503, nil, "4 requests are waiting already")
  engine.waiting = nil
  local small = serve.http(engine, { port = 0, body = 1024 })
  local large = clients.start(small.port, clients.request("POST", "/v1/completions",
    encode { prompt = ("x"):rep(2000) }))
  local other = clients.start(small.port, clients.request("POST", chats,
    encode { messages = { { role = "user", content = "x" } } }))
  check.ok(clients.drive(function() small:step(5) end, large, other))
  check.equal({ (large:reply()), decode((select(3, large:reply()))).error.message },
    { 413, "expected a body of at most 1024 bytes, got more" })
  check.ok(decode((select(3, other:reply()))).error.message:find "model has no template of chats")
  small:close()
end)

check.test("what the engine refuses, and what fails", function()
  local context = server.api.context
  server.api.context = nil
  local status, value = ask("/v1/completions", { prompt = { ("the fox "):rep(1), ("the "):rep(2000) } })
  check.equal({ status, value.error.message }, { 400, "submit: tokens: the prompt can never fit" })
  server.api.context = context
  server:step()
  check.equal(#engine.running, 0, "the prompt that did fit is not answered either")
  local script = engine.script
  local submit, lines = engine.submit, {}
  server.say = function(_, line) lines[#lines + 1] = line end
  engine.submit = function(self, list, options)
    local request = submit(self, list, options)
    server.tokenizer_of_api, server.api.tokenizer = server.api.tokenizer, nil -- an error after the stream has begun
    return request
  end
  local cut = post("/v1/completions", { prompt = "x", stream = true, echo = true })
  check.ok(drive(cut))
  engine.submit, server.api.tokenizer, server.say = nil, server.tokenizer_of_api, nil
  check.equal(cut:reply(), nil)
  check.ok(lines[1]:find "attempt to index a nil value", lines[1])
  engine.script = function() return { error = "x.lua:3: no memory" } end
  status, value = ask("/v1/completions", { prompt = "x" })
  check.equal({ status, value.error.message, value.error.type }, { 500, "no memory", "server_error" })
  local client = post("/v1/completions", { prompt = "x", stream = true })
  check.ok(drive(client))
  local list, done = events(client)
  check.equal({ #list, list[1].error.message, done }, { 1, "no memory", true })
  engine.script = function() return { 10, 299, 1 << 20, 11 } end -- tokens that the tokenizer does not have
  status, value = ask("/v1/completions", { prompt = "x" })
  check.equal({ status, value.choices[1].text }, { 200, tokenizer:decode { 10, 11 } })
  engine.script = script
  client = post("/v1/completions", { prompt = "x", max_tokens = 100 })
  check.ok(drive(function() return #engine.running > 0 end))
  engine.broken = "the engine is broken"
  lines = {}
  server.say = function(_, line) lines[#lines + 1] = line end
  check.ok(drive(client))
  server.say = nil
  check.equal({ (client:reply()), lines }, { 500, { "the engine is broken" } })
  server:step()
  check.equal(#engine.running, 0)
  engine.broken = "the engine is broken"
  check.fails(function() server:step() end, "the engine is broken")
  check.equal((ask("/v1/completions", { prompt = "x" })), 200, "and on it goes")
end)

check.test("clients that leave", function()
  local script = engine.script
  engine.script = function(request)
    local list = {}
    for i = 1, 100 do list[i] = 10 + i % 20 end
    list.slow = request
    return list
  end
  local function leaving(value)
    local before = #engine.submitted
    value.prompt, value.max_tokens = "x", 100
    clients.start(port, clients.request("POST", "/v1/completions", encode(value)), { leave = 0.2 })
    check.ok(clients.drive(function()
      server:step()
      ty.system.sleep(0.01)
    end, function() return #engine.submitted > before end))
    local request = engine.submitted[#engine.submitted]
    check.ok(clients.drive(function()
      server:step()
      ty.system.sleep(0.01)
    end, function() return request.reason end))
    check.equal(request.reason, "cancelled")
    check.equal(next(server.api.calls), nil)
  end
  leaving { stream = true }
  leaving {}
  leaving { n = 3, stream = true }
  check.equal(#engine.running, 0)
  engine.script = script
end)

check.test("many at once", function()
  local list = {}
  for i = 1, 20 do
    list[i] = post(i % 2 == 0 and "/v1/completions" or "/v1/chat/completions", { prompt = "x", stream = i % 3 == 0,
      messages = { { role = "user", content = "x" } } })
  end
  check.ok(drive(table.unpack(list)))
  for i, client in ipairs(list) do
    local status, _, body, complete = client:reply()
    check.equal({ status, complete }, { 200, true }, i)
    check.ok(i % 3 == 0 and body:find "%[DONE%]" or i % 3 ~= 0 and body:find "the quick fox", i)
  end
  check.equal({ #engine.running, (next(server.api.calls)) }, { 0, nil })
end)

check.test("who may ask", function()
  local function status_of(to, headers, host)
    local client = clients.start(to.port, ("POST /tokenize HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n%s"):format(
      host or "localhost", headers or "") .. "Content-Length: 15\r\n\r\n{\"content\":\"x\"}")
    check.ok(clients.drive(function() to:step(5) end, client))
    return client:reply()
  end
  check.equal((status_of(server)), 200)
  check.equal((status_of(server, nil, "evil.example")), 403)
  check.equal((status_of(server, "Origin: http://evil.example\r\n")), 403)
  check.equal((status_of(server, "Origin: null\r\n")), 403)
  check.equal((status_of(server, "Origin: http://localhost\r\n")), 200)
  local open <close> = serve.http(engine, { port = 0, allow_origin = "http://page.example" })
  local status, head = status_of(open, "Origin: http://page.example\r\n")
  check.equal(status, 200)
  check.ok(head:find("Access-Control-Allow-Origin: http://page.example", 1, true), head)
  check.equal((status_of(open, "Origin: http://evil.example\r\n")), 403)
  local asked = clients.start(open.port, clients.request("OPTIONS", "/v1/completions", nil,
    "Origin: http://page.example\r\nAccess-Control-Request-Method: POST\r\n"))
  check.ok(clients.drive(function() open:step(5) end, asked))
  status, head = asked:reply()
  check.equal(status, 204)
  check.ok(head:find("Access-Control-Allow-Headers: Authorization, Content-Type", 1, true), head)
  local locked <close> = serve.http(engine, { port = 0, api_key = "secret" })
  status, head = status_of(locked)
  check.equal(status, 401)
  check.ok(head:find("WWW-Authenticate: Bearer", 1, true), head)
  check.equal((status_of(locked, "Authorization: Bearer secre\r\n")), 401)
  check.equal((status_of(locked, "Authorization: Bearer secret1\r\n")), 401)
  check.equal((status_of(locked, "Authorization: Bearer \r\n")), 401)
  check.equal((status_of(locked, "Authorization: secret\r\n")), 401)
  check.equal((status_of(locked, "Authorization: Bearer secret\r\n")), 200)
  local health = clients.start(locked.port, clients.request("GET", "/health"))
  check.ok(clients.drive(function() locked:step(5) end, health))
  check.equal((health:reply()), 200, "whether it runs is no secret")
end)

check.test("arguments, and the end", function()
  check.fails(function() serve.http() end, "serve.http: engine: expected a table, got nil")
  check.fails(function() serve.http {} end, "serve.http: engine.submit: expected a function, got nil")
  check.fails(function() serve.http(fake.new(model, tokenizer), { prot = 1 }) end, "no option 'prot'")
  check.fails(function() serve.http(engine, { port = 70000 }) end, "port: expected an integer in [0, 65535], got 70000")
  check.fails(function() serve.http(engine, { port = port }) end, ("serve.http: port %d of 127.0.0.1 is in use"):format(
    port))
  check.fails(function() serve.http(setmetatable({ tokenizer = false }, { __index = engine })) end, "tokenizer")
  local waiting = post("/v1/completions", { prompt = "x", max_tokens = 100 })
  check.ok(drive(function() return #engine.running > 0 end))
  server:close()
  server:close()
  check.ok(engine.running[1].cancelled)
  check.ok(clients.drive(function() ty.system.sleep(0.02) end, waiting))
end)

check.finish()
