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
  check.equal(llm.chat.load(scratch.folder, "other", "mine"):render(talk), "mine")
  -- As models that see have them.
  scratch.spit("processor_config.json", ty.io.json_encode { processor_class = "LlavaProcessor" })
  check.equal(llm.chat.load(scratch.folder):render(talk), "d")
  scratch.spit("processor_config.json", ty.io.json_encode { chat_template = "processor" })
  check.equal(llm.chat.load(scratch.folder):render(talk), "processor")
  scratch.spit("chat_template.json", ty.io.json_encode { chat_template = "{{ messages[0].role }}" })
  check.equal(llm.chat.load(scratch.folder):render(talk), "user")
  scratch.spit("chat_template.json", "3")
  check.fails(function() llm.chat.load(scratch.folder) end, "chat_template.json: expected an object, got 3")
  scratch.spit("chat_template.jinja", "file")
  check.equal(llm.chat.load(scratch.folder):render(talk), "file")
end)

-- The most resident memory so far, in MB; nil where /proc is not, and under sanitizers.
local function peak()
  local file = not os.getenv "UBSAN_OPTIONS" and io.open "/proc/self/status"
  if not file then return nil end
  local text = file:read "a"
  file:close()
  return tonumber(text:match "VmHWM:%s*(%d+)") / 1024
end

check.test("one budget for what a template makes, in whichever way", function()
  local doubling = "{% set ns = namespace(x='0123456789', l=[1, 2]) %}{% for i in range(99) %}{% set ns.NAME = VALUE %}"
    .. "{% endfor %}"
  local function doubled(name, value)
    return (doubling:gsub("[A-Z]+", { NAME = name, VALUE = (value:gsub("%%", "%%%%")) }))
  end
  local before = peak()
  for i, template in ipairs {
    doubled("x", "ns.x ~ ns.x"), doubled("x", "ns.x + ns.x"), doubled("x", "ns.x * 2"), "{{ 'ab' * 9999999999999 }}",
    doubled("x", "ns.x | replace('0', '00')"), doubled("x", "ns.x.replace('1', '1111')"),
    doubled("x", "[ns.x, ns.x] | join(ns.x)"), doubled("x", "ns.x.join([ns.x, ns.x])"),
    doubled("l", "ns.l + ns.l"), doubled("l", "[ns.l, ns.l]") .. "{{ ns.l }}",
    doubled("l", "[ns.l, ns.l]") .. "{{ ns.l | tojson }}", doubled("l", "[ns.l, ns.l]") .. "{{ ns.l == ns.l + [] }}",
    doubled("l", "{'a': ns.l, 'b': ns.l}") .. "{{ ns.l | tojson(indent=2) }}",
    "{{ messages | tojson(indent=1000000000) }}", "{{ 'a\nb' | indent(1000000000) }}",
    doubled("x", "ns.x | indent(100000) ~ '\n' ~ ns.x"), doubled("x", "ns.x | indent(100000, true)"),
    "{% set x = 'a' * 9000000 %}" .. ("{% set y = x | upper %}"):rep(50),
    "{% set x = 'a' * 9000000 %}" .. ("{% set y = x | list %}"):rep(50),
    "{% set x = 'a ' * 9000000 %}" .. ("{% set y = x.split() %}"):rep(50),
    "{% set x = 'a' * 9000000 %}{% for i in range(99999) %}{% if 'b' in x %}{% endif %}{% endfor %}",
    "{% set x = 'a' * 9000000 %}{% for i in range(99999) %}{{ x | length }}{% endfor %}",
    "{% set x = 'a' * 9000000 %}{% for i in range(99999) %}{{ x[i] }}{{ x[1:2] }}{% endfor %}",
    "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}" .. doubled("x", "m(ns.x)"),
    "{% set s = namespace(x=0) %}{% for i in range(99999) %}{% for j in range(99) %}{% set s.x = [s.x, loop] %}"
      .. "{% endfor %}{% endfor %}",
    "{% for i in range(-9223372036854775807, 9223372036854775807) %}{% endfor %}",
    "{% set x %}" .. ("{{ 'a' * 16000000 }}"):rep(20) .. "{% endset %}",
    "{{ strftime_now('%c' * 8000000) }}",
  } do
    local began = os.clock()
    local text = check.fails(function() llm.chat.new(template):render(talk) end)
    check.ok(text:find "^template: a text of more than 16777216 bytes" or text:find "^template: rendering takes more"
      or text:find "at most 100000 integers" or text:find "nested too deep", i .. ": " .. text)
    check.ok(os.clock() - began < 20, ("template %d takes %.0f s"):format(i, os.clock() - began))
    collectgarbage()
  end
  if before then check.ok(peak() - before < 1000, ("the templates took %.0f MB"):format(peak() - before)) end
  local white = llm.chat.new((" "):rep(200000) .. "x{{- 1 }}")
  check.equal(#white:render(talk), 200002, "white space is cut in linear time")
  -- What is made in one rendering does not count in the next.
  local chat = llm.chat.new "{% for i in range(2000) %}{{ 'x' * 1000 }}{% endfor %}"
  for _ = 1, 60 do chat:render(talk) end
end)

check.test("texts and ranges by position", function()
  local function render(template) return llm.chat.new(template):render(talk) end
  check.equal(render "{{ 'täxt'[1] }}{{ 'täxt'[-1] }}{{ 'täxt'[9] }}|{{ 'täxt'[1:3] }}|{{ 'täxt'[:-1] }}", "ät|äx|täx")
  check.equal(render "{{ 'täxt'[::-1] }}", "txät")
  check.equal(render "{{ 'abc'[2:1] }}|{{ ''[0:] }}|{{ ''[0] }}|{{ 'abc'[5:] }}|{{ 'abcdef'[::2] }}", "||||ace")
  check.equal(render "{{ range(3) }}{{ range(5, 1, -2) }}{{ range(2, 2) }}{{ range(9, 1) }}{{ range(1, 6, 2) }}",
    "[0, 1, 2][5, 3][][][1, 3, 5]")
end)

check.test("mistakes name the line, and nothing runs away", function()
  local function fails(template, text)
    check.fails(function() llm.chat.new(template):render(talk) end, text)
  end
  fails("a\n{% if x %}b", "line 2: a block has no end")
  fails("a\n\n{{ x", "line 3: '{{' has no end")
  fails("{{ 1 + }}", "expected an expression, got the end")
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
  fails("{% for i in range(5000) %}{% for j in range(5000) %}{% endfor %}{% endfor %}", "rendering takes more than the")
  fails("{% for i in range(90000) %}{{ 'x' * 1000 }}{% endfor %}", "16777216 bytes")
  fails("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "too deep")
  fails("{{ messages.__index }}{{ messages[0].os.exit() }}", "no method 'exit'")
  check.fails(function() llm.chat.new("x"):render({}) end, "chat:render: messages: expected at least one")
  check.fails(function() llm.chat.new("x"):render { { content = "x" } } end,
    "role of message 1: expected a string, got nil")
end)

scratch.clean()
check.finish()
