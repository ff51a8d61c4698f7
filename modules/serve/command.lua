--- `tycho serve`: a language model behind the API that clients of OpenAI, vLLM and llama.cpp speak.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local M = {}

local usage = [[
usage: tycho serve MODEL [options]

  MODEL           a folder with config.json and weights, a GGUF file, or the name of a model that ships (kjv-lm)
  --port          where it listens (8000; 0: any port that is free)
  --host          the name or address to listen at (127.0.0.1: this machine alone; 0.0.0.0: all that can reach it)
  --name          what the model is called (by default as its folder or file)
  --device        where it computes (cpu; cuda)
  --dtype         what weights are converted to: f32, bf16, f16 (what the files have; models that ship: f32)
  --max-tokens    of an answer in a chat that says nothing of them (1024)
  --context       tokens of prompt and answer at most (what the model has)
  --template      a file with the template of chats, where the model has none or another is wanted
  --api-key       requests have to have it (also $TYCHO_API_KEY)
  --allow-origin  an origin whose web pages may ask, * all
  --log           a line for each request

GET /health, /v1/models; POST /v1/completions, /v1/chat/completions, /tokenize, /detokenize. Ctrl-C ends it.
]]

local function is_count(value) return math.tointeger(tonumber(value)) and tonumber(value) > 0 end

local options = {
  port = { "an integer in [0, 65535]", function(v)
    local port = math.tointeger(tonumber(v))
    return port and port >= 0 and port <= 65535
  end },
  ["max-tokens"] = { "an integer > 0", is_count }, context = { "an integer > 0", is_count },
  dtype = { "f32, bf16 or f16", function(v) return v == "f32" or v == "bf16" or v == "f16" end },
  host = {}, name = {}, device = {}, template = {}, ["api-key"] = {}, ["allow-origin"] = {},
}

-- The values of the words; nil and what is wrong with them.
local function parse(words)
  local o, i = { port = 8000, host = "127.0.0.1", device = "cpu", max_tokens = 1024,
    api_key = os.getenv "TYCHO_API_KEY" }, 1
  while i <= #words do
    local word = words[i]
    local name, value = word:match "^%-%-([%a-]+)=?(.*)$"
    if word == "--help" or word == "-h" then return { help = true } end
    local option = options[name]
    if word == "--log" then
      o.log = true
    elseif option then
      if not word:find "=" then
        i = i + 1
        value = words[i]
      end
      if not value or value == "" then return nil, ("--%s: expected a value, got none"):format(name) end
      if option[2] and not option[2](value) then
        return nil, ("--%s: expected %s, got '%s'"):format(name, option[1], value)
      end
      o[name:gsub("-", "_")] = option[1] and math.tointeger(tonumber(value)) or value
    elseif word:sub(1, 1) == "-" then
      local names = { "--log" }
      for known in pairs(options) do names[#names + 1] = "--" .. known end
      table.sort(names)
      return nil, ("unknown argument '%s'; there are MODEL, %s"):format(word, table.concat(names, ", "))
    elseif o.model then
      return nil, ("expected one model, got '%s' and '%s'"):format(o.model, word)
    else
      o.model = word
    end
    i = i + 1
  end
  if not o.model then return nil, "expected a model: a folder, a GGUF file or a name; --help tells more" end
  return o
end

-- The path of a model by what the user called it, and whether it is one that ships.
local function find(name)
  if name:find "%.gguf$" or ty.io.stat(name .. "/config.json") then return name end
  local info = ty.io.stat(name)
  if info then
    arguments.refuse("%s: expected a folder with config.json or a GGUF file, got %s", name,
      info.kind == "directory" and "a folder without one" or "another file")
  end
  return require("tycho.zoo").path(name), true
end

-- The template of chats that a file, the folder or the GGUF file has; nil where there is none.
local function chat_of(path, tokenizer, file)
  local hub = require "tycho.hub"
  local variables, fields = {}, ty.tokenizer.fields(tokenizer)
  for _, name in ipairs { "bos", "eos", "unk", "pad" } do
    variables[name .. "_token"] = fields[name] and tokenizer:token(fields[name]) or nil
  end
  if file then return hub.chat.new(ty.io.read(file), variables) end
  if path:find "%.gguf$" then
    local _, metadata = ty.io.load_gguf(path)
    local template = metadata["tokenizer.chat_template"]
    return type(template) == "string" and hub.chat.new(template, variables) or nil
  end
  local fine, chat = pcall(hub.chat.load, path)
  if fine then return chat end
  if not tostring(chat):find("has no chat template", 1, true) then error(chat, 0) end
end

local function load(o)
  local hub = require "tycho.hub"
  local path, ships = find(o.model)
  local tokenizer = hub.tokenizer(path)
  if not tokenizer then arguments.refuse("%s: expected a model with a tokenizer, got none", path) end
  local model = hub.load(path, { device = o.device, dtype = o.dtype or ships and "f32" or nil })
  if not model.hidden then
    arguments.refuse("%s: expected a language model, got a %s", path, tostring(getmetatable(model).__name))
  end
  return model, tokenizer, chat_of(path, tokenizer, o.template)
end

-- One line for what is wrong with what the user gave.
local function complain(problem)
  io.stderr:write("serve: ", (tostring(problem):gsub("^[^\n]-%.lua:%d+: ", ""):gsub("^serve%.?%a*: ", "")), "\n")
  return 1
end

--- The command: takes the words after `serve`, returns the exit status.
---@param words string[]
---@return integer status
function M.command(words)
  arguments.expect("serve.command", "words", words, "a list of strings")
  local o, problem = parse(words)
  if not o then
    io.stderr:write(problem, "\n")
    return 2
  end
  if o.help then
    io.stdout:write(usage)
    return 0
  end
  local serve = require "tycho.serve"
  local fine, model, tokenizer, chat = pcall(load, o)
  if not fine then return complain(model) end
  local engine, server
  fine, engine = pcall(serve.engine, model, { tokenizer = tokenizer })
  if not fine then return complain(engine) end
  local name = o.name or o.model:gsub("/+$", ""):gsub("%.gguf$", ""):match "([^/]+)$" or "model"
  local log = o.log and function(line) io.stderr:write(os.date "%H:%M:%S ", line, "\n") end or nil
  fine, server = pcall(serve.http, engine, { host = o.host, port = o.port, name = name, chat = chat, log = log,
    max_tokens = o.max_tokens, context = o.context, api_key = o.api_key, allow_origin = o.allow_origin })
  if not fine then return complain(server) end
  io.stdout:write(("serving %s at %s/v1 (Ctrl-C ends)\n"):format(name, server.address))
  io.stdout:flush()
  local _
  _, problem = pcall(server.run, server)
  server:close()
  if not arguments.interrupted(problem) then error(problem, 0) end
  io.stdout:write "\n"
  return 0
end

return M
