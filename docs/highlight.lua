-- Code as HTML with the classes of style.css: k keywords, s strings, n numbers, c comments.
local lexer = require "tycho.lexer"
local entries = dofile((debug.getinfo(1, "S").source:match "^@(.*/)" or "./") .. "entries.lua")

local M = {}
local escape = entries.escape

local function set(words)
  local t = {}
  for word in words:gmatch "%S+" do t[word] = true end
  return t
end

local lua_words = set [[and break do else elseif end false for function goto if in local nil not or repeat return then
  true until while]]
local c_words = set [[auto bool break case char const continue default do double else enum extern false float for goto
  if int long return short signed sizeof static struct switch true typedef union unsigned void while NULL]]

local function span(class, text) return ('<span class="%s">%s</span>'):format(class, escape(text)) end

--- Lua, also with parts left open.
---@param text string
---@return string html
function M.lua(text)
  local out, at = {}, 1
  local function between(to) -- comments are what the scanner leaves out
    local gap = text:sub(at, to)
    local space, comment, rest = gap:match "^(%s*)(%-%-.-)(%s*)$"
    out[#out + 1] = comment and space .. span("c", comment) .. rest or escape(gap)
  end
  for _, token in ipairs(lexer.scan(text)) do
    between(token.from - 1)
    local class = token.kind == "string" and "s" or token.kind == "number" and "n"
      or token.kind == "name" and lua_words[token.value] and "k"
      or token.kind == "open" and (token.value:find "^%-%-" and "c" or "s")
    out[#out + 1] = class and span(class, token.value) or escape(token.value)
    at = token.to + 1
  end
  between(#text)
  return table.concat(out)
end

--- C.
---@param text string
---@return string html
function M.c(text)
  local out, at = {}, 1
  while at <= #text do
    local comment = text:match("^/%*.-%*/", at) or text:match("^//[^\n]*", at)
    local quoted = text:match('^"[^"\n]*"', at) or text:match("^'[^'\n]*'", at) or text:match("^<[%w_./]+%.h>", at)
    local word = text:match("^[%a_#][%w_]*", at)
    local number = text:match("^%d[%w.]*", at)
    local taken = comment or quoted or word or number or text:sub(at, at)
    local class = comment and "c" or quoted and "s" or number and "n"
      or word and (c_words[word] or word:sub(1, 1) == "#") and "k"
    out[#out + 1] = class and span(class, taken) or escape(taken)
    at = at + #taken
  end
  return table.concat(out)
end

return M
