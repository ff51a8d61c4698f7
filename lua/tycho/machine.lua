--- What this machine is, for records of measurements: require "tycho.machine".
local M = {}

--- The CPU: its name as the maker writes it, with family and model where the name leaves them open ("AMD EPYC" alone
-- stands for many), and its brand, family and model as part of a file's name.
---@return { name: string, file: string }
function M.cpu()
  local found = {}
  local file <close> = io.open "/proc/cpuinfo"
  for line in file and file:lines() or function() end do
    local key, value = line:match "^([%w ]-)%s*:%s*(.*)"
    if line == "" then break end -- one processor is enough
    if key then found[key] = value end
  end
  local name = found["model name"] or "cpu"
  local short = name:gsub("%(.-%)", ""):gsub("[^%w]+", "-"):gsub("^-+", ""):gsub("-+$", ""):lower()
  if found["cpu family"] and not name:find "%d" then
    name = ("%s (family %s, model %s)"):format(name, found["cpu family"], found.model)
  end
  for _, key in ipairs { "cpu family", "model" } do
    if found[key] then short = short .. "-" .. found[key] end
  end
  return { name = name, file = short }
end

return M
