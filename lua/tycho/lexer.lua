--- Just enough of Lua's lexical rules for the prompt: where names, strings, comments and symbols are in a piece of text
-- that may still be unfinished.

local lexer = {}

-- Position after a short string that begins at `from`, or nil when it does not end.
local function short_string_end(text, from)
  local quote, at = text:sub(from, from), from + 1
  while true do
    local stop = text:find("[\\\n" .. quote .. "]", at)
    if not stop then return nil end
    local c = text:sub(stop, stop)
    if c == quote then return stop + 1 end
    if c == "\n" then return nil end
    at = stop + 2
  end
end

--- Splits text into a list of { kind, value, from, to }, comments left out. Kinds: "name" (keywords too), "number",
-- "string", "symbol" (one character), and last perhaps "open": a string or comment without its end, from its first
-- character to the end of the text.
function lexer.scan(text)
  local list, at = {}, 1
  local function add(kind, to)
    list[#list + 1] = { kind = kind, value = text:sub(at, to - 1), from = at, to = to - 1 }
    at = to
  end
  while true do
    at = text:match("^%s*()", at)
    if at > #text then return list end
    local comment = text:match("^%-%-()", at)
    local level = text:match("^%[(=*)%[", comment or at)
    if level then
      local _, stop = text:find("]" .. level .. "]", comment or at, true)
      if not stop then add("open", #text + 1)
      elseif comment then at = stop + 1
      else add("string", stop + 1) end
    elseif comment then
      local stop = text:match("^[^\n]*()", comment)
      if stop > #text then add("open", stop) end
      at = stop
    elseif text:find("^[\"']", at) then
      local stop = short_string_end(text, at)
      add(stop and "string" or "open", stop or #text + 1)
    elseif text:find("^[%a_]", at) then
      add("name", text:match("^[%w_]+()", at))
    elseif text:find("^%.?%d", at) then
      add("number", text:match("^%.?%d[%w_%.]*()", at))
    else
      add("symbol", at + 1)
    end
  end
end

local opens = { ["function"] = 1, ["if"] = 1, ["do"] = 1, ["repeat"] = 1, ["end"] = -1, ["until"] = -1,
  ["("] = 1, ["{"] = 1, ["["] = 1, [")"] = -1, ["}"] = -1, ["]"] = -1 }

-- The `local` statement at tokens[i]: its names as text, the index of the last token of its left side, and whether it
-- must stay as it is (to-be-closed variables end with their line; _ENV is the compiler's).
local function read_local(tokens, i)
  local names, keep = {}, false
  repeat
    i = i + 1
    local name = tokens[i]
    if not name or name.kind ~= "name" then return nil end
    names[#names + 1] = name.value
    keep = keep or name.value == "_ENV"
    if tokens[i + 1] and tokens[i + 1].value == "<" then
      keep = keep or not tokens[i + 2] or tokens[i + 2].value ~= "const"
      i = i + 3
    end
    i = i + 1
  until not tokens[i] or tokens[i].value ~= ","
  return table.concat(names, ", "), i - 1, keep
end

--- Makes the outermost `local` statements of a chunk assignments to globals, so that what is typed in one line of the
-- prompt is there in the next. Lines stay where they are.
function lexer.globalize(text)
  local tokens, depth, copied, parts = lexer.scan(text), 0, 1, {}
  for i, token in ipairs(tokens) do
    local step = (token.kind == "name" or token.kind == "symbol") and opens[token.value]
    depth = depth + (step or 0)
    local following = tokens[i + 1]
    if depth == 0 and token.value == "local" and token.kind == "name" and following then
      local replacement, last
      if following.value == "function" then
        replacement, last = "", i
      else
        local names, to, keep = read_local(tokens, i)
        if names and not keep then
          local newlines = text:sub(token.from, tokens[to] and tokens[to].to or #text):gsub("[^\n]", "")
          local assigned = tokens[to + 1] and tokens[to + 1].value == "="
          replacement, last = newlines .. names .. (assigned and "" or " = nil;"), to
        end
      end
      if replacement and tokens[last] then
        parts[#parts + 1] = text:sub(copied, token.from - 1) .. replacement
        copied = tokens[last].to + 1
      end
    end
  end
  return table.concat(parts) .. text:sub(copied)
end

return lexer
