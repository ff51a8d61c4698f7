--- The comment that a recipe begins with, which says once what it is:
--
--     -- Class-conditional diffusion on 8x8 digits                  the title
--     -- claim: 95 % of the samples are recognised as the digit     fields; further lines of one are set in
--     --   that was asked for
--     -- system: ...     paper: ...     time: ...
--     --
--     -- Prose: what the method does, how the comparison is kept fair, what was learnt.
local M = {}

---@class RecipeHead
---@field title string
---@field claim? string
---@field system? string
---@field paper? string
---@field time? string
---@field notes string  the prose, paragraphs with empty lines between them

local fields = { claim = true, system = true, paper = true, time = true }

--- Reads the head of a recipe's file.
---@param path string
---@return RecipeHead
function M.read(path)
  local file <close> = assert(io.open(path))
  local head, notes, last = { title = "" }, {}, nil
  for line in file:lines() do
    local text = line:match("^%-%-+(.*)$")
    if not text and not line:find("^#!") then break end
    text = (text or ""):gsub("%s+$", "")
    local field, value = text:match("^ (%l+): *(.+)$")
    if #notes == 0 and head.title ~= "" and fields[field] then
      head[field], last = value, field
    elseif last and text:find("^   +%S") then
      head[last] = head[last] .. " " .. text:match("^%s*(.*)$")
    elseif head.title == "" then
      head.title = text:match("^%s*(.-)$")
    else
      last = nil
      if text ~= "" or #notes > 0 then notes[#notes + 1] = text:gsub("^ ", "", 1) end
    end
  end
  head.notes = table.concat(notes, "\n"):gsub("%s+$", "")
  return head
end

--- The name of a recipe by its path, "family/name", and the folder that its recipes/ stands in.
---@param path string
---@return string name, string? root
function M.name(path)
  local before, name = path:match "^(.*)recipes/([^/]+/[^/]+)%.lua$"
  if name and (before == "" or before:sub(-1) == "/") then
    return name, before == "" and "." or before == "/" and "/" or before:sub(1, -2)
  end
  return path:match "([^/]+)%.lua$" or "recipe"
end

return M
