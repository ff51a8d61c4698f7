--- A server of HTTP for a language model: requests in the formats of OpenAI's API, which an engine answers together.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local fields = require "tycho.serve.fields"
local is_host = require "tycho.watch.hosts"
local openai = require "tycho.serve.openai"

local http, encode = ty.core.http_core, ty.io.json_encode

--- A server of a model; serve.http makes one.
---@class HttpServer
---@field host string
---@field port integer
---@field address string  "http://127.0.0.1:8000"
local HttpServer = {}
HttpServer.__index = HttpServer

local loopback = { ["127.0.0.1"] = true, ["localhost"] = true, ["::1"] = true }

-- Whether two texts are the same, in a time that does not tell where they differ.
local function same(a, b)
  local different = #a ~ #b
  for i = 1, #b do different = different | ((a:byte(i) or 0) ~ b:byte(i)) end
  return different == 0
end

-- Pages of other origins are not to use what a browser on this machine can reach.
local function guard(self, method, path, host, headers)
  local o, origin = self.options, headers.origin
  if loopback[o.host] and not o.api_key and not is_host(host, o.host) then
    fields.refuse(403, nil, nil, "this is not the host that is served here")
  end
  if origin and o.allow_origin ~= "*" and origin ~= o.allow_origin and origin:match "^%w+://(.*)$" ~= host then
    fields.refuse(403, nil, nil, "requests of %s are not allowed; the option allow_origin allows an origin, * all",
      arguments.describe(origin))
  end
  if o.api_key and path ~= "/health" and method ~= "OPTIONS"
    and not same((headers.authorization or ""):match "^[Bb]earer +(.-) *$" or "", o.api_key) then
    fields.refuse(401, nil, "invalid_api_key", "expected the server's key as Authorization: Bearer KEY, got %s",
      headers.authorization and "another" or "none")
  end
end

local function route_of(method, path)
  local route = openai.routes[path]
  if not route then
    local known = {}
    for name, entry in pairs(openai.routes) do known[#known + 1] = entry[1] .. " " .. name end
    table.sort(known)
    fields.refuse(404, nil, nil, "there is nothing at %s; there are %s", arguments.describe(path),
      table.concat(known, ", "))
  end
  if method ~= route[1] and not (method == "HEAD" and route[1] == "GET") then
    fields.refuse(405, nil, nil, "%s takes %s, got %s", path, route[1], arguments.describe(method))
  end
  return route
end

-- A request's body, an object of JSON.
local function read(self, body, problem)
  if problem == "too large" then
    fields.refuse(413, nil, "request_too_large", "expected a body of at most %d bytes, got more", self.options.body)
  elseif problem then
    fields.refuse(503, nil, "overloaded", "there is no room for more requests at the moment; try again later")
  end
  local fine, value = pcall(ty.io.json_decode, body, { values = 1 << 20 })
  if not fine then
    fields.refuse(400, nil, "invalid_json", "expected an object of JSON as the body; %s",
      (fields.plain(value):gsub('^"JSON": ', "")))
  end
  if type(value) ~= "table" or fields.is_list(value) then
    fields.refuse(400, nil, "invalid_json", "expected an object of JSON as the body, got %s", fields.describe(value))
  end
  return value
end


-- Of one request: the answer that comes later, or status, headers and body.
local function handle(self, method, path, _, host, headers, body, problem)
  local answer
  local function later()
    answer = self.server:answer()
    return answer
  end
  local fine, value = pcall(function()
    guard(self, method, path, host, headers)
    if method == "OPTIONS" then return nil end
    local route = route_of(method, path)
    return self.api[route[2]](self.api, route[1] == "POST" and read(self, body, problem) or nil, later, path)
  end)
  if fine and answer then return answer end
  local status, reply = 200, {}
  for name, header in pairs(self.api.json_headers) do reply[name] = header end
  if method == "OPTIONS" then -- asked by browsers before pages of other origins may ask
    status, reply["Access-Control-Allow-Methods"] = 204, "GET, POST, OPTIONS"
    reply["Access-Control-Allow-Headers"], reply["Access-Control-Max-Age"] = "Authorization, Content-Type", "600"
  end
  if not fine then
    if not fields.is_refusal(value) then
      if arguments.interrupted(value) then error(value, 0) end
      self:say(("%s %s: %s"):format(method, path, tostring(value)))
      value = { status = 500, message = "this could not be answered; the server's log says why" }
    end
    status = value.status
    if status == 405 then reply.Allow = openai.routes[path][1] end
    if status == 401 then reply["WWW-Authenticate"] = "Bearer" end
    if status == 503 then reply["Retry-After"] = "1" end
    value = fields.error(status, value.message, value.param, value.code)
  end
  if self.options.log then self.options.log(("%s %s %d"):format(method, path, status)) end
  if answer then
    if not pcall(answer.finish, answer, status, reply, encode(value)) then answer:drop() end -- a stream had begun
    return answer
  end
  return status, reply, value and encode(value) or ""
end

--- A line for whoever runs the server.
function HttpServer:say(line) io.stderr:write("serve: ", line, "\n") end

--- One step of the engine, and what clients want meanwhile. wait: milliseconds (100) after which it returns when there
-- is nothing to do. An error of the engine ends the requests that are under way; with none it is raised.
---@param wait? number
function HttpServer:step(wait)
  arguments.expect("HttpServer:step", "wait", wait, "a number in [0, 100] or nil")
  local fine, more = pcall(self.engine.step, self.engine)
  if not fine then
    if arguments.interrupted(more) or next(self.api.calls) == nil then error(more, 0) end
    self:say(tostring(more))
    self.api:fail(500, "the engine failed; the server's log says why")
  end
  self.api:settle()
  self.server:poll(self.handler, more and 0 or wait or 100)
end

--- Serves until an error or Ctrl-C, which is raised.
function HttpServer:run()
  while true do self:step() end
end

--- Ends all answers and the server.
function HttpServer:close()
  if self.closed then return end
  self.closed = true
  pcall(self.api.fail, self.api, 503, "the server ends")
  self.server:close()
end

HttpServer.__close = HttpServer.close

local kinds = { port = "an integer in [0, 65535]", max_tokens = "an integer > 0", context = "an integer > 1 or nil",
  most_waiting = "an integer > 0", connections = "an integer in [1, 65536]", body = "an integer in [1024, 1073741824]",
  api_key = "a string", allow_origin = "a string", log = "a function", chat = "a table" }

--- A server of an engine's model at an address, in the formats of OpenAI's API: GET /health and /v1/models, POST
-- /v1/completions, /v1/chat/completions (both also as streams), /tokenize and /detokenize. It answers while its run()
-- or step() is called. options: host ("127.0.0.1": this machine alone), port (8000; 0: any that is free), name (of the
-- model, "model"), chat (the template of chats, as hub.chat has it; none: no chats), max_tokens (of an answer in a chat
-- that says nothing of them, 1024), context (tokens of prompt and answer at most; by default the model's), api_key
-- (requests have to have it), allow_origin (an origin whose pages may ask, "*": all), most_waiting (requests, 256),
-- connections (256), body (bytes of a request, 8 MiB), log (called with a line for each request). Raises where it
-- cannot listen.
--
--     local server <close> = serve.http(engine, { port = 8000, name = "kjv-lm" })
--     print(server.address)
--     server:run()
---@param engine table  of serve.engine: submit(), step(), usage(), model, tokenizer
---@param options? table
---@return HttpServer
local function new(engine, options)
  local who = "serve.http"
  arguments.expect(who, "engine", engine, "a table")
  for _, name in ipairs { "submit", "step", "usage" } do
    arguments.expect(who, "engine." .. name, engine[name], "a function")
  end
  if not engine.tokenizer then
    arguments.fail("%s: engine.tokenizer: expected a tokenizer, which texts go through, got %s", who,
      arguments.describe(engine.tokenizer))
  end
  local o = arguments.read(who, options, { host = "127.0.0.1", port = 8000, name = "model", chat = arguments.none,
    max_tokens = 1024, context = arguments.none, api_key = arguments.none, allow_origin = arguments.none,
    most_waiting = 256, connections = 256, body = 8 << 20, log = arguments.none }, kinds)
  local self = setmetatable({ engine = engine, options = o, host = o.host, api = openai.new(engine, o) }, HttpServer)
  local fine, server, port = pcall(http.listen, o.host, o.port, { name = who, body = o.body,
    connections = o.connections })
  if not fine then arguments.raise(server) end
  self.server, self.port = server, port
  local shown = (o.host == "0.0.0.0" or o.host == "::") and "localhost" or o.host
  if shown:find(":", 1, true) then shown = "[" .. shown .. "]" end
  self.address = ("http://%s:%d"):format(shown, port)
  self.handler = function(...) return handle(self, ...) end
  return self
end

return { new = new }
