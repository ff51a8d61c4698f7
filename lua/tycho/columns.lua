--- Lists of words as a terminal shows them best.

local columns = {}

--- Columns of the terminal, 100 where there is none.
---@return integer
function columns.width() return require("tycho").core.system.columns(1) or 100 end

--- Words in columns down the page, with `indent` before each line. With a limit on the lines, a last one says how many
--- words are left out.
---@param words string[]
---@param indent? string
---@param limit? integer
---@return string
function columns.down(words, indent, limit)
  indent = indent or ""
  local widest = 0
  for _, word in ipairs(words) do widest = math.max(widest, #word) end
  local across = math.max(1, (columns.width() - #indent) // (widest + 2))
  local count = math.min(#words, (limit or math.huge) * across)
  local rows, lines = math.ceil(count / across), {}
  for row = 1, rows do
    local line = {}
    for i = row, count, rows do line[#line + 1] = words[i] .. (" "):rep(widest + 2 - #words[i]) end
    lines[row] = indent .. table.concat(line):gsub("%s+$", "")
  end
  if count < #words then lines[#lines + 1] = ("%s... %d more"):format(indent, #words - count) end
  return table.concat(lines, "\n")
end

return columns
