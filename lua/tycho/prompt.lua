--- What the prompt of the `tycho` program does with a line. The program (src/cli/prompt.c) reads lines and runs what
-- compile() makes of them.
--
--   expression         its values are shown and the first is kept in `_`
--   local x = 1        at the outermost level of a line makes a global, so that the next line sees it
--   ?name, ? value     documentation, also help(value), help name and help
--   :time code         runs the code and says how long it took
--   exit, quit         with parentheses or without: the end, unless the user has given the name a value

local columns = require "tycho.columns"
local inspect = require "tycho.inspect"
local lexer = require "tycho.lexer"
local system = require("tycho").core.system

local prompt = {}

local function help(...)
  local text = require("tycho.help").text(...)
  print(text)
end

if rawget(_G, "help") == nil then _G.help = help end

-- The function, or nil and the message; "incomplete" when more lines could make it right.
local function load_code(code)
  local f = load("return " .. code, "=stdin", "t")
  if f then return f end
  local message
  f, message = load(lexer.globalize(code), "=stdin", "t")
  if f then return f end
  -- A short string ends with its line, unless that ends in a backslash.
  local hopeless = message:find("unfinished string near <eof>", 1, true) and not code:find("\\$")
  if message:find("<eof>$") and not hopeless then message = "incomplete" end
  return nil, message
end

local function timed(code)
  local f, message = load_code(code)
  if not f then return nil, message end
  return function()
    local before = system.clock()
    local results = table.pack(f())
    print(("%.6f s"):format(system.clock() - before))
    return table.unpack(results, 1, results.n)
  end
end

--- Makes a function of a line (or several).
---@param text string
---@return function|nil f
---@return string|nil message "incomplete": read another line and try again with both; "leave": end the prompt
function prompt.compile(text)
  local word = text:match("^%s*(%l+)%s*%(?%s*%)?%s*;?%s*$")
  if (word == "exit" or word == "quit") and rawget(_G, word) == nil then return nil, "leave" end
  local question = text:match("^%s*%?%s*(.-)%s*$") or text:match("^%s*help%s+([%a_][%w_.]*)%s*$")
  if word == "help" and not text:find("(", 1, true) and _G.help == help then question = "" end
  if question then
    local f = question ~= "" and load("return " .. question, "=stdin", "t")
    return function()
      local ok, value = pcall(f or error)
      if question == "" then help()
      elseif ok and value ~= nil then help(value, question)
      else help(question) end
    end
  end
  local code = text:match("^%s*:time%s+(.*)$")
  if code then return timed(code) end
  return load_code((text:gsub("^%s*=", "", 1)))
end

--- Shows the results of a line.
function prompt.show(...)
  local first = ...
  if first ~= nil then _G._ = first end
  local parts, separator = {}, "\t"
  for i = 1, select("#", ...) do
    parts[i] = inspect.show((select(i, ...)))
    if parts[i]:find("\n") then separator = "\n" end
  end
  print(table.concat(parts, separator))
end

--- What Tab does: the text to insert at the cursor and, when there are several ways to go on, their list.
---@param text string the line up to the cursor
---@return string insert
---@return string|nil list
function prompt.complete(text)
  local words, length = require("tycho.complete").candidates(text)
  if #words == 0 then return "" end
  local common = words[1]
  for _, word in ipairs(words) do
    while word:sub(1, #common) ~= common do common = common:sub(1, -2) end
  end
  local insert = common:sub(length + 1)
  if #words == 1 or insert ~= "" then return insert end
  return "", columns.down(words, "", 40)
end

return prompt
