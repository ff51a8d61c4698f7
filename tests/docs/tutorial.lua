-- Runs a page of docs/tutorials from top to bottom and compares what it prints with what the page shows.
--
--   tycho tests/docs/tutorial.lua docs/tutorials/1-first-model.md [--write]
--
-- All blocks run in a scratch folder, those of Lua in one state, as lines typed at the prompt. After ``` stands
--
--   lua             run; what it prints is shown by the `text` block that follows, if one does
--   lua fails       an error is expected; the `text` block that follows is its message
--   lua NAME.lua    (also c NAME.c, csv NAME.csv ...) written to that file
--   lua shown       not run
--   sh              commands, one to a line (not run with `shown`); `./run` and `tycho` are the program that runs this
--   text            exactly what the block before printed
--   text about      the same words; numbers may be off by a third
--   text like       as many lines; samples of models differ between kinds of processors
--
-- --write puts what was really printed into the page, and its pictures beside it.
local here = arg and arg[0]:match ".*/" or "tests/docs/"
local check = dofile(here .. "../lua/check.lua")
local ty = require "tycho"

local page, mode = arg[1], arg[2]

-- ---- reading a page ----

-- A list of { text } and { language, words, body }.
local function read(text)
  local parts, at = {}, 1
  while true do
    local from, to, info, body = text:find("\n```([^\n]*)\n(.-)\n?```%f[\n\0]", at)
    if not from then break end
    parts[#parts + 1] = { text = text:sub(at, from - 1) }
    local language, word = info:match "^(%w*)%s*(.*)$"
    parts[#parts + 1] = { language = language, word = word, body = body, info = info }
    at = to + 1
  end
  parts[#parts + 1] = { text = text:sub(at) }
  return parts
end

-- ---- the child: runs the blocks, writes what they printed as JSON ----

local function quoted(text) return "'" .. text:gsub("'", "'\\''") .. "'" end

if mode == "--child" then
  local lexer = require "tycho.lexer"
  local program, root, result = arg[3], arg[4], arg[5]
  local printed = {}
  local env = setmetatable({}, { __index = _G })
  env._G = env
  function env.print(...)
    local list = table.pack(...)
    for i = 1, list.n do list[i] = tostring(list[i]) end
    printed[#printed + 1] = table.concat(list, "\t") .. "\n"
  end
  local function write(...)
    for _, value in ipairs { ... } do printed[#printed + 1] = tostring(value) end
    return env.io.stdout
  end
  env.io = setmetatable({ write = write, stdout = setmetatable({ write = function(_, ...) return write(...) end,
    flush = function() end, setvbuf = function() end }, { __index = io.stdout }) }, { __index = io })

  local out = {}
  for i, part in ipairs(read(ty.io.read(page))) do
    printed = {}
    local problem
    if part.language == "lua" and (part.word == "" or part.word == "fails") then
      local chunk, wrong = load(lexer.globalize(part.body), "=page", "t", env)
      local ok
      if chunk then ok, wrong = xpcall(chunk, function(e) return tostring(e) end) end
      if part.word == "fails" then
        if ok then problem = "an error was expected"
        else printed = { (tostring(wrong):gsub("^[^%s:]+:%d+: ", "")) } end
      elseif not ok then problem = wrong end
    elseif part.word and part.word:find "^[%w_-]+%.%w+$" and part.language ~= "text" then
      ty.io.write_atomic(part.word, part.body .. "\n")
    elseif part.language == "sh" and part.word ~= "shown" then
      for line in part.body:gsub("\\\n", " "):gmatch "[^\n]+" do
        -- What is written for the source tree, from the scratch folder. The program comes last: its path may have
        -- build/release in it.
        local build = program:match "^(.*)/[^/]*$"
        local function literally(text) return (quoted(text):gsub("%%", "%%%%")) end
        line = line:gsub("%-Isrc", "-I" .. literally(root .. "src")):gsub("%$PWD/build/release", "build/release")
          :gsub("build/release", literally(build)):gsub("examples/", literally(root) .. "examples/")
          :gsub("^%./run%f[ ]", literally(program)):gsub("^tycho%f[ ]", literally(program))
        local pipe = assert(io.popen("exec 2>errors; " .. line))
        printed[#printed + 1] = pipe:read "a"
        if not pipe:close() then problem = ("%s: %s"):format(line, ty.io.read "errors") break end
      end
    end
    out[i] = { printed = table.concat(printed), problem = problem }
    if problem then break end
  end
  ty.io.save_json(result, ty.io.array(out))
  os.exit(true, true)
end

-- ---- comparing ----

local function trimmed(text) return (text:gsub("[ \t]+\n", "\n"):gsub("%s+$", "")) end

-- The words of a text with N for its numbers, and the numbers.
local function split_numbers(text)
  local numbers = {}
  local words = text:gsub("%-?%d+%.?%d*e?[-+]?%d*", function(number)
    local value = tonumber(number)
    if not value then return nil end
    numbers[#numbers + 1] = value
    return "N"
  end)
  return words:gsub("[ \t]+", " "), numbers
end

local function lines_of(text) return select(2, (text .. "\n"):gsub("\n", "")) end

-- Why `printed` is not what is shown, or nil.
local function difference(shown, printed, how)
  shown, printed = trimmed(shown), trimmed(printed)
  if shown == printed then return nil end
  if how == "like" then return printed == "" and "nothing was printed"
    or lines_of(shown) ~= lines_of(printed) and "another number of lines" or nil end
  if how ~= "about" then return "not the same" end
  local words, numbers = split_numbers(shown)
  local other, found = split_numbers(printed)
  if words ~= other then return "other words" end
  for i, number in ipairs(numbers) do
    local most = math.max(math.abs(number), math.abs(found[i]))
    if math.abs(number - found[i]) > 0.34 * most + 0.02 then
      return ("%s in place of %s"):format(found[i], number)
    end
  end
end

-- ---- the parent ----

local scratch = dofile(here .. "../lua/scratch.lua")

local here_in_full
do
  local pipe = assert(io.popen "pwd")
  here_in_full = pipe:read "l"
  pipe:close()
end
local function absolute(path) return path:sub(1, 1) == "/" and path or here_in_full .. "/" .. path end

local ok, program = pcall(require, "tycho.program")
local executable = absolute(ok and program.executable or arg[-1])
local root = absolute(check.root)

local parts = read(ty.io.read(page))

check.test(page, function()
  local result = scratch.file ".result.json"
  local line = ("cd %s && exec %s %s %s --child %s %s %s 2>.errors"):format(quoted(scratch.folder), quoted(executable),
    quoted(absolute(arg[0])), quoted(absolute(page)), quoted(executable), quoted(root), quoted(result))
  local ran = os.execute(line)
  check.ok(ran, "the page runs: " .. (ran and "" or ty.io.read(scratch.file ".errors")))
  if not ran then return end
  local out = ty.io.load_json(result)
  local last, blocks
  blocks = 0
  for i, part in ipairs(parts) do
    if part.language == "text" then
      check.ok(last, "a block of text follows what printed it")
      local printed = trimmed(last and last.printed or "")
      if mode == "--write" then
        if difference(part.body, printed, part.word) or part.word ~= "" then part.body = printed end
      else
        local problem = difference(part.body, printed, part.word)
        check.ok(not problem, ("%s\n--- the page shows\n%s\n--- and this was printed\n%s"):format(problem, part.body,
          printed))
      end
      last = nil
    elseif part.language then
      local found = out[i]
      if not found then break end
      check.ok(not found.problem, ("%s\n--- in\n%s"):format(found.problem, part.body))
      local known = part.language == "sh" or part.word ~= "" or part.language == "lua"
      check.ok(known, "the block " .. part.info .. " is run or says why not")
      blocks = blocks + 1
      last = found
    end
  end
  check.ok(blocks >= 5, blocks .. " blocks")
end)

check.test("pictures", function()
  local text, count = ty.io.read(page), 0
  local folder = page:match "^(.*/)" or "./"
  for name in text:gmatch "!%[[^%]]*%]%(([^)]+)%)" do
    count = count + 1
    local made = scratch.file(name)
    check.ok(ty.io.exists(made), name .. " is made by the page")
    if mode == "--write" and ty.io.exists(made) then
      ty.io.write_atomic(folder .. name, ty.io.read(made))
    end
    check.ok(ty.io.exists(folder .. name), name .. " lies beside the page")
    local size = ty.io.exists(folder .. name) and ty.io.stat(folder .. name).size or 0
    check.ok(size > 0 and size < 60000, ("%s has %d bytes"):format(name, size))
  end
  check.ok(count >= 1, "a page has a picture")
end)

check.test("what the text names", function()
  local folder, help = page:match "^(.*/)" or "./", require "tycho.help"
  for _, part in ipairs(parts) do
    local text = part.text or ""
    for address in text:gmatch "%]%(([^)#:]+)[^)]*%)" do
      check.ok(ty.io.exists(folder .. address), "a link to " .. address)
    end
    for name in text:gmatch '`help "([^"]+)"`' do
      local found = help.text(name)
      check.ok(not found:find "^nothing is ", ('help "%s" says: %s'):format(name, found:match "[^\n]*"))
    end
    for file, options in text:gmatch "`%./run (recipes/[%w/_-]+%.lua)([^`]*)`" do
      local source = ty.io.exists(root .. "/" .. file) and ty.io.read(root .. "/" .. file)
      check.ok(source, file .. " is there")
      for option in options:gmatch "%-%-([%w-]+)" do
        check.ok(source and source:find(('"%s"'):format(option:gsub("-", "_")), 1, true), file .. " has --" .. option)
      end
    end
  end
end)

if mode == "--write" and check.failed == 0 then
  local out = {}
  for i, part in ipairs(parts) do
    out[i] = part.text or ("\n```%s\n%s\n```"):format(part.info, part.body)
  end
  ty.io.write_atomic(page, table.concat(out))
end

scratch.clean()
check.finish()
