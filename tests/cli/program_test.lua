-- The `tycho` program from outside: options, exit codes, errors, Ctrl-C, the prompt, start-up time and memory.
-- Run by the program under test: tycho tests/cli/program_test.lua [--slow]; --slow leaves out times and sizes, which
-- sanitizers change.

local check = require "tests.lua.check"
local clock = require("tycho.core").system.clock
local program = require "tycho.program"

local slow = (...) == "--slow"
local folder = os.tmpname()
os.remove(folder)
assert(os.execute("mkdir -p '" .. folder .. "/home'"))

local function quote(text) return "'" .. text:gsub("'", "'\\''") .. "'" end

local tycho = quote(program.executable)

-- Runs a shell command; what it wrote to both outputs, and its exit status.
local function shell(command)
  local quiet = "unset LUA_INIT LUA_INIT_5_4 XDG_STATE_HOME"
  local line = ("exec 2>&1; cd %s; HOME=%s/home; export HOME; %s; %s"):format(folder, folder, quiet, command)
  local pipe = assert(io.popen(line))
  local text = pipe:read("a")
  local _, _, status = pipe:close()
  return text, status
end

local function run(arguments, input)
  return shell((input and "printf %s " .. quote(input) .. " | " or "") .. tycho .. " " .. arguments)
end

local function write(name, text)
  local file <close> = assert(io.open(folder .. "/" .. name, "w"))
  file:write(text)
  return name
end

local function expect(arguments, status, pattern, input)
  local text, got = run(arguments, input)
  check.equal(got, status, "exit status of tycho " .. arguments .. " (it wrote: " .. text .. ")")
  check.ok(text:find(pattern), ("tycho %s: %q does not match %q"):format(arguments, text, pattern))
  return text
end

check.test("options", function()
  expect("-e 'print(1 + 1)'", 0, "^2\n$")
  expect("-e 'a = 2' -e 'print(a)'", 0, "^2\n$")
  expect("-l string -e 'print(string.rep(\"x\", 3))'", 0, "^xxx\n$")
  expect("-l s=string -e 'print(s.rep(\"x\", 3))'", 0, "^xxx\n$")
  expect("-v", 0, "^Tycho %d+%.%d+%.%d+, Lua 5%.4")
  expect("--version", 0, "^Tycho ")
  expect("version", 0, "^Tycho ")
  expect("--help", 0, "^usage: tycho")
  expect("help", 0, "^usage: tycho")
  expect("-e", 1, "'%-e' needs an argument")
  expect("-q", 1, "unrecognized option '%-q'")
  expect("-W -e 'warn \"careful\"'", 0, "careful")
  expect("-", 0, "^3\n$", "print(3)")
  expect("", 0, "^4\n$", "print(4)")
  expect("-e 'print(ty)'", 0, "^nil\n$")
end)

check.test("LUA_INIT", function()
  local text = shell("LUA_INIT='print(7)' " .. tycho .. " -e 'print(8)'")
  check.equal(text, "7\n8\n")
  text = shell("LUA_INIT='print(7)' " .. tycho .. " -E -e 'print(8)'")
  check.equal(text, "8\n")
end)

check.test("scripts", function()
  write("args.lua", "#!/usr/bin/env tycho\nprint(arg[0], arg[1], arg[2], #arg, ..., arg[-1] ~= nil)")
  expect("args.lua 'a b' c", 0, "^args.lua\ta b\tc\t2\ta b\ttrue\n$")
  write("with space.lua", "print('spaced')")
  expect("'with space.lua'", 0, "^spaced\n$")
  write("doctor.lua", "print('mine')")
  expect("doctor.lua", 0, "^mine\n$")
  write("version", "print('a file')")
  expect("-- version", 0, "^a file\n$")
  write("exit.lua", "os.exit(7)")
  expect("exit.lua", 7, "^$")
  write("closed.lua", "local x <close> = setmetatable({}, { __close = function() print('closed') end }) error('late')")
  expect("closed.lua", 1, "closed\n.*late")
end)

check.test("errors of scripts", function()
  expect("missing.lua", 1, "cannot open missing.lua")
  write("syntax.lua", "local x = \n\nfor")
  expect("syntax.lua", 1, "^tycho: syntax%.lua:3: ")
  write("run.lua", "local function inner() error('bad thing') end\nlocal function outer() inner() end\nouter()")
  expect("run.lua", 1, "^tycho: run%.lua:1: bad thing\nstack traceback:.*run%.lua:2: in .*outer")
  write("object.lua", "error(setmetatable({}, { __tostring = function() return 'an object' end }))")
  expect("object.lua", 1, "^tycho: an object")
  write("table.lua", "error({})")
  expect("table.lua", 1, "error object is a table value")
  expect("-l no.such.module -e 'print(1)'", 1, "module 'no%.such%.module' not found")
  write("deep.lua", "local function f() return 1 + f() end f()")
  expect("deep.lua", 1, "stack overflow")
end)

check.test("errors in recipes: what a check found is a line, a fault of the program has its traceback", function()
  local head = "local ty = require 'tycho' local r = ty.recipe.declare { args = { { 'count', 3, 'of them' } } } "
  write("recipe.lua", head .. "ty.ones(3):reshape(r.args.count + 1)")
  expect("recipe.lua --quick --out recipe", 1, "^tycho: recipe%.lua:1: reshape: [^\n]*\n$")
  expect("recipe.lua --quick --out recipe --count -1", 2, "^%-%-count: expected at least 0, got %-1\n$")
  local text = shell("TYCHO_TRACEBACK=1 " .. tycho .. " recipe.lua --quick --out recipe")
  check.ok(text:find "stack traceback:", text)
  write("library.lua", head .. "ty.nn.Linear(0, r.args.count)")
  expect("library.lua --quick --out recipe", 1, "^tycho: library%.lua:1: Linear: inputs: expected [^\n]*\n$")
  write("fault.lua", head .. "ty.scope(function() return r.nothing.at_all end)")
  expect("fault.lua --quick --out recipe", 1, "^tycho: fault%.lua:1: attempt to index[^\n]*\nstack traceback:")
end)

check.test("the library", function()
  expect("-e 'local ty = require \"tycho\" print(ty.ones(2, 2):sum():item())'", 0, "^4%.0\n$")
  expect("-e 'print(package.loaded.tycho, _G.ty)'", 0, "^nil\tnil\n$")
  expect("-l tycho -e 'print(type(tycho.zeros))'", 0, "^function\n$")
end)

check.test("words", function()
  expect("recipes", 0, "run one: tycho recipes/")
  expect("recipes no-such-recipe-anywhere", 1, "no recipe mentions")
  expect("recipes digits_classifier", 0, "vision/digits_classifier.*\n +met\n")
  expect("recipes --show digits_classifier", 0, "held%-out accuracy, mean +0%.99")
  expect("recipes --show nobody", 1, "no recipe is named 'nobody'")
  expect("recipes --show", 1, "expected the name of a recipe")
  expect("watch --help", 0, "^usage: tycho watch")
  expect("serve --help", 0, "^usage: tycho serve")
  expect("serve", 2, "expected a model: a folder, a GGUF file or a name")
  expect("watch no-such-folder", 2, "no%-such%-folder: expected a folder")
  expect("recipes --frobnicate", 2, "unknown argument '%-%-frobnicate'")
  expect("recipes/llm/generate.lua --device gpu", 2, "^%-%-device: unknown device \"gpu\"[^\n]*\n$")
  expect("recipes/diffusion/digits.lua --quick --resume --out nothing", 1,
    "\ntycho: nothing to resume: there is no checkpoint at [^\n]*; without resume the run starts anew\n$")
  expect("recipes/llm/generate.lua --threads -1", 2, "^%-%-threads: expected at least 0, got %-1\n$")
  expect("recipes --rerun digits_classifier --quick --out rerun", 0,
    "against the record.*held%-out accuracy, mean: 0%.%d+, recorded 0%.99")
  expect("doctor", 0, "kernels.*self test%s+passed")
  expect("help softmax", 0, "ty%.softmax%(x, dim.*along a dimension")
end)

check.test("help by the end of a name", function()
  expect("help AdamW", 0, "^ty%.optim%.AdamW%(.*Loshchilov and Hutter")
  expect("help DataLoader", 0, "^ty%.data%.DataLoader%(dataset, options%)\n.*batch_size")
  expect("help llm.load", 0, "^llm%.load%(path, options%)\n.*A published model.*require \"tycho%.llm\"")
  expect("help optim.AdamW ty.optim.AdamW", 0, "^optim%.AdamW%(.*\nty%.optim%.AdamW%(")
  expect("help dataloader", 0, "^ty%.data%.DataLoader%(")
  expect("help Module:save", 0, "^ty%.nn%.Module:save%(.*safetensors")
  expect("help Optimizer:zero_grad", 0, "^Optimizer:zero_grad%(")
  expect("help GPT2", 0, "GPT2%(options%).*vocabulary")
  expect("help Tensor", 0, "n%-dimensional array.*methods:.*backward")
  local several = expect("help step", 0, "names end in 'step'")
  for _, name in ipairs { "Optimizer:step", "Scheduler:step", "ty%.optim%.step" } do
    check.ok(several:find(name), several)
  end
  expect("help load", 0, "^load%(path, .*and there is:.*hub%.load.*peft%.load")
  expect("help llm", 0, "Language models:.*GPT2.*functions:.*load")
  expect("help print", 0, "of Lua itself, https://www%.lua%.org/manual/5%.4/")
  expect("help softmax", 0, "along a dimension.*and there is:\n  ty%.nn%.Softmax ")
end)

check.test("help for what there is not", function()
  expect("help zqxzqx", 1, "nothing is known of 'zqxzqx'")
  expect("help nonsense", 1, "nothing is")
  expect("help softmax zqxzqx", 1, "nothing is known of 'zqxzqx'")
  expect("help sofmtax", 1, "^nothing is named 'sofmtax'; near it:\n  ty%.softmax ")
  expect("help AdmaW", 1, "near it:\n  ty%.optim%.AdamW ")
  expect("help llm.laod", 1, "near it:.*llm%.load ")
end)

-- `timeout` sends SIGINT to the program it runs.
local function interrupted(arguments, seconds)
  local before = clock()
  local command = ("timeout --preserve-status -k 20 -s INT %g %s %s"):format(seconds or 0.5, tycho, arguments)
  local text, status = shell(command)
  return text, status, clock() - before
end

check.test("Ctrl-C in a script", function()
  local text, status = interrupted("-e 'while true do end'")
  check.equal(status, 130, text)
  check.ok(text:find("interrupted\nstack traceback:"), text)
  write("co.lua", "local f = coroutine.wrap(function() while true do end end)\nf()")
  text, status = interrupted("co.lua")
  check.equal(status, 130, text)
  check.ok(text:find("co%.lua:1: interrupted"), text)
  write("resume.lua", "print(coroutine.resume(coroutine.create(function() while true do end end)))")
  text, status = interrupted("resume.lua")
  check.ok(text:find("false\tresume%.lua:1: interrupted"), text)
  check.equal(status, 0, "the script caught it")
  write("caught.lua", "pcall(function() while true do end end) print('went on')")
  text, status = interrupted("caught.lua")
  check.equal(text, "went on\n")
  check.equal(status, 0)
end)

check.test("Ctrl-C in a native op", function()
  write("native.lua", [[
    local ty = require "tycho"
    local x = ty.randn(6000, 6000, { dtype = "f64" })
    for _ = 1, 100 do x:matmul(x) end]])
  local text, status, seconds = interrupted("native.lua", 3)
  check.equal(status, 130, text)
  check.ok(text:find("interrupted"), text)
  check.ok(slow or seconds < 6, ("it took %.1f s to stop"):format(seconds))
end)

check.test("coroutines behave as ever", function()
  write("coroutines.lua", [[
    local gen = coroutine.wrap(function(a) local b = coroutine.yield(a, nil) error({ b }) end)
    print(select("#", gen(1)), pcall(gen, 2))
    local co = coroutine.create(function(...) print(coroutine.isyieldable(), ...) return coroutine.yield() end)
    print(coroutine.resume(co, 1, nil), coroutine.resume(co, 3, 4))
    print(coroutine.resume(co), coroutine.status(co), coroutine.running())
    print(pcall(coroutine.resume, 1), pcall(coroutine.wrap, 1))
    for i in coroutine.wrap(function() for i = 1, 3 do coroutine.yield(i) end end) do io.write(i, " ") end]])
  local ours = run("coroutines.lua"):gsub("0x%x+", "0x")
  local theirs = shell("command -v lua5.4 >/dev/null && lua5.4 coroutines.lua"):gsub("0x%x+", "0x")
  if theirs ~= "" then check.equal(ours, theirs) end
end)

check.test("prompt from a pipe", function()
  local function prompt(input) return (run("-i", input)) end
  check.equal(prompt("1 + 1\n"), "2\n")
  check.equal(prompt("= 3\n"), "3\n")
  check.equal(prompt("local x <const>, y = 1\nx, y\n"), "1\tnil\n")
  check.equal(prompt("local function f(n) local d = 2; return n * d end\nf(4)\nd\n"), "8\nnil\n")
  check.equal(prompt("x = {\n1,\n2}\nx\n_[2]\n_\n"), "{1, 2}\n2\n2\n")
  check.equal(prompt("for i = 1, 2 do local j = i end\nj\n"), "nil\n")
  check.equal(prompt("local s = 'local t = 1' -- local u = 2\ns, t, u\n"), '"local t = 1"\tnil\tnil\n')
  check.equal(prompt("type(ty.zeros)\n"), '"function"\n')
  check.ok(prompt("x = = 1\n2\n"):find("^tycho: stdin:1: unexpected symbol near '='\n2\n$"))
  check.ok(prompt("error('e')\n3\n"):find("^tycho: stdin:1: e\nstack traceback:.*\n3\n$"))
  check.ok(prompt("for i = 1, 2 do\n"):find("in the middle of a statement"))
  check.ok(prompt("?softmax\n"):find("ty%.softmax%("))
  check.ok(prompt("help(ty.softmax)\n"):find("ty%.softmax%("))
  check.ok(prompt("help AdamW\n"):find("ty%.optim%.AdamW%("))
  check.equal(prompt("help nonsense\n"), prompt("?nonsense\n"))
  check.equal(prompt("help\n"), prompt("help()\n"))
  check.ok(prompt(":time 1 + 1\n"):find("^%d+%.%d+ s\n2\n$"))
  check.ok(prompt("ty.ones(2)\n"):find("%[2%] f32 cpu\n.*1.*1"), "a tensor is shown")
  check.ok(prompt("return 5\nos.exit(3)\n"):find("^5\n$"))
  for _, word in ipairs { "exit", "quit", "exit()", " quit ( ) ; " } do
    check.equal(prompt("1\n" .. word .. "\n2\n"), "1\n", word .. " ends the prompt")
  end
  check.equal(prompt("local exit = 5\nexit\nexit + 1\n"), "5\n6\n", "a variable of that name is shown")
end)

-- Types into a terminal of its own, a pause after every line.
local function terminal(lines)
  local typed = {}
  for _, line in ipairs(lines) do typed[#typed + 1] = ("printf %%b %s; sleep 0.4;"):format(quote(line)) end
  local text, status = shell(("{ sleep 1; %s } | TERM=xterm timeout -k 5 30 script -qec %s /dev/null")
    :format(table.concat(typed, " "), quote("exec " .. tycho)))
  return text:gsub("\r", ""), status
end

check.test("prompt on a terminal", function()
  if select(2, shell("script -qec true /dev/null </dev/null")) ~= 0 then
    return print("`script` makes no terminal here: the prompt on one is not tested")
  end
  local text, status = terminal { "local abc = 40\\n", "ab\\t + 2\\n", "while true do end\\n", "\\003", "abc + 5\\n",
    "garbage\\003", "ty.softm\\t\\n", "\\004" }
  check.equal(status, 0, text)
  check.ok(text:find("^Tycho %d"), "a greeting")
  check.ok(text:find("\n42\n"), "completion of a global: " .. text)
  check.ok(text:find("interrupted"), text)
  check.ok(text:find("\n45\n"), "the prompt goes on after Ctrl-C: " .. text)
  check.ok(text:find("function"), "completion of a field: " .. text)
  local history = io.open(folder .. "/home/.local/state/tycho/history"):read("a")
  check.ok(history:find("^local abc = 40\nabc %+ 2\n"), "history: " .. history)
  check.ok(not history:find("garbage"), "what Ctrl-C threw away is not remembered")
  text = terminal { "\\033[A\\n", "\\004" }
  check.ok(text:find("softmax"), "the last line comes back in the next session: " .. text)
end)

check.test("completion", function()
  local complete = require("tycho.complete").candidates
  _G.probe = { alpha = 1, beta = function() end, _hidden = 1, ["not a name"] = 1 }
  check.equal((complete("probe.")), { "alpha", "beta" })
  check.equal((complete("x = probe:")), { "beta" })
  check.equal((complete("probe._")), { "_hidden" })
  check.equal((complete("f(pro")), { "probe" })
  check.equal((complete("nothing.at.all.")), {})
  check.equal((complete("('x'):re")), {}, "parentheses are not looked into")
  check.equal((complete("'x':re")), { "rep", "reverse" })
  check.equal((complete("retur")), { "return" })
  check.equal((complete("-- probe")), {})
  check.equal((complete("dofile('" .. folder .. "/syn")), { folder .. "/syntax.lua" })
  local ty = require "tycho"
  _G.probe = ty.ones(2)
  local methods = table.concat((complete("probe:rel")), " ")
  check.ok(methods:find("relu"), "methods of tensors: " .. methods)
  check.ok(table.concat((complete("probe.sha")), " "):find("shape"), "fields of tensors")
  _G.probe = nil
end)

check.test("completion of options", function()
  local complete = require("tycho.complete").candidates
  local function words(text) return table.concat((complete(text)), " ") end
  local ty = require "tycho"
  _G.nn, _G.optim, _G.data, _G.llm, _G.x = ty.nn, ty.optim, ty.data, require "tycho.llm", ty.ones(2)
  check.equal(words "nn.Conv2d(1, 2, 3, { pad", "padding")
  check.equal(words "nn.Conv2d(1, 2, 3, {", "algorithm bias dilation groups padding stride")
  check.equal(words "m = nn.Conv2d(1, f(2), 3, { padding = g { 1, 2 }, str", "stride")
  check.equal(words "nn.Conv2d(1, 2, 3, { padding = 1, bias = false, ", "algorithm dilation groups stride",
    "not those given")
  check.equal(words "nn.Linear(1, 2, {\n  b", "bias")
  check.equal(words "nn.SLSTM(1, 2, { h", "heads", "defaults put together in the constructor")
  check.equal(words "nn.GRU(1, 2, { bi", "bias bidirectional")
  check.equal(words "nn.GELU { ", "approximate", "a table is the only argument")
  check.equal(words "optim.AdamW(nil, { weight_", "weight_decay")
  check.equal(words "data.DataLoader(nil, { batch", "batch_size")
  check.equal(words "llm.load('folder', { dt", "dtype")
  check.equal(words "x:sum({ 0 }, { keep", "keepdim", "arguments of ops")
  check.ok(words("x:sum({ 0 }, { keepdim = pri"):find("print"), "a value is no option")
  check.ok(words("unknown { pri"):find("print"))
  for _, name in ipairs { "nn", "optim", "data", "llm", "x" } do _G[name] = nil end
end)

check.test("completion of modules", function()
  local complete = require("tycho.complete").candidates
  local function words(text) return " " .. table.concat((complete(text)), " ") .. " " end
  check.ok(words('require "'):find(" tycho ", 1, true), "the library itself")
  check.equal(words('require "tycho.ll'), " tycho.llm ")
  check.equal(words("require('tycho.opt"), " tycho.optim ")
  check.equal(words("x = require 'tycho.optim.galo"), " tycho.optim.galore ")
  check.ok(words('require "tycho.models.'):find(" tycho.models.gpt2 ", 1, true), "files of a module")
  check.equal(words('print "tycho.ll'), "  ", "other strings are names of files")
end)

check.test("how values are shown", function()
  local show = require("tycho.inspect").show
  check.equal(show(1.0), "1.0")
  check.equal(show("a\n\"b\"\1"), [["a\n\"b\"\x01"]])
  check.equal(show({ 1, { 2, { 3 } }, k = "v", ["end"] = true }), '{1, {2, {...}}, ["end"] = true, k = "v"}')
  local loop = {}
  loop[1] = loop
  check.equal(show(loop), "{{...}}")
  check.equal(show(setmetatable({}, { __tostring = function() return "me" end })), "me")
  local many = {}
  for i = 1, 1000 do many[i] = i end
  check.ok(show(many):find("976 more"), show(many))
  check.ok(#show(("x"):rep(100000)) < 1000)
end)

check.test("how modules and classes are shown", function()
  local show, ty = require("tycho.inspect").show, require "tycho"
  for _, t in ipairs { ty, ty.nn, ty.optim, ty.data, ty.io, require "tycho.llm", require "tycho.peft", string } do
    local text = show(t)
    check.ok(#text < 4000 and not text:find("function", 1, true) or text:find("functions:\n", 1, true), text)
    check.ok(not text:find("__", 1, true) and not text:find("%.lua:%d"), text)
  end
  check.ok(show(ty.nn):find("^classes:\n.*Linear.*\nfunctions:\n.*cross_entropy.*\nparts:\n.*init"), show(ty.nn))
  check.ok(show(ty.optim):find("^classes:\n.*AdamW.*GaLore.*\nfunctions:\n.*cosine"), show(ty.optim))
  check.ok(show(ty):find("^%d+ ops, which help%(ty%) lists\n"), show(ty))
  check.ok(show(require "tycho.llm"):find("classes:.*GPT2.*functions:.*load"), "what is loaded when it is first used")
  check.ok(show(ty.nn.Linear):find("^class Linear"), show(ty.nn.Linear))
  check.equal(show({ ty.nn.Linear, 3 }), "{class Linear, 3}")
  check.equal(show({ a = 1, b = 2, c = 3, d = 4, e = 5 }), "{a = 1, b = 2, c = 3, d = 4, e = 5}")
end)

check.test("every public name is documented", function()
  local names, help = require "tycho.names", require("tycho.help").text
  local all, of = names.all(), {}
  check.ok(#all > 400, "the library has more public names than " .. #all)
  for _, entry in ipairs(all) do
    of[entry.name] = true
    local text, found = help(entry.name)
    check.ok(found and not text:find("no documentation"), ("%s (%s:%s) has no comment"):format(entry.name,
      entry.path, entry.line))
  end
  for _, name in ipairs { "optim.GaLore", "llm.GPT2", "nn.init.normal", "Optimizer:step", "io.load_gguf" } do
    check.ok(of[name], name .. " is one of them")
  end
  for _, module in ipairs(names.modules()) do -- what is loaded when first used has to be listed, or nobody finds it
    local meta = getmetatable(require("tycho." .. module))
    check.ok(not (meta and type(meta.__index) == "function") or meta.__names, module .. " has no __names")
  end
end)

check.test("everything native is documented", function()
  local help, core, ops = require("tycho.help").text, require("tycho").core, {}
  for _, op in ipairs(core.ops()) do ops[op.name] = true end
  local function look(list, prefix)
    for name, value in pairs(list) do
      if type(value) == "function" and not ops[name] and not ops[name:gsub("_$", "")] then
        local text = help(value, prefix .. name)
        check.ok(not text:find("no documentation"), prefix .. name .. " stands in lua/tycho/meta/")
      end
    end
  end
  look(core, "ty.")
  look(core.Tensor.methods, "x:")
  for _, part in ipairs { "io", "memory", "system", "thread" } do look(core[part], "ty." .. part .. ".") end
end)

check.test("local statements of the prompt", function()
  local rewrite = require("tycho.lexer").globalize
  check.equal(rewrite("local a, b = 1, 2"), "a, b = 1, 2")
  check.equal(rewrite("local a"), "a = nil;")
  check.equal(rewrite("local a <const> = 1"), "a = 1")
  check.equal(rewrite("local f <close> = io.open('x')"), "local f <close> = io.open('x')")
  check.equal(rewrite("local function f() local x = 1 end local y = 2"), " function f() local x = 1 end y = 2")
  check.equal(rewrite("if a then local b = 1 end"), "if a then local b = 1 end")
  check.equal(rewrite("repeat local b = 1 until b local c = 1"), "repeat local b = 1 until b c = 1")
  check.equal(rewrite("t = { f = function() local x end } local z = [[local]]"),
    "t = { f = function() local x end } z = [[local]]")
  check.equal(rewrite("local _ENV = {}"), "local _ENV = {}")
  check.equal(rewrite("local\na\n= 1"), "\na\n= 1")
  check.equal(rewrite("--[[ local a ]] local b = 1"), "--[[ local a ]] b = 1")
  check.equal(rewrite("local"), "local")
end)

check.test("start-up", function()
  if slow then return end
  -- Processor time of twenty starts: other work on the machine does not count.
  local report = shell(("for i in $(seq 20); do %s -e ''; done; times"):format(tycho))
  local minutes, seconds, system_minutes, system_seconds = report:match "(%d+)m([%d.]+)s (%d+)m([%d.]+)s%s*$"
  check.ok(minutes, "times wrote: " .. report)
  local start = ((minutes + system_minutes) * 60 + seconds + system_seconds) / 20
  check.ok(start < 0.020, ("tycho -e takes %.1f ms, 20 are allowed"):format(start * 1000))
  local peak = tonumber((run([[-e 'print(io.open("/proc/self/status"):read("a"):match("VmHWM:%s*(%d+)"))']])))
  check.ok(peak < 15 * 1024, ("tycho -e takes %d KiB, 15360 are allowed"):format(peak))
  print(("start-up: %.1f ms, %d KiB"):format(start * 1000, peak))
end)

os.execute("rm -rf " .. quote(folder))
check.finish()
