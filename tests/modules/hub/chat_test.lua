-- Chat templates: the texts that Jinja makes of the same templates (tests/fixtures/make_chat.py), and mistakes.
local here = (arg and arg[0]:match ".*/" or "tests/modules/hub/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local llm = require "tycho.llm"

for i, case in ipairs(ty.io.load_json(check.root .. "tests/fixtures/llm/chat.json")) do
  check.test("case " .. i, function()
    local chat = llm.chat.new(case.template, { bos_token = "<s>", eos_token = "</s>" })
    if case.error then
      check.fails(function() chat:render(case.variables.messages, case.variables) end,
        "line 15: string + None cannot be computed")
    else
      check.equal(chat:render(case.variables.messages, case.variables), case.text)
    end
  end)
end

local talk = { { role = "user", content = "Hi" } }

check.test("templates of folders", function()
  local template = "{{ bos_token }}{{ messages[0].content }}{% if add_generation_prompt %}:{% endif %}"
  scratch.spit("tokenizer_config.json", ty.io.json_encode { chat_template = template,
    bos_token = { content = "<s>", special = true } })
  check.equal(llm.chat.load(scratch.folder):render(talk), "<s>Hi:")
  check.equal(llm.chat.load(scratch.folder):render(talk, { add_generation_prompt = false }), "<s>Hi")
  scratch.spit("tokenizer_config.json", ty.io.json_encode { chat_template = {
    { name = "default", template = "d" }, { name = "tool_use", template = "t" } } })
  check.equal(llm.chat.load(scratch.folder):render(talk), "d")
  check.equal(llm.chat.load(scratch.folder, "tool_use"):render(talk), "t")
  check.fails(function() llm.chat.load(scratch.folder, "other") end, "has no chat template")
  scratch.spit("chat_template.jinja", "file")
  check.equal(llm.chat.load(scratch.folder):render(talk), "file")
end)

check.test("mistakes name the line, and nothing runs away", function()
  local function fails(template, text)
    check.fails(function() llm.chat.new(template):render(talk) end, text)
  end
  fails("a\n{% if x %}b", "line 2: a block has no end")
  fails("a\n\n{{ x", "line 3: '{{' has no end")
  fails("{{ 1 + }}", "an expression is wanted")
  fails("{{ 'a }}", "'{{' has no end")
  fails("{% endif %}", "no statement 'endif'")
  fails("{{ x | frobnicate }}", "no filter 'frobnicate'")
  fails("{{ x is odd_looking }}", "no test 'odd_looking'")
  fails("{{ x() }}", "no function")
  fails("{{ nothing + 1 }}", "undefined + number")
  fails("{{ 1 // 0 }}", "division by 0")
  fails("{{ raise_exception('no') }}", "the template says: no")
  fails("{{ (" .. ("("):rep(500) .. "1" .. (")"):rep(501) .. " }}", "nested more than")
  fails(("{% if 1 %}"):rep(500), "nested too deep")
  fails("{% for i in range(100001) %}{% endfor %}", "at most 100000")
  fails("{% for i in range(5000) %}{% for j in range(5000) %}{% endfor %}{% endfor %}", "rounds")
  fails("{% for i in range(90000) %}{{ 'x' * 1000 }}{% endfor %}", "16777216 bytes")
  fails("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "too deep")
  fails("{{ messages.__index }}{{ messages[0].os.exit() }}", "no method 'exit'")
  check.fails(function() llm.chat.new("x"):render({}) end, "chat:render: messages: expected at least one")
  check.fails(function() llm.chat.new("x"):render { { content = "x" } } end,
    "role of message 1: expected a string, got nil")
end)

scratch.clean()
check.finish()
