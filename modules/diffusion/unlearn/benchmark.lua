--- The benchmark of unlearning on a grid of two domains, such as styles and kinds of things: each contender at several
-- strengths, the best of them chosen with other noise and prompts than are reported, and fronts of forgetting and
-- retention. Zhang et al. 2024, "UnlearnCanvas".
local ty = require "tycho"
local arguments = require "tycho.arguments"
local distribution = require "tycho.diffusion.measure"
local retention = require "tycho.diffusion.unlearn.retention"
local tuning = require "tycho.diffusion.unlearn.tuning"

--- Contenders in forgetting, at several strengths, with what each forgets and keeps.
---@class UnlearnBenchmark
---@field painter TextToImage
---@field judge table   see(pictures): numbers by domain; features(pictures): [n, width]
---@field paint table   options of painter:paint
---@field chosen table<string, { key: string, score: number }>
local Benchmark = {}
Benchmark.__index = Benchmark

--- What is to be forgotten: its domain, its number there, and the other domain.
---@class UnlearnTarget
---@field domain string
---@field across string
---@field number integer

--- options: painter, judge, paint (options of painter:paint).
---@param options table
---@return UnlearnBenchmark
local function new(options)
  local o = arguments.read("unlearn.benchmark", options, { painter = false, judge = false, paint = {} },
    { painter = "a table", judge = "a table", paint = "a table" })
  o.chosen, o.fronts = {}, {}
  return setmetatable(o, Benchmark)
end

--- Part of a grid { prompts, labels, image }: all prompts with the target, and of the others each `every`-th.
---@param grid table
---@param target UnlearnTarget
---@param every? integer  (1)
---@return table
function Benchmark.part(_, grid, target, every)
  local rows, count = {}, 0
  for i, number in ipairs(grid.labels[target.domain]:tolist()) do
    if number ~= target.number then count = count + 1 end
    if number == target.number or count % (every or 1) == 0 then rows[#rows + 1] = i end
  end
  local index, part = ty.tensor(rows) - 1, { prompts = {}, labels = {} }
  for k, i in ipairs(rows) do part.prompts[k] = grid.prompts[i] end
  for name, values in pairs(grid.labels) do part.labels[name] = values:index_select(0, index) end
  part.image = grid.image:index_select(0, index)
  return part
end

--- Pictures of prompts. seed: of the first, each further one's is one more.
function Benchmark:draw(prompts, seed, options, painter)
  local o = { seed = seed, batch = 96 }
  for _, list in ipairs { self.paint, options or {} } do
    for key, value in pairs(list) do o[key] = value end
  end
  return ((painter or self.painter):paint(prompts, o))
end

--- What is seen in pictures of a part: forgetting, in_domain and cross_domain as retention() has them, frechet, the
-- distance of what is to stay to the real pictures, retention, the mean of both, and score, the mean of all three.
---@param target UnlearnTarget
---@param part table
---@param seed integer
---@param options? table    further ones of painter:paint
---@param painter? TextToImage
---@return table<string, number>
function Benchmark:look(target, part, seed, options, painter)
  local pictures = self:draw(part.prompts, seed, options, painter)
  local found = retention(part.labels, self.judge:see(pictures), target.domain, target.across, target.number)
  local stay = part.labels[target.domain]:ne(target.number):nonzero():select(1, 0)
  local drawn = pictures:index_select(0, stay:to { device = pictures.device })
  found.frechet = distribution.frechet(self.judge:features(drawn),
    self.judge:features(part.image:index_select(0, stay)))
  found.retention = (found.in_domain + found.cross_domain) / 2
  found.score = (found.forgetting + found.in_domain + found.cross_domain) / 3
  return found
end

--- A method's weights at several strengths: method(look) trains once and calls look(step, report) for a method with
-- steps, whose strengths are steps; or methods, a list of functions, are run one after the other. The painter is left
-- as it was. Returns { states, before, bytes }.
---@param methods fun(look: function)|function[]
---@param steps? integer[]
---@return { states: table[], before: table, bytes: integer }
function Benchmark:strengths(methods, steps)
  local made, report = { states = {} }, nil
  local function keep(each) table.insert(made.states, tuning.state(self.painter, each)) end
  if type(methods) == "function" then
    local wanted = {}
    for _, step in ipairs(steps) do wanted[step] = true end
    report = methods(function(step, each) if wanted[step] then keep(each) end end)
  else
    for _, method in ipairs(methods) do
      if report then tuning.undo(self.painter, report) end
      report = method()
      keep(report)
    end
  end
  made.before, made.bytes = report.before, report.bytes
  tuning.undo(self.painter, report)
  return made
end

--- fn() with weights in the painter that are taken out again.
function Benchmark:with(state, before, fn)
  tuning.use(self.painter, state)
  local ok, result = pcall(fn)
  tuning.use(self.painter, before)
  if not ok then error(result, 0) end
  return result
end

--- The key of the best of tries, by key functions that give a score; they are called when the name is first asked for.
---@param name string
---@param tries table<any, fun(): number>
---@return any key
function Benchmark:best(name, tries)
  if not self.chosen[name] then
    local keys = {}
    for key in pairs(tries) do keys[#keys + 1] = key end
    table.sort(keys)
    self.chosen[name] = { score = -math.huge }
    for _, key in ipairs(keys) do
      local score = tries[key]()
      if score > self.chosen[name].score then self.chosen[name] = { key = key, score = score } end
    end
  end
  return self.chosen[name].key
end

--- The contender whose settings, chosen by best() under names that begin with its own and " of ", had the highest mean
-- score.
---@param names string[]
---@return string name
function Benchmark:winner(names)
  arguments.expect("UnlearnBenchmark:winner", "names", names, "a list of strings")
  local best, winner = -math.huge, nil
  for _, name in ipairs(names) do
    local sum, count = 0, 0
    for key, chosen in pairs(self.chosen) do
      if key:sub(1, #name + 4) == name .. " of " then sum, count = sum + chosen.score, count + 1 end
    end
    if count == 0 then arguments.fail("UnlearnBenchmark:winner: names: nothing was chosen for '%s'", name) end
    if sum / count > best then best, winner = sum / count, name end
  end
  return winner
end

--- Adds what was seen of a contender at a strength to its front.
---@param name string
---@param k integer
---@param seen table<string, number>
function Benchmark:add(name, k, seen)
  self.fronts[name] = self.fronts[name] or {}
  local point = self.fronts[name][k] or { forgetting = 0, retention = 0, count = 0 }
  self.fronts[name][k] = point
  for _, key in ipairs { "forgetting", "retention" } do
    point[key] = (point[key] * point.count + seen[key]) / (point.count + 1)
  end
  point.count = point.count + 1
end

--- How many of these contenders forget more and keep less at the last strength than at the first.
---@param names string[]
---@return integer
function Benchmark:falling(names)
  local count = 0
  for _, name in ipairs(names) do
    local list = self.fronts[name]
    local first, last = list[1], list[#list]
    if last.forgetting > first.forgetting and last.retention < first.retention then count = count + 1 end
  end
  return count
end

--- Draws the fronts into a PNG file.
---@param path string
function Benchmark:plot(path)
  local lines, names = {}, {}
  for name in pairs(self.fronts) do names[#names + 1] = name end
  table.sort(names)
  for i, name in ipairs(names) do
    lines[i] = { label = name, x = {}, y = {} }
    for k, point in ipairs(self.fronts[name]) do lines[i].x[k], lines[i].y[k] = point.forgetting, point.retention end
  end
  ty.plot.line { series = lines, x_label = "forgetting", y_label = "retention" }:save(path)
end

return new
