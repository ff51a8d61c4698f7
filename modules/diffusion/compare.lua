--- Samplers beside a full one: what every recipe of an acceleration has to show. The same network, conditions and
-- seeds; how alike the samples are to those of the full sampler, what was computed for them, and how long it took.
-- Beside each sampler stands the question that it has to answer: what does the full sampler give with fewer steps in
-- its time?
--
--     local comparison = diffusion.compare(model, { 16, 4, 16, 16 }, full, { cache = cached },
--       { condition = condition, null = null, decode = function(x) return painter:decode(x) end, range = 255 })
--     print(comparison)
--     os.exit(r:finish(comparison:rows("cache", { speedup = 1.5, ssim = 0.95 })), true)
local ty = require "tycho"
local arguments = require "tycho.arguments"
local measure = require "tycho.diffusion.measure"

local expect, fail = arguments.expect, arguments.fail
local WHO = "diffusion.compare"

---@class ComparisonRow
---@field name string        "full", the sampler's name, or that with ", fewer steps": the full sampler in its time
---@field steps integer
---@field calls integer      of the network
---@field evaluations table<string, integer>  samples through the network, by branch
---@field evaluated integer  all of them
---@field flops number       of the whole run, as the profiler counts them
---@field seconds number     median
---@field speedup number     seconds of the full sampler / seconds
---@field psnr? number       in dB, to the full sampler's; infinity where equal
---@field ssim? number       where the pictures are at least 11 on a side
---@field perceptual? number with the option features
---@field judged table<string, number>  with the option judges
---@field samples Tensor     what decode gave

--- Samplers compared with a full one: what each costs, and how near its pictures are.
---@class Comparison
---@field list ComparisonRow[]
local Comparison = {}
Comparison.__index = Comparison
Comparison.__name = "Comparison"

local function sampler_like(sampler, steps)
  local copy = {}
  for key, value in pairs(sampler) do copy[key] = value end
  copy.steps = steps
  return setmetatable(copy, getmetatable(sampler))
end

local function count(evaluations)
  local sum = 0
  for _, n in pairs(evaluations) do sum = sum + n end
  return sum
end

-- One run, whose work is counted, and what it gave.
local function measure_run(name, sampler, draw, o)
  local profile, x, run
  if o.flops then
    profile, x, run = ty.profile(function() return draw(sampler) end, { limits = { flops = 1, bandwidth = 1 } })
  else
    x, run = draw(sampler)
  end
  local flops = 0.0
  for _, event in ipairs(profile and profile.events or {}) do flops = flops + event.flops end
  return { name = name, steps = run.step, calls = run.calls, evaluations = run.evaluations,
    evaluated = count(run.evaluations), flops = profile and flops or nil, samples = ty.keep(o.decode(x)), judged = {} }
end

-- Medians of seconds, the samplers in turn.
local function time(rows, samplers, draw, o)
  local all = {}
  for i in ipairs(rows) do all[i] = {} end
  for round = 1, o.rounds do
    for i, sampler in ipairs(samplers) do
      local began = ty.system.clock()
      ty.scope(function() o.wait((draw(sampler))) end)
      all[i][round] = ty.system.clock() - began
    end
  end
  for i, row in ipairs(rows) do row.seconds = ty.stats.median(all[i]) end
end

local function judge(row, full, o)
  local a, b = row.samples:to "f32", full.samples:to "f32"
  row.speedup = full.seconds / row.seconds
  if row ~= full then
    local ratios = measure.psnr(a, b, { range = o.range })
    -- The mean error of all, in dB: one equal picture alone would make a mean of decibels infinite.
    row.psnr = -10 * math.log(((ratios * (-math.log(10) / 10)):exp():mean():item()), 10)
    if a.ndim == 4 and math.min(a.shape[3], a.shape[4]) >= 11 then
      row.ssim = measure.ssim(a, b, { range = o.range }):mean():item()
    end
    if o.features then row.perceptual = measure.perceptual(a, b, o.features):mean():item() end
  end
  for name, fn in pairs(o.judges) do
    row.judged[name] = expect(WHO, ("judges.%s's result"):format(name), fn(row.samples), "a number")
  end
end

local function has(list, name)
  for _, entry in ipairs(list) do
    if entry == name then return true end
  end
  return false
end

--- Compares samplers with a full one. samplers: by name; a sampler, or { sampler, model } for one with a network of its
-- own. options: those of Sampler.sample (condition, null, keep, branches, seeds; by default the seeds 1, 2, ...);
-- decode (pictures of samples; the samples), range (2: between the least and the largest value of pictures), features
-- (a function as measure.perceptual takes it), judges ({}: functions of the pictures, by name, that give numbers),
-- rounds (3: how often each is timed), flops (true: counted by one run under the profiler), fewer (true: the full
-- sampler with fewer steps beside each; or a list of the names of those beside which it shall stand).
---@param model Module|function
---@param shape integer[]
---@param full Sampler
---@param samplers table<string, Sampler|table>
---@param options? table
---@return Comparison
local function compare(model, shape, full, samplers, options)
  expect(WHO, "shape", shape, "a list of integers >= 1")
  if #shape == 0 then fail("%s: shape: expected at least one size, got none", WHO) end
  expect(WHO, "samplers", samplers, "a table")
  local none = arguments.none
  local o = arguments.read(WHO, options, { condition = {}, null = none, keep = none, branches = none, seeds = none,
    decode = none, range = 2, features = none, judges = {}, rounds = 3, flops = true, fewer = true },
    { null = "a table", keep = "a table", branches = "a table", seeds = "a list of integers", decode = "a function",
      range = "a finite number > 0", features = "a function", rounds = "an integer >= 1",
      fewer = "a boolean or a list of strings" })
  o.decode = o.decode or function(x) return x end
  o.wait = function(x) return x:flatten():narrow(0, 0, 1):to("cpu"):item() end -- a GPU is waited for
  local seeds = o.seeds
  if not seeds then
    seeds = {}
    for i = 1, shape[1] do seeds[i] = i end
  end
  local models = {}
  local function draw(sampler)
    return sampler:sample(models[sampler] or model, shape, { condition = o.condition, null = o.null, keep = o.keep,
      branches = o.branches, seeds = seeds })
  end
  local function check_sampler(what, given)
    if type(given) ~= "table" or type(given.sample) ~= "function" then
      fail("%s: %s: expected a sampler, got %s", WHO, what, arguments.describe(given))
    end
    return given
  end
  check_sampler("full", full)
  local names, list, rows = {}, { full }, { measure_run("full", full, draw, o) }
  for name in pairs(samplers) do names[#names + 1] = expect(WHO, "samplers: a name", name, "a string") end
  table.sort(names)
  for _, name in ipairs(names) do
    local given = samplers[name]
    local sampler = check_sampler("samplers." .. name, type(given) == "table" and given.sampler or given)
    if given.sampler then models[sampler] = given.model end
    list[#list + 1], rows[#rows + 1] = sampler, measure_run(name, sampler, draw, o)
  end
  time(rows, list, draw, o)
  if o.fewer then
    local more, plain = {}, {}
    local wanted = o.fewer == true and names or o.fewer
    for i, name in ipairs(wanted) do
      if not samplers[name] then
        fail("%s: fewer[%d]: expected the name of a sampler, got %s", WHO, i, arguments.describe(name))
      end
    end
    for i = 2, #rows do
      if has(wanted, rows[i].name) then
        -- As many steps as fit into its time, at least one.
        local steps = math.floor(rows[1].steps * rows[i].seconds / rows[1].seconds + 0.5)
        local sampler = sampler_like(full, math.max(1, math.min(rows[1].steps, steps)))
        plain[#plain + 1] = sampler
        more[#more + 1] = measure_run(rows[i].name .. ", fewer steps", sampler, draw, o)
      end
    end
    time(more, plain, draw, o)
    table.move(more, 1, #more, #rows + 1, rows)
  end
  local by_name = {}
  for _, row in ipairs(rows) do
    judge(row, rows[1], o)
    by_name[row.name] = row
  end
  return setmetatable({ list = rows, by_name = by_name }, Comparison)
end

--- The row of a name.
---@param name string
---@return ComparisonRow
function Comparison:row(name)
  expect("Comparison:row", "name", name, "a string")
  return self.by_name[name] or fail("Comparison:row: name: expected one of %s, got %s",
    table.concat(self:names(), ", "), name)
end

--- Names of the rows, in order: full, the samplers, the full one with fewer steps in the time of each.
---@return string[]
function Comparison:names()
  local names = {}
  for i, row in ipairs(self.list) do names[i] = row.name end
  return names
end

local texts = {
  speedup = { "%s: times as fast as the full sampler" },
  evaluated = { "%s: samples through the network, of the full sampler's", below = true, ratio = true },
  flops = { "%s: operations, of the full sampler's", below = true, ratio = true },
  psnr = { "%s: PSNR to the full sampler's pictures, in dB" },
  ssim = { "%s: SSIM to the full sampler's pictures" },
  perceptual = { "%s: distance of features to the full sampler's pictures", below = true },
}

--- Rows for the table that a recipe ends with, of one sampler: for each bar, what was measured, with the full sampler
-- in the same time as the baseline. bars: by field: speedup, evaluated and flops (of the full sampler's), psnr, ssim,
-- perceptual. beats: fields in which the sampler has to be better than the full one with fewer steps in its time.
---@param name string
---@param bars table<string, number>
---@param beats? string[]
---@return RecipeRow[]
function Comparison:rows(name, bars, beats)
  local who = "Comparison:rows"
  local row, full = self:row(name), self.list[1]
  local plain = self.by_name[name .. ", fewer steps"]
  expect(who, "bars", bars, "a table")
  expect(who, "beats", beats, "a list of strings or nil")
  local function value(of, field)
    local text = texts[field]
    if not text then
      fail("%s: bars: expected one of evaluated, flops, perceptual, psnr, speedup, ssim, got %s", who, tostring(field))
    end
    local found = of[field]
    if not found then fail("%s: bars.%s: expected one that was measured, got none", who, field) end
    return text.ratio and found / full[field] or found
  end
  local fields, list = {}, {}
  for field in pairs(bars) do fields[#fields + 1] = field end
  table.sort(fields)
  for _, field in ipairs(fields) do
    list[#list + 1] = { claim = texts[field] and texts[field][1]:format(name), measured = value(row, field),
      baseline = plain and field ~= "speedup" and value(plain, field) or nil, bar = bars[field],
      below = texts[field].below }
  end
  for _, field in ipairs(beats or {}) do
    if not plain then fail("%s: beats: expected a comparison with fewer steps, got one without", who) end
    local mine, theirs = value(row, field), value(plain, field)
    local below = texts[field].below
    list[#list + 1] = { claim = texts[field][1]:format(name) .. ", less that with fewer steps in its time",
      measured = mine - theirs, baseline = theirs, bar = 0, below = below }
  end
  return list
end

local columns = { { "sampler", "name" }, { "steps", "steps" }, { "calls", "calls" }, { "evaluations", "evaluated" },
  { "GFLOP", "flops", "%.3g", 1e-9 }, { "seconds", "seconds", "%.3g" }, { "speedup", "speedup", "%.2f" },
  { "PSNR", "psnr", "%.2f" }, { "SSIM", "ssim", "%.4f" }, { "features", "perceptual", "%.4f" } }

function Comparison:__tostring()
  local judges, lines = {}, { {} }
  for name in pairs(self.list[1].judged) do judges[#judges + 1] = name end
  table.sort(judges)
  for c, column in ipairs(columns) do lines[1][c] = column[1] end
  for c, name in ipairs(judges) do lines[1][#columns + c] = name end
  for _, row in ipairs(self.list) do
    local cells = {}
    for c, column in ipairs(columns) do
      local value = row[column[2]]
      cells[c] = value == nil and "" or column[3] and column[3]:format(value * (column[4] or 1)) or tostring(value)
    end
    for c, name in ipairs(judges) do cells[#columns + c] = ("%.4g"):format(row.judged[name]) end
    lines[#lines + 1] = cells
  end
  local widths, out = {}, {}
  for _, cells in ipairs(lines) do
    for c, text in ipairs(cells) do widths[c] = math.max(widths[c] or 0, #text) end
  end
  for i, cells in ipairs(lines) do
    local padded = {}
    for c, text in ipairs(cells) do
      local gap = (" "):rep(widths[c] - #text)
      padded[c] = c == 1 and text .. gap or gap .. text
    end
    out[i] = (table.concat(padded, "  "):gsub("%s+$", ""))
  end
  return table.concat(out, "\n")
end

return compare
