--- Steps of a model that tensor parallel ranks share, cut into a few nano-batches: while the sum over ranks of one is
-- on its way, the ranks compute another. How a step is cut is found by trying, for each size of steps. Zhu et al. 2024,
-- "NanoFlow: Towards Optimal Large Language Model Serving Throughput".
--
--     dist.tensor_parallel(model, group)
--     local nano = serve.nano_batches(model, group)
--     local engine = serve.engine(model)               -- the same requests in the same order on all ranks
--
-- A transformer's modules, attention and feed-forward network in turn, each end in a sum over ranks. Nano-batches go
-- through a module one after the other, and each waits for its own sum only when it comes to the next module. In one
-- layer the first tokens of a sequence come before the last, so that even the prompt of one request can be cut.
--
-- The paper overlaps three things within a GPU: products of matrices, reading of keys and values, and exchange. A CPU
-- core does the first two by the same units, one after the other; what is on its way between ranks is what else there
-- is to do something beside.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local Group = require("tycho.dist").RankGroup
local layers = require "tycho.models.layers"
local llm = require "tycho.llm"

local PackedCache = llm.PackedCache

--- A model whose steps are cut.
---@class NanoBatches
---@field model LanguageModel
---@field chosen table<integer, number[]>  by size of steps (floor of log2 of tokens) the shares of nano-batches
---@field found table<integer, number[]>  by size of steps the seconds of each of the tries
---@field off? boolean  true: steps are not cut for now, on all ranks
local Nano = {}
Nano.__index = Nano
Nano.__name = "NanoBatches"

-- ---- sums that are on their way ----

local function begin(group, x, bias)
  return { work = group:all_reduce(x, "sum", { async = true }), bias = bias }
end

local function arrive(sum)
  if not sum or ty.is_tensor(sum) then return sum end
  local y = sum.work:wait()
  return sum.bias and y + sum.bias or y
end

local function each_state(model, visit)
  for _, layer in ipairs(model.model.layers) do
    for _, module in ipairs { layer.self_attn, layer[layer.mlp_name] } do
      local state = rawget(module, "_parallel")
      if state then visit(state) end
    end
  end
end

-- ---- cutting ----

-- Where a step of n tokens is cut: the ends of its parts, none of which is empty.
local function ends_of(n, shares)
  local ends, sum = {}, 0
  for i, share in ipairs(shares) do
    sum = sum + share
    local at = i == #shares and n or math.floor(n * sum + 0.5)
    if at > (ends[#ends] or 0) then ends[#ends + 1] = math.min(at, n) end
  end
  return ends
end

-- The sequences of a part, as what lies before it has them, with how many tokens of each.
local function parts_of(cache, ends)
  local parts, at, first = {}, 1, 0
  local s, done = 1, 0
  for _, last in ipairs(ends) do
    local sequences, counts = {}, {}
    while at <= last do
      local whole = cache.sequences[s]
      local n = math.min(cache.counts[s] - done, last - at + 1)
      sequences[#sequences + 1] = { length = whole.length + done, pages = whole.pages }
      counts[#counts + 1] = n
      at, done = at + n, done + n
      if done == cache.counts[s] then s, done = s + 1, 0 end
    end
    parts[#parts + 1] = { first = first, count = last - first, sequences = sequences, counts = counts }
    first = last
  end
  return parts
end

-- What hidden() gives of a step, in parts.
local function through(self, tokens, cache, places, ends)
  local model, device = self.model, tokens.device
  local list, blocks = parts_of(cache, ends), model.model.layers
  local wanted, w = places and places:tolist() or nil, 1
  for _, part in ipairs(list) do
    part.cache = PackedCache.new(cache.layers, { pool = cache.pool })
    part.cache:begin(part.sequences, part.counts, device)
    local own = tokens:narrow(1, part.first, part.count)
    local cos, sin = model.rotary:table(part.cache.past + part.count, device)
    local positions = part.cache.positions
    part.at = { cos = ty.embedding(cos, positions):unsqueeze(1), sin = ty.embedding(sin, positions):unsqueeze(1),
      causal = true, interleaved = model.interleaved or false, cache = part.cache, tokens = own }
    part.stream = model:embed(own)
    if wanted then -- of its last layer
      local mine = {}
      while wanted[w] and wanted[w] < part.first + part.count do
        mine[#mine + 1], w = wanted[w] - part.first, w + 1
      end
      part.none = #mine == 0
      part.places = ty.tensor(part.none and { 0 } or mine, { dtype = "i64", device = device })
    end
  end
  each_state(model, function(state) state.defer = begin end)
  local ok, problem = pcall(function()
    for i, layer in ipairs(blocks) do
      local last = i == #blocks
      for _, part in ipairs(list) do
        part.at.layer, part.at.places = i, last and part.places or nil
        local x
        part.stream, x = layers.add_norm(layer.input_layernorm, part.stream, arrive(part.more))
        part.more = layer.self_attn(x, part.at)
      end
      for _, part in ipairs(list) do
        local x
        part.stream, x = layers.add_norm(layer.post_attention_layernorm, layers.wanted(part.stream, part.at),
          arrive(part.more))
        part.more = layer[layer.mlp_name](x, part.at)
      end
    end
  end)
  each_state(model, function(state) state.defer = nil end)
  if not ok then error(problem, 0) end
  local results = {}
  for _, part in ipairs(list) do
    local _, x = layers.add_norm(model.model.norm, part.stream, arrive(part.more))
    if not part.none then results[#results + 1] = x end
  end
  return ty.concat(results, 1)
end

-- ---- trying ----

-- Seconds of a step by each of the shares: medians of rounds, the mean over ranks. It is the same step each time: keys
-- and values come to the same places.
local function try(self, tokens, cache, places, options)
  local group, seconds = self.group, {}
  local sequences, counts, count, past = cache.sequences, cache.counts, cache.count, cache.past
  local lengths = {}
  for i, s in ipairs(sequences) do lengths[i] = s.length end
  for k = 1, #self.tries do seconds[k] = {} end
  for round = 0, self.rounds do
    for k, shares in ipairs(self.tries) do
      group:barrier()
      local from = group:clock()
      ty.scope(function()
        if #shares == 1 then self.base(self.model, tokens, options)
        else through(self, tokens, cache, places, ends_of(cache.count, shares)) end
      end)
      if round > 0 then seconds[k][round] = group:clock() - from end
      for i, s in ipairs(sequences) do s.length = lengths[i] end
      cache.sequences, cache.counts, cache.count, cache.past = sequences, counts, count, past
    end
  end
  local medians = {}
  for k, list in ipairs(seconds) do medians[k] = ty.stats.median(list) end
  return group:all_reduce(ty.tensor(medians, { dtype = "f64" }), "mean"):tolist()
end

local function ascending(places)
  local before = -1
  for _, place in ipairs(places:tolist()) do
    if place <= before then return false end
    before = place
  end
  return true
end

local function hidden(self, tokens, options)
  local cache = options and options.cache
  local packed = cache and getmetatable(cache) == PackedCache and cache.count
  local places = options and options.places
  if self.off or not packed or packed < self.least or places and not ascending(places) then
    return self.base(self.model, tokens, options)
  end
  cache:see(tokens, options.mask)
  local shares = self.shares
  if not shares then
    local size = math.floor(math.log(packed, 2))
    if not self.chosen[size] then
      self.found[size] = try(self, tokens, cache, places, options)
      local best = ty.stats.least(self.found[size])
      -- What is no more than noise is not worth it.
      if self.tries[1][2] == nil and self.found[size][best] > 0.97 * self.found[size][1] then best = 1 end
      self.chosen[size] = self.tries[best]
    end
    shares = self.chosen[size]
  end
  local ends = ends_of(packed, shares)
  if #ends == 1 then return self.base(self.model, tokens, options) end
  local y = through(self, tokens, cache, places, ends)
  cache:advance()
  return y
end

--- Makes the model's steps what they were.
---@return LanguageModel model
function Nano:remove()
  rawset(self.model, "hidden", nil)
  return self.model
end

--- Cuts the steps of an engine of a model that dist.tensor_parallel has split (Llama and its like) into nano-batches.
-- All ranks do the same steps. options: shares (of the tokens that each nano-batch gets, of all steps; nil: sought, of
-- each size when it first comes), tries (those that are sought among; whole steps, { 1 }, if they come first, unless
-- another is better by three per cent), rounds (2: of each try, after one that does not
-- count), least (2: steps of fewer tokens are not cut).
---@param model LanguageModel
---@param group RankGroup
---@param options? { shares?: number[], tries?: number[][], rounds?: integer, least?: integer }
---@return NanoBatches
return function(model, group, options)
  local who = "serve.nano_batches"
  arguments.expect(who, "model", model, "a module")
  Group.expect(who, group)
  local o = arguments.read(who, options, { shares = arguments.none,
    tries = { { 1 }, { 0.5, 0.5 }, { 0.4, 0.6 }, { 0.6, 0.4 }, { 0.34, 0.33, 0.33 } }, rounds = 2, least = 2 },
    { shares = "a list of numbers in (0, 1]", tries = "a list of tables", rounds = "an integer >= 1",
      least = "an integer >= 2" })
  if rawget(model, "hidden") then arguments.fail("%s: model: expected one whose steps are not cut yet", who) end
  local body = rawget(model, "model")
  local list = arguments.is_module(body) and rawget(body, "layers")
  if not arguments.is_module(list) or not model.rotary or model.local_rotary or model.bias then
    arguments.fail("%s: model: expected a decoder with rotary positions, got %s", who, arguments.describe(model))
  end
  for i, layer in ipairs(list) do
    if layer.forward ~= layers.DecoderLayer.forward then
      arguments.fail("%s: model: expected layers with one norm before each module, as Llama has them, got %s", who,
        i .. ": " .. getmetatable(layer).__name)
    end
  end
  local split = 0
  each_state(model, function() split = split + 1 end)
  if split ~= 2 * #list then
    arguments.fail("%s: model: expected one that dist.tensor_parallel has split, got %d of %d modules", who, split,
      2 * #list)
  end
  local self = setmetatable({ model = model, group = group, base = model.hidden, shares = o.shares, tries = o.tries,
    rounds = o.rounds, least = o.least, chosen = {}, found = {} }, Nano)
  rawset(model, "hidden", function(_, tokens, given) return hidden(self, tokens, given) end)
  return self
end
