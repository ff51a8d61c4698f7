--- Round numbers for the marks of an axis.
local ticks = {}

local function nice_step(span, count)
  local raw = span / count
  local power = 10 ^ math.floor(math.log(raw, 10))
  for _, factor in ipairs { 1, 2, 2.5, 5, 10 } do
    if factor * power >= raw * (1 - 1e-9) then return factor * power end
  end
  return 10 * power
end

-- Enough decimals to tell neighbours apart.
local function labels_of(values, step)
  local largest = 0
  for _, v in ipairs(values) do largest = math.max(largest, math.abs(v)) end
  local result = {}
  if largest ~= 0 and (largest >= 1e6 or largest < 1e-4) then
    for i, v in ipairs(values) do result[i] = v == 0 and "0" or (("%.3g"):format(v):gsub("e([+-])0", "e%1")) end
    return result
  end
  local decimals = 0
  while decimals < 9 and math.abs(step * 10 ^ decimals - math.floor(step * 10 ^ decimals + 0.5)) > 1e-6 do
    decimals = decimals + 1
  end
  for i, v in ipairs(values) do
    if v == 0 then v = 0.0 end
    result[i] = ("%." .. decimals .. "f"):format(v)
  end
  return result
end

--- About `count` round values within [low, high] and their labels.
function ticks.linear(low, high, count)
  local step = nice_step(high - low, count)
  local values = {}
  for i = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) do values[#values + 1] = i * step end
  return values, labels_of(values, step)
end

--- Powers of ten within [low, high] (given as logarithms), with 2 and 5 between when there are few.
function ticks.logarithmic(low, high, count)
  local decades = high - low
  local stride = math.max(1, math.ceil(decades / count))
  local factors = decades <= 1.2 and { 1, 1.5, 2, 3, 4, 5, 7 } or decades <= 3 and { 1, 2, 5 } or { 1 }
  local values, labels = {}, {}
  for power = math.floor(low), math.ceil(high), stride do
    for _, factor in ipairs(factors) do
      local value = factor * 10.0 ^ power
      local position = math.log(value, 10)
      if position >= low - 1e-9 and position <= high + 1e-9 then
        values[#values + 1] = position
        labels[#labels + 1] = ("%.3g"):format(value)
      end
    end
  end
  return values, labels
end

return ticks
