-- The examples of README.md, docs/ and examples/README.md, as they stand there: ```lua blocks and shell commands are
-- run in a scratch folder, and what a test cannot run is listed here with the reason. A block or a command that is new
-- must be added; one that is gone, taken out.
local here = arg and arg[0]:match ".*/" or "tests/lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"

-- ---- what the documents have ----

-- What is shorter here than in the text: { document, text, what is run in its place }. MODEL is the model that the
-- command of pretrain makes, PIPELINE a small one of the fixtures, NETWORK an ONNX file there, CHAT and CLIP are bases
-- of the zoo. FOLDER has a picture.
local substitutions = {
  { "README.md", "train.steps(loader, 300)", "train.steps(loader, 2)" },
  { "README.md", 'hub.load "model.onnx"', 'hub.load "NETWORK"' },
  { "README.md", 'llm.load "path", llm.tokenizer "path"', 'llm.load "MODEL", llm.tokenizer "MODEL"' },
  { "README.md", 'hub.pipeline "path"', 'hub.pipeline "PIPELINE"' },
  { "README.md", "steps = 20, guidance = 4", "steps = 2, guidance = 4" },
  { "README.md", 'vlm.load "path"', 'vlm.load "CHAT"' },
  { "README.md", '"photo.jpg"', '"FOLDER/one.png"' },
  { "README.md", '"pictures", vlm.gallery_encoder "path/of/siglip"', '"FOLDER", vlm.gallery_encoder "CLIP"' },
}

-- Commands of indented blocks: how they are run here (arguments that are added, PATH: the model of pretrain,
-- PIPELINE), or why they are not.
local commands = {
  ["./run recipes/diffusion/digits.lua"] = { add = "--quick --out digits" },
  ["./run test"] = { reason = "is what runs this" },
  ["./run serve kjv-lm"] = { reason = "runs until Ctrl-C: tests/modules/serve/command_test.lua" },
  ["./run watch runs"] = { reason = "runs until Ctrl-C: tests/lua/watch_test.lua" },
  ["./run recipes/llm/pretrain.lua"] = { add = "--quick --out pretrain", first = true },
  ['./run recipes/llm/generate.lua --model PATH --prompt "Once"'] = { add = "--quick --out generate" },
  ["./run recipes/quant/quantize.lua --model PATH --dtype q4_k"] = { add = "--quick --out quantize" },
  ['./run recipes/vlm/chat.lua --prompt "what is on the picture?"'] = { add = "--quick --out chat" },
  ['./run recipes/vlm/search.lua "a red car" FOLDER'] = { add = "--out search" },
  ["./run recipes/quant/compare.lua --model kjv-lm"] = { add = "--quick --out compare" },
  ['./run recipes/diffusion/generate.lua --model PIPELINE --prompt "a fox|two red apples"'] =
    { add = "--quick --out painted" },
  ["./run recipes/diffusion/finetune.lua"] = { add = "--quick --out finetune" },
  ['./run recipes/diffusion/emoji.lua --prompt "two red apples on a blue background"'] =
    { add = "--steps 2 --each 1 --out emoji" },
  ["cc examples/embed_c/regression.c $(pkg-config --cflags --libs tycho) -lm -o regression && ./regression"] =
    { reason = "needs an installed Tycho" },
  ["cc examples/embed_c/regression.c -Isrc -Lbuild/release -ltycho -Wl,-rpath,$PWD/build/release -lm -o regression && "
    .. "./regression"] = { native = true },
}

-- Commands in the midst of a text, by what they begin with. Those of recipes need no entry: their files and options
-- must be there, and each recipe's quick run is a test of its own.
local inline = {
  ["./run"] = "the prompt", ["./run doctor"] = "tests/cli", ["./run --help"] = "tests/cli",
  ["./run build"] = "builds what runs this", ["./run recipes"] = "tests/cli", ["./run test "] = "the test of that name",
  ["./run bench"] = "takes minutes", ["./run docs"] = "tests/lua/docs_html_test.lua",
  ["cmake --"] = "builds what runs this", ["luarocks "] = "builds what runs this", ["tycho -e "] = "tests/cli",
}

-- Expressions of Lua in the midst of a text, each with what has to be there before it.
local expressions = {
  ["x:sum({0, 1}, {keepdim = true})"] = "local x = ty.ones(2, 3, 4)",
  ['x["0:8, :, -1"]'] = "local x = ty.ones(9, 3, 4)",
  ['x:rearrange("b (h d) t -> b h t d", { h = 8 })'] = "local x = ty.ones(2, 24, 5)",
  ['ty.einsum("bqd,bkd->bqk", q, k)'] = "local q, k = ty.ones(2, 3, 4), ty.ones(2, 5, 4)",
}

-- ---- reading them ----

local root = check.root
local documents = { "README.md", "examples/README.md" }
for _, name in ipairs(ty.io.listdir(root .. "docs")) do
  if name:find "%.md$" then documents[#documents + 1] = "docs/" .. name end
end

local used = {} -- entries of the tables above that a document has

-- Begins with a word that a shell would run, as far as the documents have such.
local function is_command(text)
  for _, word in ipairs { "./run", "cc ", "cmake ", "ctest ", "luarocks ", "lua5.4 ", "tycho ", "python" } do
    if text:sub(1, #word) == word and not text:find "^tycho%.%w" then return true end
  end
  return false
end

-- The Lua blocks of a document, the commands of its indented blocks (without the remark behind them) and its inline
-- code.
local function read(name)
  local text = ty.io.read(root .. name)
  local blocks, indented, spans = {}, {}, {}
  local rest = text:gsub("\n```(%w*)\n(.-)\n```", function(language, body)
    if language == "lua" then blocks[#blocks + 1] = body
    elseif language ~= "text" then check.equal(language, "lua or text", name .. ": the language of a block") end
    return "\n"
  end)
  for line in rest:gmatch "[^\n]+" do
    local command = line:match "^    (%S.*)$"
    if command and not line:find "^%s*[-*] " then
      indented[#indented + 1] = command:gsub("%s+# .*$", "")
    else
      for span in line:gmatch "`([^`]+)`" do spans[#spans + 1] = span end
    end
  end
  return blocks, indented, spans
end

-- The program, or the Lua that runs this.
local executable
do
  local ok, program = pcall(require, "tycho.program")
  local i = 0
  while arg[i - 1] do i = i - 1 end
  executable = ok and program.executable or arg[i]
end

local function quoted(text) return "'" .. text:gsub("'", "'\\''") .. "'" end

local here_in_full
do
  local pipe = assert(io.popen "pwd")
  here_in_full = pipe:read "l"
  pipe:close()
end

local function absolute(path) return path:sub(1, 1) == "/" and path or here_in_full .. "/" .. path end

-- Runs a command line in the scratch folder, with the search paths of this test.
local function run(line, what)
  local paths = {}
  for i, list in ipairs { package.path, package.cpath } do
    paths[i] = list:gsub("[^;]+", function(path)
      return path:sub(1, 2) == "./" and path or absolute(path)
    end)
  end
  local log = scratch.file "log"
  local ok = os.execute(("cd %s && export LUA_PATH=%s LUA_CPATH=%s && %s > %s 2>&1"):format(quoted(scratch.folder),
    quoted(paths[1]), quoted(paths[2]), line, quoted(log)))
  check.ok(ok, ("%s: %s"):format(what, ok and "" or ty.io.read(log):sub(-2000)))
end

-- ---- running them ----

local all = {}
for _, name in ipairs(documents) do all[name] = table.pack(read(name)) end

-- A text with the folders that its examples need.
local function with_models(text)
  local pipeline = absolute(root .. "tests/fixtures/pipelines/sd15"):gsub("%%", "%%%%")
  local network = absolute(root .. "tests/fixtures/onnx/convnet.onnx"):gsub("%%", "%%%%")
  local zoo = absolute(root .. "zoo"):gsub("%%", "%%%%")
  return (text:gsub("MODEL", "pretrain/model"):gsub("PIPELINE", pipeline):gsub("NETWORK", network)
    :gsub("CHAT", zoo .. "/scene-vlm"):gsub("CLIP", zoo .. "/scene-clip"):gsub("FOLDER", "photographs"))
end

-- ./run FILE ...: what it ends with.
local function run_file(command, more)
  local line = command:gsub("^%./run (%S+)", function(file)
    return quoted(executable) .. " " .. quoted(absolute(root .. file))
  end)
  run(with_models(line:gsub("PATH", "MODEL")) .. " " .. more, command)
end

-- The program in C: against the build that this test runs with, unless that has sanitizers, which programs must know.
local function run_native(command)
  local build = executable:match "^(.*)/[^/]*$" or "."
  local cache = build .. "/CMakeCache.txt"
  if not ty.io.exists(cache) or ty.io.read(cache):find "TYCHO_SANITIZE:BOOL=ON" then return end
  local line = command:gsub("examples/", quoted(absolute(root)) .. "/examples/"):gsub("%-Isrc",
    "-I" .. quoted(absolute(root) .. "/src")):gsub("%$PWD/build/release", "build/release"):gsub("build/release",
    (quoted(build):gsub("%%", "%%%%")))
  run(line, command)
end

ty.io.mkdir(scratch.file "photographs")
ty.io.save_image(scratch.file "photographs/one.png", ty.full({ 3, 64, 64 }, 200, { dtype = "u8" }))

check.test("commands of indented blocks", function()
  for pass = 1, 2 do -- what others need comes first
    for name, document in pairs(all) do
      for _, command in ipairs(document[2]) do
        local entry = commands[command]
        if not entry then
          if pass == 1 then check.equal(command, "in the list of tests/lua/docs_test.lua", name) end
        elseif not entry.reason and (entry.first or false) == (pass == 1) then
          if entry.native then run_native(command) else run_file(command, entry.add) end
        end
        used[command] = true
      end
    end
  end
  for command in pairs(commands) do check.ok(used[command], "is in a document: " .. command) end
end)

check.test("Lua blocks", function()
  for name, document in pairs(all) do
    for i, body in ipairs(document[1]) do
      for _, s in ipairs(substitutions) do
        if s[1] == name then
          local first, last = body:find(s[2], 1, true)
          if first then
            body, used[s] = body:sub(1, first - 1) .. s[3] .. body:sub(last + 1), true
          end
        end
      end
      local file = scratch.spit(("block%d.lua"):format(i), with_models(body) .. "\n")
      run(quoted(executable) .. " " .. quoted(file), ("%s, Lua block %d"):format(name, i))
    end
  end
  for _, s in ipairs(substitutions) do check.ok(used[s], ("%s has %s"):format(s[1], s[2])) end
  check.ok(ty.io.exists(scratch.file "digits.safetensors"), "the first example saves its model")
end)

check.test("commands in the midst of a text", function()
  for name, document in pairs(all) do
    for _, command in ipairs(document[3]) do
      local file, options = command:match "^%./run (recipes/%S+%.lua)(.*)$"
      if file then
        check.ok(ty.io.exists(root .. file), ("%s: %s is there"):format(name, file))
        local source = ty.io.exists(root .. file) and ty.io.read(root .. file) or ""
        for option in options:gmatch "%-%-([%w-]+)" do
          local shared = " seed device quick out base seeds record threads strict help "
          local own = ('"%s"'):format(option:gsub("-", "_"))
          check.ok(shared:find(" " .. option .. " ", 1, true) or source:find(own, 1, true),
            ("%s: %s has --%s"):format(name, file, option))
        end
      elseif is_command(command) then
        local known = inline[command]
        for prefix in pairs(inline) do known = known or (#prefix > 5 and command:sub(1, #prefix) == prefix) end
        check.ok(known, ("%s: %s is in the list of tests/lua/docs_test.lua"):format(name, command))
      end
    end
  end
end)

check.test("expressions in the midst of a text", function()
  local found = {}
  for _, document in pairs(all) do
    for _, span in ipairs(document[3]) do found[span] = true end
  end
  for expression, before in pairs(expressions) do
    check.ok(found[expression], "is in a document: " .. expression)
    local chunk = assert(load(("local ty = ...\n%s\nreturn %s"):format(before, expression)))
    check.ok(ty.is_tensor(chunk(ty)), expression)
  end
end)

check.test("programs of examples/", function()
  for _, name in ipairs(ty.io.listdir(root .. "examples")) do
    if name:find "%.lua$" then
      run(quoted(executable) .. " " .. quoted(absolute(root .. "examples/" .. name)), "examples/" .. name)
    end
  end
end)

scratch.clean()
check.finish()
