--- The fields of requests in the shape of OpenAI's API, and errors in its shape.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local null, array = ty.io.null, ty.io.array

local M = {}

-- ---- errors ----

local Refusal = {}

--- Raises what a request is answered with in place of what it asked for. param: the field that it is about, code: a
-- word for programs; nil where there is none.
---@param status integer
---@param param string?
---@param code string?
---@param text string  a format
function M.refuse(status, param, code, text, ...)
  if select("#", ...) > 0 then text = text:format(...) end
  error(setmetatable({ status = status, param = param, code = code, message = text }, Refusal), 0)
end

--- Whether a value that pcall caught is one of those.
function M.is_refusal(problem) return getmetatable(problem) == Refusal end

local types = { [401] = "authentication_error", [403] = "permission_error", [404] = "not_found_error",
  [429] = "rate_limit_error" }

--- An error in OpenAI's shape, as a table.
---@param status integer
---@param message string
---@param param? string
---@param code? string
---@return table
function M.error(status, message, param, code)
  if not utf8.len(message) then message = message:gsub("[\x80-\xff]", "?") end
  local kind = types[status] or status >= 500 and "server_error" or "invalid_request_error"
  return { error = { message = message, type = kind, param = param or null, code = code or null } }
end

--- An error's text without the place in a file that it begins with.
function M.plain(problem) return (tostring(problem):gsub("^[^\n]-%.lua:%d+: ", "")) end

-- ---- values ----

--- Whether a value is a list of JSON, perhaps empty.
function M.is_list(value) return type(value) == "table" and (#value > 0 or getmetatable(value) ~= nil) end

--- A value of JSON as errors show it.
function M.describe(value)
  if value == null then return "null" end
  if type(value) ~= "table" then return arguments.describe(value) end
  return M.is_list(value) and (#value == 0 and "an empty list" or "a list") or "an object"
end

--- The field of a request, checked: nil where it is absent or null. kind: as tycho.arguments has it.
function M.get(body, name, kind)
  local value = body[name]
  if value == nil or value == null then return nil end
  local fine, problem = pcall(arguments.expect, "request", name, value, kind)
  if not fine then
    problem = tostring(problem):match "request: (.*)$":gsub("got an? [%w ]*table$", "got " .. M.describe(value))
    M.refuse(400, name, "invalid_value", "%s", problem)
  end
  if kind:find "^an integer" then value = math.tointeger(value) end
  return value
end

local STOPS, STOP_BYTES = 16, 1024

local function stops(body)
  local given = M.get(body, "stop", "a string or a list of strings")
  local list = type(given) == "string" and { given } or given or {}
  if type(list) == "table" and next(list) ~= nil and #list == 0 then
    M.refuse(400, "stop", "invalid_value", "stop: expected a string or a list of strings, got an object")
  end
  if #list > STOPS then
    M.refuse(400, "stop", "invalid_value", "stop: expected at most %d texts, got %d", STOPS, #list)
  end
  for i, text in ipairs(list) do
    if text == "" or #text > STOP_BYTES then
      M.refuse(400, "stop", "invalid_value", "stop: text %d: expected 1 to %d bytes, got %d", i, STOP_BYTES, #text)
    end
  end
  return list
end

-- What would change the answer and is not done, by what of it changes nothing.
local function is_empty(value) return type(value) == "table" and next(value) == nil end
local function is_zero(value) return value == 0 end
local function is_false(value) return value == false end
local function is_blank(value) return value == "" end
local function is_one(value) return value == 1 end
local function is_text(value) return type(value) == "table" and value.type == "text" end
local undone = { logprobs = is_false, top_logprobs = is_zero, prompt_logprobs = is_false, best_of = is_one,
  logit_bias = is_empty, frequency_penalty = is_zero, presence_penalty = is_zero, suffix = is_blank, tools = is_empty,
  functions = is_empty, response_format = is_text, audio = is_false, prediction = is_false, use_beam_search = is_false,
  grammar = is_false, json_schema = is_false, guided_json = is_false, guided_regex = is_false,
  guided_choice = is_false, guided_grammar = is_false, structured_outputs = is_false }

--- What a request says of how to sample, checked: what engine:submit() takes, and with it stop (texts), n, stream,
-- include_usage, echo, ignore_eos.
---@param body table
---@return table options
function M.sampling(body)
  for name, is_nothing in pairs(undone) do
    local value = body[name]
    if value ~= nil and value ~= null and not is_nothing(value) then
      M.refuse(400, name, "unsupported_parameter", "%s: expected none, which is not supported here, got %s", name,
        M.describe(value))
    end
  end
  local get = function(name, kind) return M.get(body, name, kind) end
  local o = { temperature = get("temperature", "a finite number >= 0"), top_p = get("top_p", "a number in (0, 1]"),
    top_k = get("top_k", "an integer >= -1"), min_p = get("min_p", "a number in [0, 1]"),
    repetition_penalty = get("repetition_penalty", "a finite number > 0")
      or get("repeat_penalty", "a finite number > 0"),
    seed = get("seed", "an integer"), n = get("n", "an integer in [1, 16]") or 1, stop = stops(body),
    stop_tokens = get("stop_token_ids", "a list of integers"), stream = get("stream", "a boolean") or false,
    echo = get("echo", "a boolean") or false, ignore_eos = get("ignore_eos", "a boolean") or false,
    count = get("max_completion_tokens", "an integer >= 1") or get("max_tokens", "an integer >= 1") }
  o.temperature = o.temperature or 1
  if o.top_k == -1 then o.top_k = 0 end
  local stream_options = get("stream_options", "a table")
  if stream_options then
    if not o.stream then
      M.refuse(400, "stream_options", "invalid_value",
        "stream_options: expected together with stream = true, got stream = false")
    end
    o.include_usage = M.get(stream_options, "include_usage", "a boolean") or false
  end
  return o
end

--- The messages of a chat: a list of { role, content }, parts of a content that is a list joined by line ends.
---@param body table
---@return table[] messages
function M.messages(body)
  local list = body.messages
  if not M.is_list(list) or #list == 0 then
    M.refuse(400, "messages", "invalid_value", "messages: expected a list of at least one message, got %s",
      M.describe(list))
  end
  local messages = {}
  for i, message in ipairs(list) do
    local at = ("messages[%d]"):format(i - 1)
    local function refuse(where, wanted, value)
      M.refuse(400, at .. where, "invalid_value", "%s%s: expected %s, got %s", at, where, wanted,
        M.describe(value))
    end
    if type(message) ~= "table" then refuse("", "an object with role and content", message) end
    if type(message.role) ~= "string" then refuse(".role", "a string", message.role) end
    local content = message.content
    if M.is_list(content) then
      local parts = {}
      for k, part in ipairs(content) do
        local where = (".content[%d]"):format(k - 1)
        if type(part) ~= "table" then refuse(where, "an object", part) end
        if part.type ~= "text" then refuse(where .. ".type", '"text"', part.type) end
        if type(part.text) ~= "string" then refuse(where .. ".text", "a string", part.text) end
        parts[k] = part.text
      end
      content = table.concat(parts, "\n")
    end
    if type(content) ~= "string" then refuse(".content", "a string or a list of parts", content) end
    local name = message.name
    messages[i] = { role = message.role, content = content, name = type(name) == "string" and name or nil }
  end
  return messages
end

local forms = "a text, a list of texts, a list of tokens or a list of lists of tokens"

--- The prompts of a request: a list of texts and lists of tokens.
---@param body table
---@return (string|integer[])[] prompts
function M.prompts(body)
  local prompt = body.prompt
  if type(prompt) == "string" then return { prompt } end
  local function refuse(got) M.refuse(400, "prompt", "invalid_value", "prompt: expected %s, got %s", forms, got) end
  if not M.is_list(prompt) or #prompt == 0 then
    refuse(M.describe(prompt))
  end
  local function all(list, kind)
    for i, value in ipairs(list) do
      if kind == "token" and not math.tointeger(value) or kind ~= "token" and type(value) ~= kind then
        refuse(("%s as element %d"):format(M.describe(value), i - 1))
      end
    end
  end
  local first = prompt[1]
  if math.type(first) then
    all(prompt, "token")
    return { prompt }
  end
  if type(first) == "string" then
    all(prompt, "string")
    return prompt
  end
  all(prompt, "table")
  for _, one in ipairs(prompt) do all(one, "token") end
  return prompt
end

M.array, M.null = array, null

return M
