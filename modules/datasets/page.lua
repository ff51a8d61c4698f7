--- The page of a data set, datasets/NAME/README.md, as a table. It is the one place that says where a set is from:
-- a title, sentences, and a table of two columns with the rows source, licence, made and, for each split, "split NAME".
local ty = require "tycho"
local arguments = require "tycho.arguments"

local M = {}

--- What the page of a set says, see datasets.info.
---@param name string
---@return table
function M.read(name)
  arguments.expect("datasets.page.read", "name", name, "a string")
  local path = ty.data.shipped(name .. "/README.md")
  local info, sentences = { splits = {} }, {}
  for line in ty.io.lines(path) do
    local key, value = line:match "^| ([^|]-) | (.-) |$"
    if key and key ~= "" then
      local split = key:match "^split `?([%w_]+)`?$"
      if split then info.splits[split] = value else info[key] = value end
    elseif line:find "^# " and not info.title then
      info.title = line:sub(3)
    elseif line:find "^#" then
      break -- what comes under further headings is for readers
    elseif not line:find "^|" and line ~= "" then
      sentences[#sentences + 1] = line
    end
  end
  info.text = table.concat(sentences, "\n")
  for _, row in ipairs { "title", "source", "licence", "made" } do
    if not info[row] then arguments.fail("datasets.info: %s: expected a row '%s', found none", path, row) end
  end
  if next(info.splits) == nil then
    arguments.fail("datasets.info: %s: expected a row 'split NAME' for each split, found none", path)
  end
  return info
end

return M
