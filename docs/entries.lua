-- One entry of the reference as Markdown: the signature, the text of its comment, arguments, results, defaults.
local documented = require "tycho.documented"

local M = {}

--- A name as the anchor of a heading.
function M.anchor(name) return (name:gsub("[^%w_.:-]", "-")) end

local entities = { ["&"] = "&amp;", ["<"] = "&lt;", [">"] = "&gt;", ['"'] = "&quot;" }

--- Text for HTML.
function M.escape(text) return (text:gsub("[&<>\"]", entities)) end

-- Plain text as Markdown: what would be markup is escaped, known names become links.
local function inline(text, link)
  local pieces = {}
  local at = 1
  for from, span, to in text:gmatch "()`([^`]+)`()" do -- code as it stands
    pieces[#pieces + 1] = text:sub(at, from - 1)
    pieces[#pieces + 1] = { code = span }
    at = to
  end
  pieces[#pieces + 1] = text:sub(at)
  for i, piece in ipairs(pieces) do
    if type(piece) == "table" then
      local address = link(piece.code)
      pieces[i] = address and ("[`%s`](%s)"):format(piece.code, address) or "`" .. piece.code .. "`"
    else
      piece = piece:gsub("[\\*<>%[%]&|]", "\\%0"):gsub("%f[%w_]_", "\\_")
      pieces[i] = piece:gsub("%f[%w_]%a[%w_]*[.:][%w_.:]*[%w_]", function(name)
        local address = link(name)
        return address and ("[%s](%s)"):format(name, address) or nil
      end)
    end
  end
  return table.concat(pieces)
end

-- The lines of a comment in runs: prose, lines that are indented a little (each stands for itself), code.
local function runs_of(lines)
  local runs, kind = {}, nil
  for _, line in ipairs(lines) do
    local space = line:match "^ *"
    local now = line:find "^%s*$" and "blank" or #space >= 4 and "code" or #space >= 2 and "lines" or "prose"
    if kind == "code" and now == "blank" then now = "code" end
    if now == "lines" and kind == "code" then now = "code" end
    if now ~= kind then runs[#runs + 1] = { kind = now } end
    table.insert(runs[#runs], line)
    kind = now
  end
  return runs
end

--- The lines of a comment as Markdown.
---@param lines string[]
---@param link fun(name: string): string|nil
---@return string
function M.prose(lines, link)
  local out = {}
  for _, run in ipairs(runs_of(lines)) do
    if run.kind == "code" then
      while run[#run]:find "^%s*$" do run[#run] = nil end
      for i, line in ipairs(run) do run[i] = line:gsub("^    ", "") end
      out[#out + 1] = "```lua\n" .. table.concat(run, "\n") .. "\n```\n"
    elseif run.kind == "lines" then
      for i, line in ipairs(run) do run[i] = inline(line:match "^%s*(.*)$", link) end
      out[#out + 1] = table.concat(run, "\\\n") .. "\n"
    elseif run.kind == "prose" then
      for i, line in ipairs(run) do
        run[i] = inline(line, link):gsub("^(%s*)([-+#])", "%1\\%2"):gsub("^(%s*%d+)([.)])", "%1\\%2")
      end
      out[#out + 1] = table.concat(run, "\n") .. "\n"
    end
  end
  return table.concat(out, "\n")
end

-- "- `name` *type* text" for each.
local function list_of(items, link)
  local lines = {}
  for i, item in ipairs(items) do
    local parts = { "-" }
    if item.name then parts[#parts + 1] = ("`%s`"):format(item.name) end
    if item.type ~= "" then parts[#parts + 1] = ("<code class=\"type\">%s</code>"):format(M.escape(item.type)) end
    if item.text ~= "" then parts[#parts + 1] = inline(item.text, link) end
    lines[i] = table.concat(parts, " ")
  end
  return table.concat(lines, "\n")
end

--- An entry as Markdown.
---@param item ReferenceItem
---@param link fun(name: string): string|nil
---@return string
function M.markdown(item, link)
  local found, out = item.found, {}
  local function add(...) for _, text in ipairs { ... } do out[#out + 1] = text end end
  add(("<h3 id=\"%s\">%s</h3>"):format(M.anchor(item.name), M.escape(item.name)), "")
  if item.same then
    add(("The same as [%s](%s)."):format(item.same.name, link(item.same.name)))
    return table.concat(out, "\n")
  end
  add("```signature\n" .. table.concat(found.signatures, "\n") .. "\n```", "")
  local parts = found.comment and documented.parts(found.comment)
  add(M.prose(parts and parts.text or found.text, link), "")
  for _, note in ipairs(found.notes) do add(inline(note, link), "") end
  if parts then
    if #parts.params > 0 then add(list_of(parts.params, link), "") end
    if #parts.fields > 0 then add("Fields:", "", list_of(parts.fields, link), "") end
    if #parts.returns > 0 then add("Returns:", "", list_of(parts.returns, link), "") end
  end
  if #found.options > 0 then
    local list = {}
    for i, option in ipairs(found.options) do list[i] = "`" .. option .. "`" end
    add("Defaults: " .. table.concat(list, ", "), "")
  end
  local file = found.path and (found.path:match "(lua/tycho/.*)$" or found.path:match "(modules/.*)$")
  if file and not file:find "/meta/" then add(("<p class=\"place\">%s:%d</p>"):format(file, found.line), "") end
  return table.concat(out, "\n")
end

return M
