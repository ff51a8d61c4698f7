--- Inference by several ranks, programmed as if it were one: an engine, called with sequences, returns at once what is
-- to come of them. Du et al. 2022, "EnergonAI: An Inference System for 10-100 Billion Parameter Transformer Models".
--
--     local engine <close> = dist.inference(make_model, { tensor = 2, pipeline = 4 })
--     for i, batch in ipairs(batches) do coming[i] = engine(batch) end
--     for i, future in ipairs(coming) do logits[i] = future:wait() end
--
-- The program that has the engine tells every rank of every batch, and waits for none of them; ranks send each other
-- what lies between. Each rank takes the batches in the order of their numbers, so that all ranks which share a layer
-- are at the same one, and goes on to the next when it has sent on what it has computed: as many batches are under way
-- as there are stages. Sequences of all lengths are packed one behind the other, and nothing is computed for padding.
-- Layers for which a rank has no room are with peers (dist.peer_memory).
local ty = require "tycho"
local arguments = require "tycho.arguments"
local peer_memory = require "tycho.dist.peer_memory"
local pipeline = require "tycho.dist.pipeline"
local ranks_of = require "tycho.dist.ranks"
local tensor_parallel = require "tycho.dist.tensor_parallel"

local expect, fail = arguments.expect, arguments.fail

--- What is to come of a batch.
---@class InferenceFuture
---@field number integer  of the batch, from 1 on
local Future = {}
Future.__index = Future
Future.__name = "InferenceFuture"

--- Ranks that compute what a model makes of sequences.
---@class InferenceEngine
---@field clock number  seconds: when the batches that were waited for were done, by the clocks of the ranks, from
-- restart() on; a batch begins no earlier than when the ones before it were waited for
local Engine = {}
Engine.__index = Engine
Engine.__name = "InferenceEngine"

-- ---- a rank ----

-- The layers of a rank that computes, the number of the first, and which of them are away. o.count: layers of all.
local function own_layers(group, tensor, make, o)
  local rank, layers, movable = group.rank, {}, {}
  local model = make():eval()
  model:requires_grad_(false)
  if tensor.size > 1 then tensor_parallel(model, tensor) end
  local all = pipeline.layers(model)
  local costs = o.costs
  if not costs then
    costs = {}
    for i, layer in ipairs(all) do
      costs[i] = 0
      for _, p in ipairs(layer:parameters()) do costs[i] = costs[i] + p:numel() end
    end
    costs[1] = 0 -- rows are looked up
  end
  local part = pipeline.divide(costs, o.pipeline)[rank // o.tensor + 1]
  for i = part[1], part[2] do
    layers[#layers + 1] = all[i]
    movable[#layers] = i > 1 and i < #all
  end
  o.count = #all
  if o.peers == 0 then return layers, part[1] end
  local peers = {}
  for k = 1, o.peers do peers[k] = o.tensor * o.pipeline + rank * o.peers + k - 1 end
  return layers, part[1], peer_memory.new(group, layers, movable, peers, { room = o.room, prefetch = o.prefetch })
end

-- Runs in the thread of a rank: returns the function that does what the engine asks.
local function work(group, make, o)
  local workers = o.tensor * o.pipeline
  local rank, zero, expected = group.rank, 0, 0
  local at_worker = rank < workers
  local tensor = group:split(at_worker and rank // o.tensor or -1)

  local function restart()
    group:reset_memory()
    group:barrier()
    zero = group:clock()
    if group.first.events then group:record() end
    return true
  end

  if not at_worker then
    local serve = peer_memory.keeper(group, (rank - workers) // o.peers)
    return function(task)
      if task.restart then return restart() end
      if task.stats then
        local live, peak = group:memory()
        return { live = live, peak = peak }
      end
      serve()
      return true
    end
  end

  local stage = rank // o.tensor
  local layers, first, memory = own_layers(group, tensor, make, o)
  local rows, elements = 0, 0 -- what layers in between got, in how many calls
  group:reset_memory()
  if o.memory > 0 then ty.core.comm_core.limit_memory(o.memory) end
  if o.record then group:record() end

  -- What the layers of this rank make of x; packed: as PipelineLayer takes it.
  local function compute(x, task, packed)
    for i, layer in ipairs(layers) do
      local number = first + i - 1
      if number > 1 and number < o.count then
        rows, elements = rows + x.shape[1] * x.shape[2], elements + 1
      end
      if number == o.count and task.places then -- only what is wanted
        x = x:flatten(0, 1):index_select(0, task.places):unsqueeze(0)
      end
      if memory then memory:need(i) end
      x = ty.scope(layer, x, packed) -- of what lies between nothing is kept
      if memory then memory:done(i) end
    end
    return x
  end

  return function(task)
    if task.restart then
      rows, elements = 0, 0
      return restart()
    end
    if task.stats then
      local live, peak = group:memory()
      return { live = live, peak = peak, rows = rows, layers = elements, events = group.first.events, zero = zero,
        away = memory and #memory.away or 0, moved = memory and memory.moved or 0 }
    end
    expected = expected + 1
    if task.number ~= expected then error(("batch %d came where %d was to come"):format(task.number, expected), 0) end
    return ty.no_grad(ty.scope, function()
      local x
      if stage == 0 then
        group:advance(math.max(0, task.since - (group:clock() - zero)))
        x = task.tokens
      else
        x = group:receive(rank - o.tensor, task.number)
      end
      local packed = task.cu_seqlens and { cu_seqlens = task.cu_seqlens, positions = task.positions,
        longest = task.longest }
      x = group:span("forward " .. task.number, compute, x, task, packed)
      if stage < o.pipeline - 1 then
        group:send(x, rank + o.tensor, task.number)
        return true
      end
      if tensor.rank > 0 then return true end
      return ty.keep(x:contiguous()), group:clock() - zero
    end)
  end
end

-- ---- the engine ----

local DEFAULTS = { tensor = 1, pipeline = 1, packed = true, last = true, costs = arguments.none, peers = 0, room = 0,
  prefetch = true, memory = 0, record = false, latency = 0, bandwidth = math.huge, seed = 0 }
local WANTED = { tensor = "an integer >= 1", pipeline = "an integer >= 1", packed = "a boolean", last = "a boolean",
  costs = "a list of finite numbers >= 0", peers = "an integer >= 0", room = "an integer >= 0",
  prefetch = "a boolean", memory = "an integer >= 0", record = "a boolean", latency = "a finite number >= 0",
  bandwidth = "a number > 0", seed = "an integer" }

--- An engine of tensor * pipeline ranks, each a thread. make() gives the model on each of them, the same: a decoder
-- with rotary positions, of which each rank keeps its part. options: tensor (1: ranks that share a layer), pipeline (1:
-- stages), packed (true; false: sequences are filled up to the longest, for comparison), last (true: logits of the last
-- token of each sequence; false: of all), costs (of the layers, as dist.pipeline.costs() has them, by which they are
-- divided: by their parameters), peers (0: ranks for each of these that keep layers for it), room (with peers: bytes of
-- weights that a rank may have), prefetch (true: they come before they are needed), memory (0: no limit; bytes of
-- tensors that such a rank may have once it has its layers), record (false: true keeps what ranks did when, for
-- events()), latency, bandwidth, seed as dist.run has them.
---@param make fun(): LanguageModel
---@param options? table
---@return InferenceEngine
local function new(make, options)
  local who = "dist.inference"
  expect(who, "make", make, "a function")
  local o = arguments.read(who, options, DEFAULTS, WANTED)
  if o.peers == 0 and o.room > 0 then fail("%s: room: expected peers with it, got none", who) end
  local workers = o.tensor * o.pipeline
  local self = setmetatable({ clock = 0, number = 0, done = 0, results = {}, o = o, workers = workers,
    tasks = {} }, Engine)
  self.ranks = ranks_of.open(workers * (1 + o.peers), work, { latency = o.latency, bandwidth = o.bandwidth,
    seed = o.seed }, make, o)
  return self
end

local function check(self, who)
  if getmetatable(self) ~= Engine then
    fail("InferenceEngine:%s: expected an engine, got %s", who, arguments.describe(self))
  end
end

-- Has all ranks do something, and numbers it.
local function publish(self, task)
  for rank = 0, self.ranks.size - 1 do
    local mine = task
    if rank >= self.o.tensor and task.tokens then -- only the first stage looks at them
      mine = {}
      for key, value in pairs(task) do if key ~= "tokens" then mine[key] = value end end
    end
    self.ranks:send(rank, mine)
  end
  self.tasks[#self.tasks + 1] = task
end

-- Takes what all ranks have made of the oldest task.
local function collect(self)
  local task, result = table.remove(self.tasks, 1), nil
  local answers = {}
  local speaker = self.workers - self.o.tensor
  for rank = 0, self.ranks.size - 1 do
    local value, clock = self.ranks:receive(rank)
    answers[rank + 1] = value
    if rank == speaker and task.number then result = { value = value, clock = clock } end
  end
  if task.number then self.results[task.number] = result end
  return answers
end

local function sequences_of(who, batch)
  expect(who, "batch", batch, "a list")
  local list = {}
  for i, x in ipairs(batch) do
    if type(x) == "table" then
      expect(who, ("sequence %d"):format(i), x, "a list of integers")
      x = ty.tensor(x, { dtype = "i64" })
    end
    if not ty.is_tensor(x) or x.ndim ~= 1 or x.dtype ~= "i64" or x:numel() == 0 then
      fail("%s: sequence %d: expected i64 [length], got %s", who, i, arguments.describe(x))
    end
    list[i] = x
  end
  if #list == 0 then fail("%s: batch: expected at least one sequence, got none", who) end
  return list
end

--- Begins to compute what the model makes of sequences, each i64 [length] or a list of token ids, and goes on. Of
-- options `last`, see the engine's, [n, vocabulary] comes; without it a list of [length, vocabulary].
---@param batch (Tensor|integer[])[]
---@return InferenceFuture
function Engine:__call(batch)
  local who = "InferenceEngine"
  local list, o = sequences_of(who, batch), self.o
  if not self.ranks then fail("%s: the engine was closed", who) end
  self.number = self.number + 1
  local task, cu, positions, places, longest = { number = self.number, since = self.clock }, { 0 }, {}, {}, 0
  for i, x in ipairs(list) do
    cu[i + 1] = cu[i] + x.shape[1]
    positions[i], longest = ty.arange(x.shape[1]), math.max(longest, x.shape[1])
  end
  for i, x in ipairs(list) do
    places[i] = (o.packed and cu[i] or (i - 1) * longest) + x.shape[1] - 1
  end
  if o.packed then
    task.tokens, task.longest = ty.concat(list, 0):unsqueeze(0), longest
    task.cu_seqlens = ty.tensor(cu, { dtype = "i64" })
    task.positions = ty.concat(positions, 0):to("i64"):unsqueeze(0)
  else
    local filled = {}
    for i, x in ipairs(list) do filled[i] = ty.pad(x, { 0, longest - x.shape[1] }) end
    task.tokens = ty.stack(filled, 0)
  end
  if o.last then task.places = ty.tensor(places, { dtype = "i64" }) end
  publish(self, task)
  return setmetatable({ engine = self, number = self.number, cu = cu, longest = longest }, Future)
end

--- Waits for what has come of the batch; an error of a rank is raised here. It may be asked for more than once.
---@return Tensor|Tensor[] logits
function Future:wait()
  if getmetatable(self) ~= Future then
    fail("InferenceFuture:wait: expected a future, got %s", arguments.describe(self))
  end
  local engine = self.engine
  if not self.value then
    while not engine.results[self.number] do
      if not engine.ranks then fail "InferenceFuture:wait: the engine was closed" end
      collect(engine)
    end
    local result = engine.results[self.number]
    engine.results[self.number] = nil
    engine.clock, self.seconds = math.max(engine.clock, result.clock), result.clock
    local x = result.value
    if engine.o.last then
      self.value = x:squeeze(0)
    else
      self.value = {}
      for i = 1, #self.cu - 1 do
        local n = self.cu[i + 1] - self.cu[i]
        local row, at = i - 1, 0
        if engine.o.packed then row, at = 0, self.cu[i] end
        self.value[i] = x:select(0, row):narrow(0, at, n)
      end
    end
  end
  return self.value
end

--- Waits for all batches, and begins to count anew: clocks, rows, events.
function Engine:restart()
  check(self, "restart")
  publish(self, { restart = true })
  while #self.tasks > 0 do collect(self) end
  self.clock = 0
end

--- What ranks have done since restart(), once all batches are done: by rank from 1 on, first those that compute. live,
-- peak: bytes of tensors; rows: tokens that layers between the first and the last have computed, of so many calls of
-- these (layers); away, moved: layers that are with peers and bytes that came from there; events with record.
---@return table[]
function Engine:stats()
  check(self, "stats")
  publish(self, { stats = true })
  local answers
  while #self.tasks > 0 do answers = collect(self) end
  return answers
end

--- What ranks that compute did when, for dist.timeline: rows of events, of one rank of each stage.
---@return table[][]
function Engine:events()
  check(self, "events")
  local rows = {}
  for rank, s in ipairs(self:stats()) do
    if s.events and (rank - 1) % self.o.tensor == 0 then
      local row = {}
      for i, e in ipairs(s.events) do
        row[i] = { name = e.name, from = e.from - s.zero, to = e.to - s.zero, bytes = e.bytes }
      end
      rows[#rows + 1] = row
    end
  end
  return rows
end

--- Ends the ranks.
function Engine:close()
  check(self, "close")
  if self.ranks then self.ranks:close() end
  self.ranks = nil
end
Engine.__close = Engine.close

return new
