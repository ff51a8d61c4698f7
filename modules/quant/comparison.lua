--- Ways of compressing a model side by side: what each takes, how far its predictions are from the original's, and how
-- fast it reads and writes.
--
--     local found = quant.compare(model, {
--       { name = "q8_0", apply = function(copy) return quant.quantize(copy, { dtype = "q8_0" }) end },
--       { name = "GPTQ 3", apply = function(copy) return quant.gptq.quantize(copy, data, { bits = 3 }) end },
--     }, { tokens = held_out })
--     print(found)
--     for _, row in ipairs(found:front()) do print(row.name) end
local ty = require "tycho"
local arguments = require "tycho.arguments"
local stored = require "tycho.quant.stored"

local expect, none = arguments.expect, arguments.none
local WHO = "quant.compare"

---@class CompressedRow
---@field name string
---@field bits number        of a weight that was compressed, as its report says; 16 for the original
---@field bytes integer      of the whole model as stored: what was not compressed in half precision
---@field perplexity number
---@field divergence number  mean over positions of the Kullback-Leibler divergence from the original, in nats
---@field agreement number   share of positions whose likeliest token is the original's
---@field prompt number      tokens a second that are read at once
---@field decode number      tokens a second, one after another
---@field faster number      decode, over the original's in the same rounds
---@field peak integer       bytes in use at most while reading and writing, beyond the weights
---@field seconds number     that compressing took

--- What quant.compare() returns: rows, the original first.
---@class Compression
---@field list CompressedRow[]
local Compression = {}
Compression.__index = Compression
Compression.__name = "Compression"

-- Bytes of a model as it would be stored.
local function bytes_of(model, report)
  if report and #report > 0 and report[1].parameters then return stored.model(model, report).bytes end
  local sum, seen = 0, {}
  for _, p in model:named_parameters() do
    if not seen[p] then
      seen[p] = true
      sum = sum + (p:is_floating_point() and 2 * p:numel() or p:nbytes())
    end
  end
  return sum
end

-- Perplexity, divergence and agreement of a model on rows of tokens [n, t].
local function judge(model, original, tokens, batch)
  local sums, count = { nats = 0, divergence = 0, same = 0 }, 0
  ty.no_grad(function()
    for start = 0, tokens.shape[1] - 1, batch do
      ty.scope(function()
        local x = tokens:narrow(0, start, math.min(batch, tokens.shape[1] - start))
        local t = x.shape[2] - 1
        local q = model(x):narrow(1, 0, t):to("f32"):log_softmax(-1)
        local p = rawequal(model, original) and q or original(x):narrow(1, 0, t):to("f32"):log_softmax(-1)
        sums.nats = sums.nats - q:gather(2, x:narrow(1, 1, t):unsqueeze(2)):sum():item()
        sums.divergence = sums.divergence + (p:exp() * (p - q)):sum():item()
        sums.same = sums.same + p:argmax(-1):eq(q:argmax(-1)):to("i64"):sum():item()
        count = count + x.shape[1] * t
      end)
    end
  end)
  return { perplexity = math.exp(sums.nats / count), divergence = math.max(0, sums.divergence / count),
    agreement = sums.same / count }
end

-- Seconds of reading `prompt` tokens at once, and of each of `decode` tokens after them.
local function once(model, tokens, o)
  local prompt, decode
  ty.no_grad(ty.scope, function()
    local x = tokens:narrow(0, 0, 1):narrow(1, 0, o.prompt)
    local cache, began = model:cache(), ty.system.clock()
    local token = model(x, { cache = cache }):narrow(1, o.prompt - 1, 1):argmax(-1)
    token:to("cpu"):item()
    prompt, began = ty.system.clock() - began, ty.system.clock()
    for _ = 1, o.decode do token = model(token, { cache = cache }):argmax(-1):reshape(1, 1) end
    token:to("cpu"):item()
    decode = (ty.system.clock() - began) / o.decode
  end)
  return prompt, decode
end

-- The speeds of a model, with the original's in the same rounds.
local function time(row, model, original, tokens, o)
  local times = { {}, {}, {} }
  local device = model:device()
  once(model, tokens, o)
  collectgarbage()
  local before = ty.memory.stats(device).live
  ty.memory.reset_peak(device)
  once(model, tokens, o)
  row.peak = ty.memory.stats(device).peak - before
  for i = 1, o.rounds do
    times[1][i], times[2][i] = once(model, tokens, o)
    times[3][i] = select(2, once(original, tokens, o))
  end
  row.prompt = o.prompt / ty.stats.median(times[1])
  row.decode = 1 / ty.stats.median(times[2])
  row.faster = ty.stats.median(times[3]) * row.decode
end

--- Compresses copies of a language model in several ways and measures each. ways: a list of { name, apply };
-- apply(copy) changes a copy of the model and returns its report: a table with `bits`, or a list as quant.gptq and its
-- like return. A way that cannot be done to this model is left out of the rows, with its error under `left`. options:
-- tokens (i64 [n, t]: text that nothing was calibrated with), batch (4: rows at a time), prompt (128: tokens that are
-- read), decode (16: tokens that are written), rounds (3: of timing), say (called with a line for each way).
---@param model LanguageModel
---@param ways { name: string, apply: fun(copy: LanguageModel): table? }[]
---@param options table
---@return Compression
local function compare(model, ways, options)
  expect(WHO, "model", model, "a module")
  expect(WHO, "ways", ways, "a list of tables")
  local o = arguments.read(WHO, options, { tokens = none, batch = 4, prompt = 128, decode = 16, rounds = 3,
    say = none }, { tokens = "a tensor", batch = "an integer >= 1", prompt = "an integer >= 1",
    decode = "an integer >= 1", rounds = "an integer >= 1", say = "a function" })
  local tokens = o.tokens
  if not tokens or tokens.ndim ~= 2 or tokens.dtype ~= "i64" or tokens.shape[2] < 2 or tokens:numel() == 0 then
    arguments.fail("%s: tokens: expected i64 [n, t] with t >= 2, got %s", WHO, arguments.describe(tokens))
  end
  o.prompt = math.min(o.prompt, tokens.shape[2])
  tokens = tokens:to { device = model:device() }
  local self = setmetatable({ list = {}, left = {} }, Compression)
  local training = model.training
  model:eval()
  local function add(name, copy, report, seconds)
    local row = judge(copy, model, tokens, o.batch)
    row.name, row.seconds, row.bits = name, seconds, report and report.bits or 16
    row.bytes = bytes_of(copy, report)
    time(row, copy, model, tokens, o)
    self.list[#self.list + 1] = row
    if o.say then
      o.say(("%-16s %5.2f bits, perplexity %.3f, divergence %.4f"):format(name, row.bits, row.perplexity,
        row.divergence))
    end
  end
  add("original", model, nil, 0.0)
  for i, way in ipairs(ways) do
    expect(WHO, ("ways[%d].name"):format(i), way.name, "a string")
    expect(WHO, ("ways[%d].apply"):format(i), way.apply, "a function")
    do
      local copy, began = model:clone():eval(), ty.system.clock()
      local ok, report = pcall(way.apply, copy)
      if ok then
        add(way.name, copy, report, ty.system.clock() - began)
      else
        self.left[#self.left + 1] = { name = way.name, problem = tostring(report) }
        if o.say then o.say(("%-16s left out: %s"):format(way.name, tostring(report))) end
      end
    end
    collectgarbage() -- the next copy may need this one's room
  end
  model:train(training)
  ty.core.program.renew()
  return self
end

--- The row of a name, or nil where that way was left out.
---@param name string
---@return CompressedRow?
function Compression:row(name)
  expect("Compression:row", "name", name, "a string")
  for _, row in ipairs(self.list) do
    if row.name == name then return row end
  end
end

--- Rows that no other beats in both bytes and divergence, the smallest first.
---@return CompressedRow[]
function Compression:front()
  local sorted = table.move(self.list, 1, #self.list, 1, {})
  table.sort(sorted, function(a, b)
    if a.bytes ~= b.bytes then return a.bytes < b.bytes end
    return a.divergence < b.divergence
  end)
  local front, least = {}, math.huge
  for _, row in ipairs(sorted) do
    if row.divergence < least then
      front[#front + 1], least = row, row.divergence
    end
  end
  return front
end

function Compression:__tostring()
  local on_front = {}
  for _, row in ipairs(self:front()) do on_front[row] = "*" end
  local lines = { ("%-17s %6s %8s %10s %10s %9s %9s %9s %7s %8s %8s"):format("", "bits", "MB", "perplexity",
    "divergence", "same", "prompt/s", "decode/s", "faster", "peak MB", "seconds") }
  for _, row in ipairs(self.list) do
    lines[#lines + 1] = ("%-16s%1s %6.2f %8.2f %10.3f %10.5f %8.1f%% %9.0f %9.1f %7.2f %8.2f %8.1f"):format(row.name,
      on_front[row] or "", row.bits, row.bytes / 1e6, row.perplexity, row.divergence, 100 * row.agreement, row.prompt,
      row.decode, row.faster, row.peak / 1e6, row.seconds)
  end
  lines[#lines + 1] = "* nothing smaller is nearer to the original"
  for _, way in ipairs(self.left) do lines[#lines + 1] = ("%s left out: %s"):format(way.name, way.problem) end
  return table.concat(lines, "\n")
end

return compare
