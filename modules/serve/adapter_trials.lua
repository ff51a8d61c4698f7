--- Ways to serve many adapters of one model, compared on the same requests: none at all, all together over one pool
-- (tycho.serve.adapters), the same with every rank padded to the largest, and one adapter at a time, merged into the
-- weights and taken out again.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local Adapters = require "tycho.serve.adapters"
local Engine = require "tycho.serve.engine"
local traces = require "tycho.serve.traces"

local surgery = ty.nn.surgery
local M = {}

--- Draws adapters and writes them as folders that the Python library peft reads, in f16: number i has the rank ranks[i
-- mod #ranks], and what it adds to a weight is `strength` of the weight's size. options: ranks ({ 4, 8, 16, 32, 64 }),
-- targets (the projections of attention), strength (0.5), seed (0). Returns their paths.
---@param model Module
---@param folder string
---@param count integer
---@param options? table
---@return string[] paths
function M.draw(model, folder, count, options)
  local who = "serve.adapter_trials.draw"
  arguments.expect(who, "model", model, "a module")
  arguments.expect(who, "folder", folder, "a string")
  arguments.expect(who, "count", count, "an integer >= 1")
  local o = arguments.read(who, options, { ranks = { 4, 8, 16, 32, 64 }, strength = 0.5, seed = 0,
    targets = { "q_proj", "k_proj", "v_proj", "o_proj" } }, { ranks = "a list of integers",
    targets = "a list of strings", strength = "a number > 0", seed = "an integer" })
  local layers, paths = surgery.find(who, model, { targets = o.targets }), {}
  local sizes = {}
  for i, layer in ipairs(layers) do sizes[i] = layer.module.weight:to("f32"):square():mean():sqrt():item() end
  ty.io.mkdir(folder)
  for number = 1, count do
    local rank = o.ranks[(number - 1) % #o.ranks + 1]
    ty.scope(function()
      local state = {}
      for i, layer in ipairs(layers) do
        local inputs, outputs = surgery.sizes(layer.module)
        local name = "base_model.model." .. (model.published_prefix or "") .. layer.name
        -- Elements of B A are sums of `rank` products, which alpha = 2 rank doubles.
        local size = math.sqrt(o.strength * sizes[i] / (2 * math.sqrt(rank)))
        local noise = ty.seeded_noise(ty.zeros { (inputs + outputs) * rank }, (o.seed * count + number) * #layers + i)
        noise = (noise * size):to "f16"
        state[name .. ".lora_A.weight"] = noise:narrow(0, 0, inputs * rank):reshape(rank, inputs)
        state[name .. ".lora_B.weight"] = noise:narrow(0, inputs * rank, outputs * rank):reshape(outputs, rank):clone()
      end
      paths[number] = ("%s/%04d"):format(folder, number)
      ty.io.mkdir(paths[number])
      ty.io.save_safetensors(paths[number] .. "/adapter_model.safetensors", state, { format = "pt" })
    end)
    ty.io.write_atomic(paths[number] .. "/adapter_config.json", ty.io.json_encode { peft_type = "LORA", r = rank,
      lora_alpha = 2 * rank, lora_dropout = 0, bias = "none", target_modules = ty.io.array(o.targets) } .. "\n")
  end
  return paths
end

--- Removes what draw() wrote.
---@param paths string[]
function M.discard(paths)
  arguments.expect("serve.adapter_trials.discard", "paths", paths, "a list of strings")
  for _, path in ipairs(paths) do
    for _, name in ipairs { "adapter_model.safetensors", "adapter_config.json" } do
      if ty.io.stat(path .. "/" .. name) then ty.io.remove(path .. "/" .. name) end
    end
    if ty.io.stat(path) then ty.io.remove(path) end
  end
end

-- ---- one at a time ----

--- A model whose weights have one adapter at a time in them. Adapters that were read once stay in host memory.
---@class MergedAdapters
---@field switches integer
local Merged = {}
Merged.__index = Merged

--- Of a model and the paths of its adapters.
---@param model LanguageModel
---@param paths string[]
---@return MergedAdapters
function M.merged(model, paths)
  arguments.expect("serve.adapter_trials.merged", "model", model, "a module")
  arguments.expect("serve.adapter_trials.merged", "paths", paths, "a list")
  return setmetatable({ model = model, paths = paths, pairs_of = {}, plain = {}, on = {}, switches = 0 }, Merged)
end

--- Puts adapter `number` (nil: none) into the weights, in the place of the one that is there.
---@param number? integer
function Merged:use(number)
  if self.number == number then return end
  self.number, self.switches = number, self.switches + 1
  local list = number and self.pairs_of[number]
  if number and not list then
    list = require("tycho.peft").read(self.model, self.paths[number])
    for _, pair in ipairs(list) do pair.a, pair.b = ty.keep(pair.a:to "f32"), ty.keep(pair.b:to "f32" * pair.scale) end
    self.pairs_of[number] = list
  end
  ty.no_grad(ty.scope, function()
    local modules = select(2, surgery.modules(self.model))
    local there = {}
    for _, pair in ipairs(list or {}) do
      local weight = modules[pair.name].weight
      self.plain[pair.name], there[pair.name] = self.plain[pair.name] or ty.keep(weight:clone()), true
      local a, b = pair.a:to { device = weight.device }, pair.b:to { device = weight.device }
      weight:copy_(self.plain[pair.name] + b:matmul(a):to(weight.dtype))
    end
    for name, weight in pairs(self.plain) do
      if not there[name] then modules[name].weight:copy_(weight) end
    end
  end)
  ty.core.program.renew()
end

--- What next_ones of traces.serve does with one adapter at a time: when nobody runs, the adapter of whoever has waited
-- longest is merged, and all that wait for it begin.
---@param engine ServeEngine
---@return fun(waiting: integer[], trace: ServeArrival[]): integer[]
function Merged:turns(engine)
  return function(waiting, trace)
    if #engine.running + #engine.waiting > 0 or #waiting == 0 then return {} end
    local number, ready, rest = trace[waiting[1]].adapter, {}, {}
    for _, i in ipairs(waiting) do table.insert(trace[i].adapter == number and ready or rest, i) end
    for i = 1, math.max(#waiting, #rest) do waiting[i] = rest[i] end
    self:use(number)
    return ready
  end
end

-- ---- the ways ----

---@class AdapterWay
---@field name string
---@field run fun(trace: ServeArrival[], logprobs?: boolean, turn?: function): ServeResults
---@field set? ServeAdapters

--- Ways to serve a trace, each with a model of its own: "base" (adapters are ignored), "together", "padded" (to `pad`),
-- "disk" (together, with `host` bytes of adapters in host memory) and "merged". options: paths (of the adapters),
-- make (a function that gives a model), engine (options of serve.engine), pad (64), host (0). Runs begin without
-- adapters in the pool.
---@param names string[]
---@param options table
---@return table<string, AdapterWay>
function M.ways(names, options)
  local who = "serve.adapter_trials.ways"
  arguments.expect(who, "names", names, "a list of strings")
  local o = arguments.read(who, options, { paths = {}, make = arguments.none, engine = {}, pad = 64, host = 0 },
    { paths = "a list of strings", make = "a function", engine = "a table", pad = "an integer >= 1",
      host = "an integer >= 0" })
  arguments.expect(who, "make", o.make, "a function")
  local ways = {}
  for _, name in ipairs(names) do
    local engine = Engine.new(o.make(), o.engine)
    local way = { name = name, engine = engine }
    if name == "base" then
      function way.run(trace, more, turn) return traces.serve(engine, trace, { logprobs = more, turn = turn }) end
    elseif name == "merged" then
      way.weights = M.merged(engine.model, o.paths)
      function way.run(trace, more, turn)
        return traces.serve(engine, trace, { next_ones = way.weights:turns(engine), logprobs = more,
          turn = turn })
      end
    elseif name == "together" or name == "padded" or name == "disk" then
      local set = Adapters.new(engine, { pad = name == "padded" and o.pad or nil,
        host = name == "disk" and o.host or nil })
      for i, path in ipairs(o.paths) do set:add(tostring(i), path) end
      way.set = set
      function way.run(trace, more, turn)
        set:evict(math.maxinteger)
        return traces.serve(engine, trace, { logprobs = more, turn = turn, submit = function(arrival, asked)
          asked.adapter = arrival.adapter and tostring(arrival.adapter) or nil
          return engine:submit(arrival.prompt, asked)
        end })
      end
    else
      arguments.fail("%s: names: expected base, together, padded, disk or merged, got %s", who,
        arguments.describe(name))
    end
    ways[name] = way
  end
  return ways
end

--- How far two results of the same trace are apart: the share of requests with the same tokens, and the largest
-- difference of the logarithms of their probabilities, relative, up to the first token that differs.
---@param a ServeResults  with logprobs
---@param b ServeResults
---@return number same
---@return number apart
function M.compare(a, b)
  arguments.expect("serve.adapter_trials.compare", "a", a, "a table")
  arguments.expect("serve.adapter_trials.compare", "b", b, "a table")
  local same, apart = 0, 0
  for i, one in ipairs(a.requests) do
    local other, equal = b.requests[i], true
    for j, token in ipairs(one.tokens) do
      equal = equal and token == other.tokens[j]
      if equal and one.logprobs then
        local x, y = one.logprobs[j], other.logprobs[j]
        apart = math.max(apart, math.abs(x - y) / math.max(1, math.abs(x), math.abs(y)))
      end
    end
    same = same + (equal and 1 or 0)
  end
  return same / math.max(1, #a.requests), apart
end

return M
