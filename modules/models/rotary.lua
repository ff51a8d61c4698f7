--- Rotary position embeddings (Su et al. 2021): the cosines and sines by position, with the scalings that published
-- models use: linear (Chen et al. 2023), dynamic NTK, YaRN (Peng et al. 2023), LongRoPE (Ding et al. 2024) and Llama
-- 3's.
local ty = require "tycho"

local M = {}

local function frequencies(width, theta)
  local list = {}
  for i = 0, width // 2 - 1 do list[i + 1] = theta ^ (-2 * i / width) end
  return list
end

local scalings = {}

function scalings.default(width, theta) return frequencies(width, theta), 1 end

function scalings.linear(width, theta, p)
  local list = frequencies(width, theta)
  for i, f in ipairs(list) do list[i] = f / p.factor end
  return list, 1
end

-- The base grows with the length, so that the longest wave still spans it.
function scalings.dynamic(width, theta, p, length)
  local ratio = p.factor * math.max(length, p.context) / p.context - (p.factor - 1)
  return frequencies(width, theta * ratio ^ (width / (width - 2))), 1
end

-- Slow waves are stretched by the factor, fast ones are kept, those between are blended.
function scalings.yarn(width, theta, p)
  local original = p.original_max_position_embeddings or p.context
  local factor = p.factor or p.context / original
  local function turns_at(turns)
    return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
  end
  local low, high = turns_at(p.beta_fast or 32), turns_at(p.beta_slow or 1)
  if p.truncate ~= false then low, high = math.floor(low), math.ceil(high) end
  low, high = math.max(low, 0), math.min(high, width - 1)
  if low == high then high = high + 0.001 end
  local list = frequencies(width, theta)
  for i, f in ipairs(list) do
    local slow = math.min(math.max((i - 1 - low) / (high - low), 0), 1)
    list[i] = f / factor * slow + f * (1 - slow)
  end
  local function scale(m) return factor <= 1 and 1 or 0.1 * m * math.log(factor) + 1 end
  local attention = p.attention_factor
  if not attention and p.mscale and p.mscale_all_dim then attention = scale(p.mscale) / scale(p.mscale_all_dim) end
  return list, attention or scale(1)
end

function scalings.llama3(width, theta, p)
  local original = p.original_max_position_embeddings
  local list = frequencies(width, theta)
  for i, f in ipairs(list) do
    local turns = original * f / (2 * math.pi) -- within the length it was trained on
    local smooth = (turns - p.low_freq_factor) / (p.high_freq_factor - p.low_freq_factor)
    smooth = math.min(math.max(smooth, 0), 1)
    list[i] = (1 - smooth) * f / p.factor + smooth * f
  end
  return list, 1
end

-- Each frequency by a number of its own: one list for sequences of the length that the model was first trained on, and
-- another for longer ones.
function scalings.longrope(width, theta, p, length)
  local original = p.original_max_position_embeddings
  local divisors = length > original and p.long_factor or p.short_factor
  local list = frequencies(width, theta)
  for i, f in ipairs(list) do list[i] = f / divisors[i] end
  local factor = p.factor or p.context / original
  local scale = p.attention_factor
    or (factor <= 1 and 1 or math.sqrt(1 + math.log(factor) / math.log(original)))
  return list, scale
end

-- Each frequency by a number of its own, as GGUF files have Llama 3's scaling.
function scalings.divided(width, theta, p)
  local list = frequencies(width, theta)
  for i, f in ipairs(list) do list[i] = f / p.divisors[i] end
  return list, 1
end

local wanted = { linear = { "factor" }, dynamic = { "factor" }, yarn = {}, default = {}, divided = {},
  longrope = { "original_max_position_embeddings", "short_factor", "long_factor" },
  llama3 = { "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings" } }

-- The settings of a config.json of any age: rope_parameters, or rope_theta beside rope_scaling, which called its type
-- `type` at first.
local function settings(who, config, width)
  local p = {}
  for _, part in ipairs { config.rope_scaling or {}, config.rope_parameters or {} } do
    for key, value in pairs(part) do
      if value ~= ty.io.null then p[key] = value end
    end
  end
  p.kind = p.rope_type or p.type or "default"
  p.theta = p.rope_theta or config.rope_theta or 10000
  p.context = config.max_position_embeddings
  p.original_max_position_embeddings = p.original_max_position_embeddings or config.original_max_position_embeddings
  p.partial_rotary_factor = p.partial_rotary_factor or config.partial_rotary_factor
  for _, key in ipairs { "factor", "theta", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "partial_rotary_factor" } do
    local value = p[key]
    if value ~= nil and not (type(value) == "number" and value > 0 and value < math.huge) then
      error(("%s: rope setting '%s' must be a positive number, got %s"):format(who,
        key == "theta" and "rope_theta" or key, tostring(value)), 0)
    end
  end
  if p.partial_rotary_factor and p.partial_rotary_factor > 1 then
    error(("%s: rope setting 'partial_rotary_factor' must be at most 1, got %g"):format(who,
      p.partial_rotary_factor), 0)
  end
  if not scalings[p.kind] then
    error(("%s: unknown rope_type '%s'; there are default, linear, dynamic, yarn, longrope, llama3"):format(who,
      tostring(p.kind)), 0)
  end
  for _, key in ipairs { "short_factor", "long_factor" } do
    local list = p[key]
    local count = math.floor(width * (p.partial_rotary_factor or 1)) // 2
    local fits = list == nil or type(list) == "table" and #list == count
    for _, divisor in ipairs(fits and list or {}) do
      fits = fits and type(divisor) == "number" and divisor > 0 and divisor < math.huge
    end
    if not fits then
      error(("%s: rope setting '%s' must be a list of %d positive numbers"):format(who, key, count), 0)
    end
  end
  if p.kind == "divided" and (type(p.divisors) ~= "table" or #p.divisors ~= width // 2) then
    error(("%s: rope_type 'divided' needs %d divisors"):format(who, width // 2), 0)
  end
  for _, key in ipairs(wanted[p.kind]) do
    if not p[key] then error(("%s: rope_type '%s' needs '%s'"):format(who, p.kind, key), 0) end
  end
  return p
end

--- The rotations of positions that attention applies to queries and keys.
---@class Rotary
local Rotary = {}
Rotary.__index = Rotary

--- For heads of `width`, by the settings of a config.
function M.new(who, config, width)
  local p = settings(who, config, width)
  local turned = math.floor(width * (p.partial_rotary_factor or 1))
  if turned % 2 ~= 0 or turned < 2 then
    error(("%s: head_dim %d: expected an even number of elements to turn, got %d"):format(who, width, turned), 0)
  end
  return setmetatable({ width = turned, settings = p, tables = {} }, Rotary)
end

--- For heads of `width` in layers that see all and in those that see a window. Newer configs have the settings of each
-- by its name in rope_parameters; what these lack is in `full` and `sliding`: theta, scaling (a table or nil).
---@return Rotary full, Rotary sliding
function M.pair(who, config, width, full, sliding)
  local by_kind = config.rope_parameters or {}
  local function of(kind, other)
    local p, own = { rope_type = "default", rope_theta = other.theta }, by_kind[kind]
    for _, part in ipairs { other.scaling or {}, type(own) == "table" and own or {} } do
      for key, value in pairs(part) do
        if value ~= ty.io.null then p[key] = value end
      end
    end
    return M.new(who, { rope_parameters = p, max_position_embeddings = config.max_position_embeddings }, width)
  end
  return of("full_attention", full), of("sliding_attention", sliding)
end

--- The frequencies by pair, in radians for each position, and the factor on cos and sin. length (default 1): of the
-- sequence, which the dynamic scaling goes by.
---@return number[] frequencies
---@return number scale
function Rotary:frequencies(length)
  return scalings[self.settings.kind](self.width, self.settings.theta, self.settings, length or 1)
end

-- Which of its tables a scaling takes for sequences of a length, and up to which length that one holds (nil: any).
-- Past the context a table of the dynamic scaling holds for one length alone.
local function variant_of(p, length)
  if p.kind == "dynamic" then
    local most = math.max(length, p.context)
    return most, most
  elseif p.kind == "longrope" then
    local long = length > p.original_max_position_embeddings
    return long, not long and p.original_max_position_embeddings or nil
  end
end

-- Rows of the table that is made next: it grows by doubling, so that a sequence that grows by single tokens seldom asks
-- for another, up to the length that the table holds for.
local function rows(length, kept, most)
  if most and length >= most then return length end
  local room = math.max(64, length, kept and 2 * kept.length or 0)
  return most and math.min(room, most) or room
end

--- cos and sin, at least [length, width / 2], in f32 of the positions from 0, for sequences of `length` in all. They
-- are kept.
---@return Tensor cos
---@return Tensor sin
function Rotary:table(length, device)
  local kept = self.tables[device]
  local variant, most = variant_of(self.settings, length)
  if not kept or kept.length < length or kept.variant ~= variant then
    local room = rows(length, kept, most)
    local list, scale = self:frequencies(length)
    kept = ty.unscoped(ty.no_grad, function()
      local turns = ty.arange(room, { dtype = "f64" }):unsqueeze(1) * ty.tensor(list, { dtype = "f64" })
      local function put(t) return (t * scale):to("f32"):to { device = device } end
      return { cos = put(turns:cos()), sin = put(turns:sin()), length = room, variant = variant }
    end)
    self.tables[device] = kept
  end
  return kept.cos, kept.sin
end

return M
