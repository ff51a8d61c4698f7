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

-- What is marked of each decade, few marks first.
local of_decade = { { 1 }, { 1, 3 }, { 1, 2, 5 }, { 1, 1.5, 2, 3, 4, 5, 7 } }

--- Round values within [low, high], which are given as logarithms: powers of ten, and values between them when there
-- are fewer than five. At least three marks, at most one and a half times `count`.
function ticks.logarithmic(low, high, count)
  local stride = math.max(1, math.ceil((high - low) / count))
  local function marks(factors)
    local values = {}
    for power = math.floor(low / stride) * stride, math.ceil(high), stride do
      for _, factor in ipairs(factors) do
        local value = factor * 10.0 ^ power
        local position = math.log(value, 10)
        if position >= low - 1e-9 and position <= high + 1e-9 then values[#values + 1] = value end
      end
    end
    return values
  end
  local values = marks(of_decade[1])
  for i = 2, stride == 1 and #of_decade or 1 do
    local more = marks(of_decade[i])
    if #values < 5 and #more <= 1.5 * count then values = more end
  end
  local labels = {}
  if #values < 3 then -- less than half a decade: as on a linear axis
    values, labels = ticks.linear(10 ^ low, 10 ^ high, count)
  else
    for i, value in ipairs(values) do
      local plain = value >= 1e-4 and value < 1e6
      labels[i] = plain and ("%.6g"):format(value) or (("%.3g"):format(value):gsub("e([+-])0", "e%1"))
    end
  end
  local positions = {}
  for i, value in ipairs(values) do positions[i] = math.log(value, 10) end
  return positions, labels
end

return ticks
