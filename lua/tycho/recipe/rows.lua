--- The rows of the table that a recipe ends with: judged, printed, and as data.
local stats = require "tycho.stats"

local M = {}

--- What a recipe says of one claim.
---@class RecipeRow
---@field claim string
---@field measured? number|string  by default the mean of `values`
---@field values? number[]         one for each seed: the table says their mean and spread
---@field baseline? number|number[] what it is compared with
---@field bar? number|string
---@field below? boolean           passes at the bar and below it; otherwise at the bar and above it
---@field pass? boolean            where bar and measured are no numbers
---@field judged? boolean          false: the row says what this machine cannot measure

local function number_text(value)
  if type(value) == "number" and math.type(value) == "float" then return ("%.4g"):format(value) end
  return value == nil and "" or tostring(value)
end

local function judge(row, measured)
  if row.pass ~= nil then return row.pass end
  if type(measured) ~= "number" or type(row.bar) ~= "number" then
    error(("recipe: '%s': expected pass, or numbers for measured and bar, got %s and %s"):format(tostring(row.claim),
      type(measured), type(row.bar)), 4)
  end
  if row.below then return measured <= row.bar end
  return measured >= row.bar
end

-- Whether the bar lies within the standard error of a mean over seeds: other seeds might end on its other side.
local function within_noise(row, measured, spread)
  return spread ~= nil and type(row.bar) == "number" and math.abs(measured - row.bar) < spread / math.sqrt(#row.values)
end

--- A row's result as data: claim, measured, spread, values, baseline, bar, below, pass (nil: not judged), noise (true:
-- the seeds differ by too much to tell on which side of the bar their mean is).
---@param row RecipeRow
---@param judged boolean
---@return table
function M.result(row, judged)
  local measured, spread = row.measured, nil
  if row.values then
    if measured == nil then measured = stats.mean(row.values) end
    if #row.values > 1 then spread = stats.spread(row.values) end
  end
  local result = { claim = row.claim, measured = measured, spread = spread, values = row.values,
    baseline = row.baseline, bar = row.bar, below = row.below or nil }
  if row.judged ~= false then
    local pass = judge(row, measured)
    if judged then result.pass, result.noise = pass, within_noise(row, measured, spread) or nil end
  end
  return result
end

--- What a result comes to, in a word or two.
function M.verdict(result)
  if result.pass == nil then return "not judged" end
  return (result.pass and "pass" or "FAIL") .. (result.noise and ", within noise" or "")
end

--- The bar as it is written: ">= 0.95".
function M.bar_text(result)
  if type(result.bar) ~= "number" then return number_text(result.bar) end
  return (result.below and "<= " or ">= ") .. number_text(result.bar)
end

--- What was measured, with the spread over seeds where there is one: "0.9713 ± 0.0021".
function M.measured_text(result)
  local text, spread = number_text(result.measured), result.spread
  if not spread then return text end
  -- In a record what is not finite is a word.
  return text .. " ± " .. (type(spread) == "number" and ("%.2g"):format(spread) or spread)
end

-- Pads to a width in characters, not bytes.
local function pad(text, width) return text .. (" "):rep(width - (utf8.len(text) or #text)) end

--- The table as text.
---@param results table[]
---@return string
function M.text(results)
  local cells = { { "claim", "measured", "bar", "" } }
  for _, result in ipairs(results) do
    cells[#cells + 1] = { result.claim, M.measured_text(result), M.bar_text(result), M.verdict(result) }
  end
  local widths, total = { 0, 0, 0, 0 }, 6
  for i in ipairs(widths) do
    for _, row in ipairs(cells) do widths[i] = math.max(widths[i], utf8.len(row[i]) or #row[i]) end
    total = total + widths[i]
  end
  local lines = {}
  for _, row in ipairs(cells) do
    local padded = {}
    for i = 1, 4 do padded[i] = pad(row[i], widths[i]) end
    lines[#lines + 1] = (table.concat(padded, "  "):gsub("%s+$", ""))
  end
  table.insert(lines, 2, ("-"):rep(total))
  return table.concat(lines, "\n") .. "\n"
end

return M
