--- How long a step of a model takes by what is in it: fitted to measured steps of an engine, or read off what others
-- have measured on machines that are not here. A step has tokens of prompts, and one token of each request that
-- decodes.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local M = {}

--- What is in a step.
---@class StepContents
---@field prompt integer   tokens of prompts
---@field pairs number     of these tokens with those that each attends to
---@field decodes integer  requests that decode a token
---@field context number   tokens that these attend to, together
---@field sent? number     bytes of keys and values that the machine sends meanwhile
---@field taken? number    those that it has taken over before

--- Seconds of a step as a function of what is in it.
---@class StepTime
---@field of fun(prompt: integer, pairs: number, decodes: integer, context: number): number
---@field cost? number    of the machine, in dollars an hour
---@field power? number   of the machine, in units that its like share
---@field room? integer   tokens whose keys and values it has room for
---@field token_bytes? number  bytes of the keys and values of a token
---@field send? number        seconds that it works for each byte that it sends (0), besides the link's
---@field take? number        seconds for each byte that it takes over (0)
---@field bandwidth? number    bytes a second of its link
---@field latency? number      seconds of its link

-- ---- measured here ----

--- Lets an engine keep what is in each of its steps and how long it takes, by `clock`, a function that gives seconds.
-- Returns the list, which grows while the engine steps.
---@param engine ServeEngine
---@param clock fun(): number
---@return (StepContents|{ seconds: number })[] steps
function M.watch(engine, clock)
  arguments.expect("serve.step_time.watch", "engine", engine, "a table")
  arguments.expect("serve.step_time.watch", "clock", clock, "a function")
  local steps, contents, before = {}, nil, engine.before
  engine.before = function(list, numbers)
    if before then before(list, numbers) end
    contents = { prompt = 0, pairs = 0, decodes = 0, context = 0 }
    for i, request in ipairs(list) do
      local past, n = request.sequence.length, numbers[i]
      if #request.tokens > 0 and n == 1 then
        contents.decodes, contents.context = contents.decodes + 1, contents.context + past + 1
      else
        contents.prompt, contents.pairs = contents.prompt + n, contents.pairs + n * (past + (n + 1) / 2)
      end
    end
  end
  local step = engine.step
  engine.step = function(self)
    local began = clock()
    contents = nil
    local more = step(self)
    if contents then
      contents.seconds = clock() - began
      steps[#steps + 1] = contents
    end
    return more
  end
  return steps
end

-- Least squares of errors of which each is divided by its weight, with a little of a ridge: a step without an entry
-- says nothing about it.
local function fit(rows, seconds, weights)
  local n, scaled, wanted = #rows[1], {}, {}
  for i, row in ipairs(rows) do
    scaled[i], wanted[i] = {}, { seconds[i] / weights[i] }
    for j, x in ipairs(row) do scaled[i][j] = x / weights[i] end
  end
  local largest = {}
  for j = 1, n do
    largest[j] = 1e-30
    for i = 1, #rows do largest[j] = math.max(largest[j], math.abs(scaled[i][j])) end
    for i = 1, #rows do scaled[i][j] = scaled[i][j] / largest[j] end
  end
  for j = 1, n do
    local row = {}
    for k = 1, n do row[k] = j == k and 1e-4 or 0.0 end
    scaled[#scaled + 1], wanted[#wanted + 1] = row, { 0.0 }
  end
  local f64 = { dtype = "f64" }
  local solution = ty.lstsq(ty.tensor(scaled, f64), ty.tensor(wanted, f64)):flatten():tolist()
  for j = 1, n do solution[j] = solution[j] / largest[j] end
  return solution
end

-- By what is measured at first, then by what is foretold: of steps that take now more and now less, the mean. One that
-- takes eight times what is foretold is none: the machine did something else.
local function fit_again(rows, seconds)
  local weights = seconds
  local by
  for _ = 1, 4 do
    by = fit(rows, seconds, weights)
    local kept_rows, kept_seconds
    kept_rows, kept_seconds, weights = {}, {}, {}
    for i, row in ipairs(rows) do
      local sum = 0
      for j, x in ipairs(row) do sum = sum + by[j] * x end
      if sum > 0 and seconds[i] < 8 * sum then
        local at = #kept_rows + 1
        kept_rows[at], kept_seconds[at], weights[at] = row, seconds[i], sum
      end
    end
    rows, seconds = kept_rows, kept_seconds
  end
  return by
end

--- A model of the seconds of steps, from steps that watch() has kept: linear in the tokens of prompts and the pairs of
-- their attention, in the requests that decode and their contexts, and other numbers for steps without prompts.
---@param steps (StepContents|{ seconds: number })[]
---@return StepTime time
---@return number error  of the seconds of all steps together, for each a share of it: the mean
function M.fit(steps)
  local who = "serve.step_time.fit"
  arguments.expect(who, "steps", steps, "a list of tables")
  local rows, seconds = { prompt = {}, decode = {} }, { prompt = {}, decode = {} }
  for _, s in ipairs(steps) do
    local kind = s.prompt > 0 and "prompt" or "decode"
    local sent, taken = s.sent or 0, s.taken or 0
    table.insert(rows[kind], kind == "prompt" and { 1, s.prompt, s.pairs, sent, taken, s.decodes, s.context }
      or { 1, taken, s.decodes, s.context })
    table.insert(seconds[kind], s.seconds)
  end
  for kind, list in pairs(rows) do
    if #list < 8 then arguments.fail("%s: steps: expected at least 8 of kind %s, got %d", who, kind, #list) end
  end
  local p, d = fit_again(rows.prompt, seconds.prompt), fit_again(rows.decode, seconds.decode)
  local least = math.huge
  for _, s in ipairs(steps) do least = math.min(least, s.seconds) end
  local time = { prompt = p, decode = d, send = math.max(0, p[4]), take = math.max(0, d[2]),
    of = function(prompt, pair, decodes, context)
      local t
      if prompt > 0 then t = p[1] + p[2] * prompt + p[3] * pair + p[6] * decodes + p[7] * context
      else t = d[1] + d[3] * decodes + d[4] * context end
      return math.max(t, least)
    end }
  local off = 0
  for _, s in ipairs(steps) do
    local t = time.of(s.prompt, s.pairs, s.decodes, s.context) + time.send * (s.sent or 0) + time.take * (s.taken or 0)
    off = off + math.abs(t / s.seconds - 1)
  end
  return time, off / #steps
end

-- ---- measured by others ----

-- A line through points, going on beyond the last two.
local function through(x, y)
  return function(at)
    local i = 1
    while i < #x - 1 and at > x[i + 1] do i = i + 1 end
    if at <= x[1] then return y[1] end
    return y[i] + (at - x[i]) / (x[i + 1] - x[i]) * (y[i + 1] - y[i])
  end
end

-- Milliseconds of a prompt of so many tokens, and of a token with so many tokens of context in all of the batch, of
-- machines of 8 GPUs: medians of what the authors of Splitwise have measured (SplitwiseSim, data/perf_model.csv, MIT
-- licence), whose prices (dollars an hour and GPU) and powers these are too. A power cap slows prompts down alone.
local tokens = { 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768 }
local machines = {
  ["dgx-a100"] = { cost = 8 * 2.21, power = 24.8, bandwidth = 25e9 },
  ["dgx-h100"] = { cost = 8 * 4.76, power = 44, bandwidth = 50e9 },
  ["dgx-h100-capped"] = { cost = 8 * 4.76, power = 0.7 * 44, bandwidth = 50e9 },
}
-- Bytes of keys and values of a token in f16, and of weights: what is left of 90 % of 8 x 80 GiB is room for tokens.
local sizes = { ["bloom-176b"] = { token = 70 * 2 * 14336 * 2, weights = 352e9 },
  ["llama2-70b"] = { token = 80 * 2 * 1024 * 2, weights = 138e9 } }
local measured = {
  ["bloom-176b"] = {
    ["dgx-a100"] = { { 79.7, 99.2, 174.4, 287.5, 536.1, 1332.6, 3591.5, 5782.0, 11251.8 },
      { 47.61, 47.71, 49.31, 49.44, 50.19, 51.63, 54.27, 65.38, 96.58 } },
    ["dgx-h100"] = { { 48.3, 51.2, 76.1, 132.2, 252.0, 649.6, 1411.6, 2521.9, 4996.5 },
      { 35.74, 36.15, 36.17, 36.33, 36.74, 37.53, 39.02, 45.84, 63.82 } },
    ["dgx-h100-capped"] = { { 62.8, 66.5, 99.0, 171.9, 327.6, 844.5, 1835.0, 3278.5, 6495.4 },
      { 35.74, 36.15, 36.17, 36.33, 36.74, 37.53, 39.02, 45.84, 63.82 } },
  },
  ["llama2-70b"] = {
    ["dgx-a100"] = { { 65.3, 66.8, 93.0, 160.9, 282.7, 708.4, 1781.0, 3524.5, 7554.0 },
      { 43.03, 43.48, 45.03, 44.56, 45.7, 46.47, 48.47, 53.02, 71.61 } },
    ["dgx-h100"] = { { 58.2, 51.7, 53.9, 77.7, 134.4, 376.2, 831.5, 1551.7, 2936.3 },
      { 29.87, 28.27, 30.56, 29.97, 31.63, 31.33, 32.59, 38.62, 50.16 } },
    ["dgx-h100-capped"] = { { 75.6, 67.2, 70.0, 101.0, 174.8, 489.1, 1080.9, 2017.2, 3817.2 },
      { 29.87, 28.27, 30.56, 29.97, 31.63, 31.33, 32.59, 38.62, 50.16 } },
  },
}

--- A machine of the paper with a model: "dgx-a100", "dgx-h100" or "dgx-h100-capped" (to 70 % of its power), and
-- "bloom-176b" or "llama2-70b". A step with prompts takes what a prompt of all its tokens does, and what the contexts
-- of those that decode add to a step without: nothing else for being mixed, where the authors add a tenth. Parts of a
-- prompt are not charged for attending to those before. Both are to the good of machines that mix. options: contexts
-- (true; false: contexts cost nothing, as in the authors' simulator, which asks for the time of a token by the number
-- of requests that decode in place of the tokens that they attend to).
---@param machine string
---@param model string
---@param options? { contexts?: boolean }
---@return StepTime
function M.published(machine, model, options)
  local who = "serve.step_time.published"
  local o = arguments.read(who, options, { contexts = true }, { contexts = "a boolean" })
  arguments.expect(who, "machine", machine, '"dgx-a100" or "dgx-h100" or "dgx-h100-capped"')
  arguments.expect(who, "model", model, '"bloom-176b" or "llama2-70b"')
  local of = measured[model][machine]
  local prompt_time, token_time = through(tokens, of[1]), through(tokens, of[2])
  local floor, size = token_time(1), sizes[model]
  local time = { latency = 1e-4, token_bytes = size.token,
    room = math.floor((0.9 * 8 * 80 * 2 ^ 30 - size.weights) / size.token),
    of = function(prompt, _, decodes, context)
      if not o.contexts then context = decodes end
      if prompt == 0 then return 1e-3 * token_time(context) end
      return 1e-3 * (prompt_time(prompt + decodes) + token_time(context) - floor)
    end }
  for key, value in pairs(machines[machine]) do time[key] = value end
  return time
end

return M
