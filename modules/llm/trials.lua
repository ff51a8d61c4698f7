--- Optimizers compared on the pretraining of a small model: each gets the same steps and as many tries to find its rate
-- on the validation part, and is judged on the held-out part by several seeds. Results are kept in a folder, so that
-- recipes share the runs that they have in common.
local ty = require "tycho"
local corpora = require "tycho.llm.corpus"
local train = require "tycho.llm.train"

local M = {}

---@class OptimizerMethod
---@field name string
---@field class string       of ty.optim
---@field settings? table    of it, besides lr, schedule and clip_norm
---@field others? table      settings of the group of what is no matrix of a layer: embeddings, norms

--- Optimizers compared at equal budget on a corpus: of llm.trials.
---@class OptimizerTrials
local Trials = {}
Trials.__index = Trials

--- options: folder (where results are kept), model (as Corpus:model's), train (as llm.train.fit's: steps, batch and so
-- on, without lr and seed), device, say (a function of a line, called after each run that is not found in the folder).
---@param corpus Corpus with a part `validation`
---@param options {folder: string, model?: table, train: table, device?: string, say?: fun(line: string)}
---@return OptimizerTrials
function M.open(corpus, options)
  local none = ty.nn.none
  local o = ty.nn.options("llm.trials.open", options, { folder = "", model = {}, train = {}, device = none,
    say = function() end })
  if o.folder == "" then error("llm.trials.open: folder: expected a folder to keep results in, got none", 2) end
  if not corpus.validation then error("llm.trials.open: the corpus needs a part `validation`", 2) end
  ty.io.mkdir(o.folder)
  return setmetatable({ corpus = corpus, options = o }, Trials)
end

-- The arguments that recipes which compare optimizers declare besides their own and the seeds.
M.arguments = {
  { "steps", 400, "training steps", quick = 3 },
  { "batch", 8, "rows at a time", quick = 2 },
  { "length", 128, "tokens of a row", quick = 32 },
  { "vocabulary", 384, "tokens; 257: bytes", quick = 257 },
  { "width", 128, "hidden size", quick = 64 },
  { "layers", 4, "layers", quick = 1 },
  { "beta2", 0.95, "of all methods" },
  { "tries", 4, "learning rates of each method", quick = 1 },
  { "runs", "", "folder where runs are kept, which recipes may share (default: in the results)", place = true },
}

--- The trials of a recipe that declared M.arguments, on the text that ships, and the parameters of its model.
---@param r Recipe
---@return OptimizerTrials
function M.of_recipe(r)
  local args = r.args
  local folder = args.runs ~= "" and args.runs or r:path "runs"
  local text = r.quick and ty.data.kjv():sub(1, 40000) or nil
  local corpus = corpora.open { folder = r:path "corpus", text = text, validation = true, length = args.length,
    vocabulary = args.vocabulary, every = r.quick and 4 or nil }
  return M.open(corpus, { folder = folder, model = { width = args.width, layers = args.layers },
    train = { steps = args.steps, batch = args.batch, warmup = args.steps // 10, weight_decay = 0 },
    device = r.device ~= "cpu" and r.device or nil, say = function(line) r:say("%s", line) end })
end

--- compare() for each method of a list, { method, first rate }, with the arguments of a recipe; results by the name of
-- the method, also as metrics. Says what came of each.
---@param r Recipe
---@param methods {[1]: OptimizerMethod, [2]: number}[]
---@return table<string, table>
function Trials:of_methods(r, methods)
  local results = {}
  for _, entry in ipairs(methods) do
    local method = entry[1]
    local result = self:compare(method, { rate = entry[2], tries = r.args.tries, seeds = r.args.seeds, seed = r.seed })
    local losses, tried = {}, {}
    for i, loss in ipairs(result.held_out) do losses[i] = ("%.4f"):format(loss) end
    for rate, loss in pairs(result.tried) do tried[#tried + 1] = { rate, loss } end
    table.sort(tried, function(a, b) return a[1] < b[1] end)
    for i, pair in ipairs(tried) do tried[i] = ("%.3g: %.4f"):format(pair[1], pair[2]) end
    r:say("%s: held out %.4f (%s) at rate %.3g, state %d bytes; validation by rate %s", method.name, result.mean,
      table.concat(losses, ", "), result.rate, result.state_bytes, table.concat(tried, ", "))
    r.metrics[method.name] = { rate = result.rate, held_out = result.held_out, mean = result.mean, tried = tried,
      state_bytes = result.state_bytes, parameters = result.parameters }
    results[method.name] = result
  end
  return results
end

--- The baseline: AdamW, on all parameters alike.
---@param beta2 number
---@return OptimizerMethod
function M.adamw(beta2)
  return { name = "AdamW", class = "AdamW", settings = { beta2 = beta2, weight_decay = 0 } }
end

--- GaLore as its paper has it, matrices of layers projected and everything else AdamW's.
---@param rank integer
---@param refresh integer
---@param beta2 number
---@param bits? integer
---@return OptimizerMethod
function M.galore(rank, refresh, beta2, bits)
  return { name = bits and ("GaLore of %d bits"):format(bits) or "GaLore", class = "GaLore", others = { rank = 0 },
    settings = { rank = rank, refresh = refresh, beta2 = beta2, bits = bits } }
end

--- The parameters of a language model: the matrices of its layers, and all others (embeddings, head, norms, biases).
---@param model LanguageModel
---@return Tensor[] matrices, Tensor[] others
function M.split(model)
  local matrices, others = {}, {}
  for name, p in model:named_parameters() do
    table.insert(p.ndim == 2 and name:find "layers%." and matrices or others, p)
  end
  return matrices, others
end

local function optimizer_of(method, model, o, record)
  local matrices, others = M.split(model)
  local rest = { params = others }
  for key, value in pairs(method.others or {}) do rest[key] = value end
  local settings = { lr = o.lr, schedule = o.schedule, clip_norm = o.clip_norm }
  for key, value in pairs(method.settings or {}) do settings[key] = value end
  local optimizer = ty.optim[method.class]({ { params = matrices }, rest }, settings)
  local step = optimizer.step
  function optimizer:step(loss) -- what an optimizer holds may change from time to time
    local norm = step(self, loss)
    record.state_bytes = math.max(record.state_bytes, self:state_bytes())
    return norm
  end
  return optimizer
end

--- One run. Returns the losses on validation and held_out (nats per token; math.huge where training ran away),
--- the most bytes of the optimizer's state, and the number of parameters.
---@param method OptimizerMethod
---@param rate number
---@param seed integer
---@return {validation: number, held_out: number, state_bytes: integer, parameters: integer}
function Trials:run(method, rate, seed)
  local o, corpus = self.options, self.corpus
  local settings = corpora.text_of { method = { method.class, method.settings or {}, method.others or {} }, rate = rate,
    seed = seed, model = o.model, train = o.train, length = corpus.length, tokens = corpus.training.total,
    vocabulary = corpus.tokenizer.size }
  local path = ("%s/%s %g %d.json"):format(o.folder, method.name, rate, seed)
  if ty.io.exists(path) then
    local found = ty.io.load_json(path)
    if found.settings == settings then
      found.validation, found.held_out = found.validation or math.huge, found.held_out or math.huge
      return found
    end
  end
  local began = ty.system.clock()
  ty.manual_seed(seed)
  local model, record = corpus:model(o.model), { state_bytes = 0 }
  if o.device then model:to(o.device) end
  record.parameters = model:count_parameters()
  local fit = { lr = rate, seed = seed, device = o.device, quiet = true,
    optimizer = function(net, given) return optimizer_of(method, net, given, record) end }
  for key, value in pairs(o.train) do fit[key] = value end
  train.fit(model, corpus.training, fit)
  for _, part in ipairs { "validation", "held_out" } do
    local loss = corpus:evaluate(model, part, { device = o.device }).loss
    if loss < math.huge then record[part] = loss end -- a JSON file has no infinities
  end
  record.settings = settings
  ty.io.save_json(path, record)
  record.validation, record.held_out = record.validation or math.huge, record.held_out or math.huge
  o.say(("%s, rate %.3g, seed %d: validation %.4f, held out %.4f, state %d bytes (%.0f s)"):format(method.name, rate,
    seed, record.validation, record.held_out, record.state_bytes, ty.system.clock() - began))
  return record
end

--- The rate with the least validation loss of `tries`: `first`, doubled or halved while the loss falls that way; once
-- the best lies between others, halfway (by ratio) to the better of its neighbours.
---@param method OptimizerMethod
---@param first number
---@param tries integer at least 1
---@param seed integer
---@return number rate, table<number, number> losses by rate
function Trials:tune(method, first, tries, seed)
  local tried = {} -- { power of 2, loss }, by power
  local function try(power)
    table.insert(tried, { power, self:run(method, first * 2.0 ^ power, seed).validation })
    table.sort(tried, function(a, b) return a[1] < b[1] end)
  end
  local function best()
    local least = 1
    for i, entry in ipairs(tried) do if entry[2] < tried[least][2] then least = i end end
    return least
  end
  try(0.0)
  for _ = 2, tries do
    local at = best()
    local power, down, up = tried[at][1], tried[at - 1], tried[at + 1]
    if not up then try(power + 1)
    elseif not down then try(power - 1)
    else try((power + (up[2] < down[2] and up or down)[1]) / 2) end
  end
  local by_rate = {}
  for _, entry in ipairs(tried) do by_rate[first * 2.0 ^ entry[1]] = entry[2] end
  return first * 2.0 ^ tried[best()][1], by_rate
end

--- Chooses the rate with the first seed, then runs all seeds with it. Returns the rate, the losses of all tries, the
-- held-out losses of the seeds and their mean, the most bytes of state and the number of parameters.
---@param method OptimizerMethod
---@param options {rate: number, tries: integer, seeds: integer, seed: integer}
---@return {rate: number, tried: table, held_out: number[], mean: number, state_bytes: integer, parameters: integer}
function Trials:compare(method, options)
  local rate, tried = self:tune(method, options.rate, options.tries, options.seed)
  local result = { rate = rate, tried = tried, held_out = {}, mean = 0.0, state_bytes = 0 }
  for i = 1, options.seeds do
    local run = self:run(method, rate, options.seed + i - 1)
    result.held_out[i], result.parameters = run.held_out, run.parameters
    result.mean = result.mean + run.held_out / options.seeds
    result.state_bytes = math.max(result.state_bytes, run.state_bytes)
  end
  return result
end

--- The row of a recipe's table that compares the losses of two methods: the ratio of their means, and of each seed.
---@param claim string
---@param method table   as compare() returns it
---@param baseline table
---@param bar number     at most
---@return RecipeRow
function M.row(claim, method, baseline, bar)
  local ratios = {}
  for i, loss in ipairs(method.held_out) do ratios[i] = loss / baseline.held_out[i] end
  return { claim = claim, measured = method.mean / baseline.mean, values = ratios, baseline = baseline.held_out,
    bar = bar, below = true }
end

return M
