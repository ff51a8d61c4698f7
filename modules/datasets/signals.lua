--- Signals: beats of a heart as electrodes see them, drawn from parameters that say what is wrong, by sources that
-- differ in device and in who comes to them. Item i depends on (seed, source, split, i) alone. The page is
-- datasets/signals/README.md.
--
--     local set = datasets.load("signals", { source = "holter" })
--     local item = set:get(0)          -- { signal = f32 [2, 500], labels = u8 [8], parameters = { rate = 71, ... } }
--     print(datasets.signals.findings(item.labels))
--
-- A beat is a sum of bells, P, Q, R, S and T, with a plateau between S and T, as McSharry et al. 2003, "A Dynamical
-- Model for Generating Synthetic Electrocardiogram Signals", has them; times and heights are the record's parameters.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local items = require "tycho.datasets.items"
local random = require "tycho.datasets.random"

local M = {}

--- Samples a second, samples of a record and leads.
M.rate, M.samples, M.leads = 100, 500, 2

--- What a record may show, in the order of `labels`: each is true where its parameter is beyond a limit.
M.names = { "tachycardia", "bradycardia", "long PR", "wide QRS", "ST elevation", "ST depression", "ectopic beats",
  "fibrillation" }

-- Who comes, as shares of records by finding; and the device: gain and turn of the leads (radians, against the axis of
-- the heart), noise of the amplifier and of muscles, wander of the baseline and hum (mV), the smoothing of its
-- filter (seconds) and that of its high pass (seconds; 0: none).
local sources = {
  clinic = { prevalence = { 0.16, 0.16, 0.12, 0.16, 0.12, 0.12, 0.14, 0.10 }, gain = { 1.0, 1.0 }, axis = { 0, 1.05 },
    spread = 0.25, noise = 0.02, muscle = 0.02, wander = 0.05, hum = 0.0, smooth = 0.004, high_pass = 0 },
  holter = { prevalence = { 0.10, 0.28, 0.08, 0.10, 0.06, 0.16, 0.26, 0.20 }, gain = { 0.7, 0.9 }, axis = { 0.5, 1.9 },
    spread = 0.4, noise = 0.03, muscle = 0.07, wander = 0.2, hum = 0.02, smooth = 0.012, high_pass = 1.5 },
  patch = { prevalence = { 0.28, 0.10, 0.16, 0.08, 0.14, 0.08, 0.18, 0.24 }, gain = { 0.8, -0.7 },
    axis = { -0.6, 0.3 }, spread = 0.35, noise = 0.04, muscle = 0.04, wander = 0.1, hum = 0.03, smooth = 0.01,
    high_pass = 0.9 },
}

--- Names of the sources.
M.sources = { "clinic", "holter", "patch" }

--- Records of beats with what they show, drawn on demand, as a data set.
---@class Signals
---@field size integer   items
---@field source string
local Signals = ty.data.class "Signals"

function Signals:describe() return ("of the source %s (%s, seed %d)"):format(self.source, self.split, self.seed) end

-- ---- what is wrong ----

local function between(r, low, high) return low + (high - low) * r:number() end

-- About normal, from twelve numbers.
local function normal(r)
  local sum = -6
  for _ = 1, 12 do sum = sum + r:number() end
  return sum
end

-- The parameters of a record: seconds, beats a minute, millivolts. What is normal and what is not lie apart.
local function draw_parameters(r, source)
  local p, has = source.prevalence, {}
  for i = 1, #M.names do has[i] = r:number() < p[i] / (i == 2 and 1 - p[1] or i == 6 and 1 - p[5] or 1) end
  has[2], has[6] = has[2] and not has[1], has[6] and not has[5] -- a heart is fast or slow, a plateau up or down
  has[3] = has[3] and not has[8] -- without P there is no time from it
  return {
    rate = has[1] and between(r, 105, 150) or has[2] and between(r, 40, 56) or between(r, 62, 98),
    pr = has[3] and between(r, 0.215, 0.32) or between(r, 0.12, 0.19),
    qrs = has[4] and between(r, 0.125, 0.17) or between(r, 0.07, 0.105),
    st = has[5] and between(r, 0.12, 0.35) or has[6] and between(r, -0.3, -0.12) or between(r, -0.04, 0.05),
    ectopy = has[7] and between(r, 0.2, 0.4) or 0,
    fibrillation = has[8],
    r = between(r, 0.8, 1.6), t = between(r, 0.2, 0.45), p = between(r, 0.1, 0.2), q = between(r, 0.05, 0.2),
    s = between(r, 0.1, 0.35), axis = source.spread * normal(r), qt = between(r, 0.36, 0.42),
  }
end

--- The labels of parameters, a list of 0 and 1 in the order of datasets.signals.names: rates above 100 and below 60, PR
-- above 0.2 s, QRS above 0.12 s, ST beyond 0.1 mV up and down, ectopic beats, no P in irregular beats.
---@param parameters table
---@return integer[]
function M.labels(parameters)
  local p = arguments.expect("datasets.signals.labels", "parameters", parameters, "a table")
  for _, key in ipairs { "rate", "pr", "qrs", "st", "ectopy" } do
    arguments.expect("datasets.signals.labels", "parameters." .. key, p[key], "a number")
  end
  local fibrillates = p.fibrillation == true
  local list = { p.rate > 100, p.rate < 60, p.pr > 0.2 and not fibrillates, p.qrs > 0.12, p.st > 0.1, p.st < -0.1,
    p.ectopy > 0, fibrillates }
  for i, value in ipairs(list) do list[i] = value and 1 or 0 end
  return list
end

--- The names of what labels [8] say is there.
---@param labels Tensor|integer[]
---@return string[]
function M.findings(labels)
  local who = "datasets.signals.findings"
  if ty.is_tensor(labels) then labels = labels:flatten():tolist() end
  arguments.expect(who, "labels", labels, "a tensor or a list of numbers")
  if #labels ~= #M.names then arguments.fail("%s: labels: expected %d, got %d", who, #M.names, #labels) end
  local list = {}
  for i, value in ipairs(labels) do if value > 0.5 then list[#list + 1] = M.names[i] end end
  return list
end

-- ---- beats ----

local flat = 1000 -- exp(-x^2 / 2) of what is far away: a wave that is not there

-- Adds a wave at `t` seconds: its width (one standard deviation), its height and the angle at which it points.
local function wave(list, t, width, height, angle) list[#list + 1] = { t, width, height, angle } end

-- The waves of one beat whose R is at t. wide: an ectopic beat, from the ventricle: no P, a wide QRS, T turned over.
local function beat(list, p, t, rr, wide)
  local qrs = wide and math.max(0.16, p.qrs * 1.3) or p.qrs
  local r = wide and p.r * 1.3 or p.r
  if not wide and not p.fibrillation then wave(list, t - p.pr, 0.022, p.p, p.axis) end
  wave(list, t - 0.3 * qrs, qrs * 0.11, -p.q * (wide and 0.3 or 1), p.axis)
  wave(list, t, qrs * 0.15, r, p.axis + (wide and 0.7 or 0))
  wave(list, t + 0.33 * qrs, qrs * 0.14, -p.s, p.axis - 0.3)
  local qt = p.qt * math.sqrt(rr) -- Bazett
  local top = t + math.max(qt - 0.1, qrs * 0.5 + 0.12)
  wave(list, top, 0.045 * math.sqrt(rr) + 0.01, p.t * (wide and -1.6 or 1), p.axis + 0.15)
  -- The plateau is three bells side by side.
  local from, to = t + qrs * 0.6, top - 0.02
  for k = 0, 2 do wave(list, from + (to - from) * (k + 0.5) / 3, (to - from) / 4, p.st * 0.85, p.axis) end
end

-- The waves of a record, a list of { time, width, height, angle }.
local function waves_of(r, p)
  local list, rr = {}, 60 / p.rate
  local t, since = -rr * r:number(), 9
  while t < M.samples / M.rate + 0.6 do
    local step = rr * (p.fibrillation and between(r, 0.65, 1.4) or 1 + 0.025 * normal(r))
    local early = p.ectopy > 0 and since >= 2 and (r:number() < p.ectopy or since > 20)
    if p.ectopy > 0 and since == 9 and t > 0.4 then early = true end -- one at least
    since = since + 1
    if early then
      beat(list, p, t - 0.3 * rr, rr, true)
      since, step = 0, step * 1.1 -- and a pause
    else
      beat(list, p, t, rr, false)
    end
    t = t + step
  end
  if p.fibrillation then -- the restless baseline of the atria
    local turn, pace = r:number() * 6.28, between(r, 5, 8)
    for k = 0, math.ceil(M.samples / M.rate * pace) do
      wave(list, k / pace + 0.02 * math.sin(turn + k), 0.035, 0.05 + 0.03 * math.sin(turn + 0.7 * k), p.axis + 0.8)
    end
  end
  return list
end

-- x [n, leads, samples] smoothed by a bell of so many seconds.
local function smoothed(x, seconds)
  if seconds <= 0 then return x end
  local half = math.ceil(3 * seconds * M.rate)
  local t = ty.arange(-half, half + 1, { dtype = "f32" }) / (seconds * M.rate)
  local bell = (t * t * -0.5):exp()
  bell = bell / bell:sum()
  local n, leads, samples = x.shape[1], x.shape[2], x.shape[3]
  local padded = ty.pad(x:reshape(n * leads, 1, samples), { half, half }, "replicate")
  return ty.conv1d(padded, bell:reshape(1, 1, -1)):reshape(n, leads, samples)
end

-- Signals of records, f32 [n, leads, samples]: bells, leads, and what the device adds and takes away.
local function draw(self, b)
  local source, n, most, lists = sources[self.source], #b.positions, 0, {}
  for k, p in ipairs(b.parameters) do
    lists[k] = waves_of(b.generators[k], p)
    most = math.max(most, #lists[k])
  end
  local times, widths, heights = {}, {}, {}
  for lead = 1, M.leads do heights[lead] = {} end
  for k = 1, n do
    for j = 1, most do
      local w, at = lists[k][j] or { flat, 1, 0, 0 }, (k - 1) * most + j
      times[at], widths[at] = w[1], w[2]
      for lead = 1, M.leads do
        heights[lead][at] = w[3] * source.gain[lead] * math.cos(w[4] - source.axis[lead])
      end
    end
  end
  local clock = ty.arange(M.samples, { dtype = "f32" }) / M.rate
  local bells = (clock - ty.tensor(times):reshape(n, most, 1)) / ty.tensor(widths):reshape(n, most, 1)
  bells = (bells:square() * -0.5):exp()
  for lead = 1, M.leads do heights[lead] = ty.tensor(heights[lead]):reshape(n, most) end
  local x = ty.stack(heights, 1):matmul(bells)
  local parts = {}
  for k = 1, n do
    local r, zeros = b.generators[k], ty.zeros(1, M.leads, M.samples)
    local function noise() return ty.seeded_noise(zeros, r:bits()) end
    local wander = ty.zeros(1, M.leads, M.samples)
    for _ = 1, 3 do
      local pace, turn = between(r, 0.1, 0.5), r:number() * 6.28
      wander = wander + (clock * (6.2832 * pace) + turn):sin() * (source.wander * normal(r))
    end
    local hum = (clock * (6.2832 * 50 * 0.37) + r:number() * 6.28):sin() * source.hum -- 50 Hz, folded
    parts[k] = noise() * source.noise + (smoothed(noise(), 0.008) * source.muscle * 2 * r:number()) + wander + hum
  end
  x = smoothed(x, source.smooth) + ty.concat(parts, 0)
  if source.high_pass > 0 then x = x - smoothed(x, source.high_pass / 3) end
  return x
end

-- ---- items ----

local makers = {
  signal = draw,
  labels = function(_, b)
    local rows = {}
    for k, p in ipairs(b.parameters) do rows[k] = M.labels(p) end
    return ty.tensor(rows, { dtype = "u8" })
  end,
  parameters = function(_, b) return b.parameters end,
}

local function batch_of(self, positions)
  local b, result = { positions = positions, parameters = {}, generators = {} }, {}
  local stream = ("signals %s %s"):format(self.source, self.split)
  for k, i in ipairs(positions) do
    b.parameters[k] = draw_parameters(random.new(self.seed, stream .. " parameters", i), sources[self.source])
    b.generators[k] = random.new(self.seed, stream .. " record", i)
  end
  for _, field in ipairs(self.fields) do result[field] = makers[field](self, b) end
  return result
end

--- The items at `positions`: signal f32 [n, 2, 500] in millivolts, labels u8 [n, 8], parameters as a list.
---@param positions integer[]|Tensor
function Signals:batch(positions)
  local list = items.positions("Signals:batch", positions, self.size)
  if #list == 0 then arguments.fail("Signals:batch: positions: expected at least one, got none") end
  return batch_of(self, list)
end

--- Item i: the fields of a batch without their first size.
---@param i integer
function Signals:get(i) return items.first(batch_of(self, items.position("Signals:get", i, self.size))) end

--- Signals [n, leads, samples] as another amplifier and another hand might have them: other gains, noise; at strengths
-- above 1 a fifth of each is lost, the same stretch for all.
---@param x Tensor
---@param strength? number  1: gains and noise differ by 0.3 and 0.05 (mV), one standard deviation
---@return Tensor
function M.disturbed(x, strength)
  local who = "datasets.signals.disturbed"
  arguments.expect(who, "x", x, "a tensor")
  strength = arguments.expect(who, "strength", strength, "a finite number >= 0 or nil") or 1
  if x.ndim ~= 3 then
    arguments.fail("%s: x: expected [n, leads, samples], got %s", who, arguments.describe(x))
  end
  local n, leads, t = table.unpack(x.shape)
  x = x * (1 + 0.3 * strength * ty.randn(n, leads, 1)) + 0.05 * strength * ty.randn_like(x)
  if strength <= 1 then return x end
  local from, clock = math.floor(ty.rand(1):item() * t * 0.8), ty.arange(t)
  return x:masked_fill(clock:ge(from):logical_and(clock:lt(from + t // 5)), 0)
end

--- What datasets.show draws of an item: its leads on millimetre paper, a strip of 5 seconds and 5 mV, and the findings.
---@param item table
function M.cell(item)
  local who = "datasets.signals.cell"
  arguments.expect(who, "item", item, "a table")
  arguments.expect(who, "item.signal", item.signal, "a tensor")
  arguments.expect(who, "item.labels", item.labels, "a tensor")
  local found = M.findings(item.labels)
  return M.trace(item.signal), #found > 0 and table.concat(found, ", ") or "nothing"
end

--- A picture of a signal [leads, samples], u8 [3, 60 * leads, samples]: each lead on a strip of its own, 25 pixels a
-- millivolt, on paper with lines every 20 samples.
---@param signal Tensor
---@return Tensor
function M.trace(signal)
  local who = "datasets.signals.trace"
  arguments.expect(who, "signal", signal, "a tensor")
  if signal.ndim ~= 2 or signal:numel() == 0 then
    arguments.fail("%s: signal: expected [leads, samples], got %s", who, arguments.describe(signal))
  end
  local strips, samples, high = {}, signal.shape[2], 60
  local row = ty.arange(high, { dtype = "f32" }):unsqueeze(1)
  local line = (ty.arange(samples) % 20):eq(0):unsqueeze(0):logical_or((ty.arange(high) % 20):eq(0):unsqueeze(1))
  local paper = ty.where(line, ty.full({ 1 }, 205.0), ty.full({ 1 }, 245.0))
  for lead = 0, signal.shape[1] - 1 do
    local y = (38 - signal:select(0, lead):to "f32" * 25):clamp(1, high - 2)
    local before = ty.concat({ y:narrow(0, 0, 1), y:narrow(0, 0, samples - 1) }, 0)
    local low, top = ty.minimum(y, before) - 0.7, ty.maximum(y, before) + 0.7
    local ink = row:ge(low:unsqueeze(0)):logical_and(row:le(top:unsqueeze(0)))
    local dark = paper:masked_fill(ink, 20)
    strips[lead + 1] = ty.stack({ ty.maximum(dark, paper - 40):masked_fill(ink, 20), dark, dark }, 0)
  end
  return ty.concat(strips, 1):to "u8"
end

-- ---- options ----

local defaults = { split = "training", seed = 0, source = "clinic", length = arguments.none,
  fields = { "signal", "labels", "parameters" } }
local kinds = { split = "a string", seed = "an integer", source = '"clinic" or "holter" or "patch"',
  length = "an integer >= 0", fields = "a list of strings" }

--- Items of an epoch of each split.
M.lengths = { training = 20000, validation = 2000, test = 2000 }

--- datasets.load("signals", options). options: split ("training", "validation", "test"), seed (0), source ("clinic";
-- "holter", "patch": other devices, other patients), length (items of an epoch), fields (of signal, labels,
-- parameters).
---@param options? table
---@return Signals
function M.load(options)
  local who = "datasets.signals"
  local o = arguments.read(who, options, defaults, kinds)
  if not M.lengths[o.split] then
    arguments.fail("%s: split: there is no \"%s\"%s", who, o.split, ty.core.nearest(o.split, M.lengths))
  end
  for _, field in ipairs(o.fields) do
    if not makers[field] then
      arguments.fail("%s: fields: there is no \"%s\"%s", who, field, ty.core.nearest(field, makers))
    end
  end
  return setmetatable({ size = o.length or M.lengths[o.split], split = o.split, seed = o.seed, source = o.source,
    fields = o.fields }, Signals)
end

return M
