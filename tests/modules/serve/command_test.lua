-- `tycho serve` as a program: what it says, a model that ships behind its address, Ctrl-C. While there is no engine of
-- the module the one of these tests stands in for it.
local here = (arg and arg[0]:match ".*/") or "tests/modules/serve/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local serve = require "tycho.serve"
local clients = dofile(here .. "../../lua/http_client.lua")

local has_program, program = pcall(require, "tycho.program")
if not has_program then
  print "skipped: this is not the program tycho"
  check.finish()
  return
end

local before = ""
if not pcall(function() return serve.engine end) then
  local path = clients.scratch.spit("init.lua", ([[
    local fake = dofile %q
    rawset(require "tycho.serve", "engine", function(model, options)
      local tokens = options.tokenizer:encode "unto him":tolist()
      local engine = fake.new(model, options.tokenizer, function() return tokens end)
      engine.eos = 0
      return engine
    end)
  ]]):format(here .. "fake_engine.lua"))
  before = ("LUA_INIT=@%s "):format(path)
end

local function run(arguments)
  local pipe = io.popen(("exec 2>&1; %stimeout 60 %s serve %s"):format(before, program.executable, arguments))
  local said = pipe:read "a"
  local _, _, status = pipe:close()
  return { said, status }
end

check.test("the command line", function()
  check.ok(run("--help")[1]:find "^usage: tycho serve MODEL")
  check.equal(run(""), { "expected a model: a folder, a GGUF file or a name; --help tells more\n", 2 })
  check.equal(run("a b"), { "expected one model, got 'a' and 'b'\n", 2 })
  check.equal(run("a --port no"), { "--port: expected an integer in [0, 65535], got 'no'\n", 2 })
  check.equal(run("a --port"), { "--port: expected a value, got none\n", 2 })
  check.equal(run("a --dtype=int"), { "--dtype: expected f32, bf16 or f16, got 'int'\n", 2 })
  check.equal(run("a --context 0"), { "--context: expected an integer > 0, got '0'\n", 2 })
  check.ok(run("a --prot 1")[1]:find "^unknown argument '%-%-prot'; there are MODEL, %-%-allow%-origin, ")
  local said = run("no-such-model")
  check.equal(said[2], 1)
  check.ok(said[1]:find "^serve: zoo%.path: no model 'no%-such%-model' ships; there are " and
    select(2, said[1]:gsub("\n", "")) == 1, said[1])
  check.equal(run(clients.scratch.folder), { ("serve: %s: expected a folder with config.json or a GGUF file, got a "
    .. "folder without one\n"):format(clients.scratch.folder), 1 })
end)

do
  local fine, problem = pcall(ty.core.http_core.listen, "127.0.0.1", 0)
  if fine then problem:close() end
  if not fine or not clients.works then
    print("skipped: " .. (fine and "there is no bash to ask a server" or tostring(problem)))
    check.finish()
    return
  end
end

check.test("a model that ships, a port that is in use, Ctrl-C", function()
  local template = clients.scratch.spit("chat.jinja",
    "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
  local pipe = assert(io.popen(("exec 2>&1; echo $$; %sTYCHO_API_KEY=secret exec %s serve kjv-lm --port 0 --log "
    .. "--template %s"):format(before, program.executable, template)))
  local id, line = pipe:read "l", pipe:read "l" or ""
  local port = math.tointeger(tonumber(line:match ":(%d+)/v1 "))
  check.ok(line:find "^serving kjv%-lm at http://127%.0%.0%.1:%d+/v1 %(Ctrl%-C ends%)$", line)
  local key = "Authorization: Bearer secret\r\n"
  local function ask(path, value)
    return clients.start(port, clients.request("POST", path, ty.io.json_encode(value), key))
  end
  local list = { ask("/v1/completions", { prompt = "And the king said", max_tokens = 4, temperature = 0 }),
    ask("/v1/chat/completions", { messages = { { role = "user", content = "And" } }, max_tokens = 4, stream = true }),
    clients.start(port, clients.request("GET", "/v1/models")) }
  check.ok(clients.drive(function() ty.system.sleep(0.02) end, table.unpack(list)))
  local status, _, body = list[1]:reply()
  check.equal(status, 200)
  local reply = ty.io.json_decode(body)
  check.equal({ reply.model, reply.usage.prompt_tokens }, { "kjv-lm", 4 })
  check.ok(reply.choices[1].text:find "^ ?%a", reply.choices[1].text)
  check.ok(list[2]:got():find 'data: {.-"role":"assistant".-data: %[DONE%]', list[2]:got())
  check.equal((list[3]:reply()), 401)
  check.equal(run("kjv-lm --port " .. port), { ("serve: port %d of 127.0.0.1 is in use; --port takes another, "
    .. "--port 0 any that is free\n"):format(port), 1 })
  os.execute("kill -INT " .. id)
  local rest = pipe:read "a"
  local _, _, code = pipe:close()
  check.equal(code, 0)
  check.ok(rest:find "POST /v1/completions 200, 4 %+ %d tokens in" and rest:find "GET /v1/models 401"
    and rest:sub(-2) == "\n\n", rest)
end)

check.finish()
