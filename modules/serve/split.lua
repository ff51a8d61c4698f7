--- Machines for prompts and machines for tokens, as ranks that each have an engine of the same model. Keys and values
-- of a prompt go from the pages of one to the pages of the other: layer by layer, while the layers after them are
-- computed, or in one piece afterwards where the prompt is short. Patel et al. 2023, "Splitwise: Efficient generative
-- LLM inference using phase splitting".
--
--     dist.run(3, function(group)                          -- two machines for prompts, one for tokens
--       return serve.split.run(group, model, requests, { serial_below = 32, bandwidth = 1e9 })
--     end)
--
-- Machines have a time of their own, from when the first request came: what their thread has computed, and what they
-- have waited for requests and for keys and values, whose way takes what `bandwidth` and `latency` say. Which machines
-- have a request is decided before: tycho.serve.cluster routes it by the queues of its own machines.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local Engine = require "tycho.serve.engine"
local Group = require("tycho.dist").RankGroup
local step_time = require "tycho.serve.step_time"

local M = {}

-- Tags of messages: what a machine says of a request, and keys and values of request i, i.
local SAYS = 0

local DEFAULTS = { limit = 2048, chunk = arguments.none, serial_below = 512, bandwidth = math.huge, latency = 0,
  page = 16, room = 1 << 20 }
local WANTED = { limit = "an integer >= 1", chunk = "an integer >= 1", serial_below = "a number >= 0",
  bandwidth = "a number > 0", latency = "a finite number >= 0", page = "an integer >= 1", room = "an integer >= 1" }

-- ---- the way of keys and values ----

-- The machine's time within a step or between steps.
local function time(self) return self.now + (self.group:clock() - self.began) end

-- Sends a part of the keys and values of a request. What is on the link goes first.
local function post(self, r, x)
  local ready = time(self)
  self.group:send(x, r.place[2] - 1, r.number)
  local departs = math.max(ready, self.link)
  self.link = departs + x:nbytes() / self.o.bandwidth
  r.arrives, r.pieces = self.link + self.o.latency, (r.pieces or 0) + 1
  self.bytes = self.bytes + x:nbytes()
  self.events[#self.events + 1] = { name = "send " .. r.number, from = departs, to = self.link, begun = ready,
    bytes = x:nbytes() }
end

local function all_layers(cache, sequence, count)
  local list = {}
  for layer = 1, cache.layers do list[layer] = cache:export(sequence, layer, 0, count) end
  return ty.stack(list, 0)
end

local function goes_over(self, r) return r.place[2] ~= self.number and r.count > 1 end

-- The engine of a machine sends what its cache has got of a layer.
local function attach(self)
  local engine, list, numbers = self.engine, {}, {}
  engine.before = function(requests, counts) list, numbers = requests, counts end
  engine.cache.placed = function(layer)
    for i, request in ipairs(list) do
      local r = self.of[request]
      if r and goes_over(self, r) and #r.prompt >= self.o.serial_below then
        post(self, r, engine.cache:export(request.sequence, layer, request.sequence.length, numbers[i]))
      end
    end
  end
end

-- ---- requests ----

local function on_token(self, r)
  return function(request)
    self.fresh[#self.fresh + 1] = { r, request }
    if goes_over(self, r) and #r.prompt < self.o.serial_below then
      post(self, r, all_layers(self.engine.cache, request.sequence, #r.prompt))
    end
  end
end

local function submit(self, r)
  local stays = r.place[2] == self.number
  local request = self.engine:submit(r.prompt, { count = stays and r.count or 1, stop_tokens = false,
    on_token = on_token(self, r) })
  self.of[request] = r
end

-- The prompts of the next step: whole ones, the oldest first, as many as fit; or all that have come, which the engine
-- takes in parts.
local function feed(self)
  local sum = 0
  if not self.o.chunk and #self.engine.waiting > 0 then return end
  while self.queue[1] and self.queue[1].arrival <= self.now do
    local n = #self.queue[1].prompt
    if not self.o.chunk and sum > 0 and sum + n > self.o.limit then break end
    sum = sum + n
    submit(self, table.remove(self.queue, 1))
  end
end

-- What each machine says next: waits for it in fact, not by the machine's time.
local function listen(self)
  for rank, left in pairs(self.expected) do
    if left > 0 and not self.heads[rank] then
      local said = self.group:receive(rank, SAYS):tolist()
      self.heads[rank] = { r = self.requests[math.tointeger(said[1])], arrives = said[2], first = said[3],
        token = math.tointeger(said[4]), pieces = math.tointeger(said[5]), from = rank }
      self.expected[rank] = left - 1
    end
  end
end

-- Requests whose keys and values are there become requests of the engine.
local function take_over(self)
  for rank, head in pairs(self.heads) do
    if head.arrives <= self.now then
      local parts = {}
      for i = 1, head.pieces do parts[i] = self.group:receive(rank, head.r.number) end
      if head.pieces == 1 then -- all layers in one
        for layer = 1, parts[1].shape[1] do parts[layer + 1] = parts[1]:select(0, layer - 1) end
        table.remove(parts, 1)
      end
      head.parts = parts
      self.ready[#self.ready + 1] = head
      self.heads[rank] = nil
    end
  end
  while self.ready[1] do
    local head = self.ready[1]
    local r = head.r
    self.began = self.group:clock()
    local request = self.engine:adopt(r.prompt, { head.token }, { count = r.count, stop_tokens = false,
      on_token = on_token(self, r) }, function(cache, sequence)
      for layer, x in ipairs(head.parts) do cache:import(sequence, layer, 0, x) end
    end)
    local seconds = self.group:clock() - self.began
    self.now, self.began = self.now + seconds, self.group:clock()
    if not request then return end
    self.taken.seconds = self.taken.seconds + seconds
    for _, x in ipairs(head.parts) do self.taken.bytes = self.taken.bytes + x:nbytes() end
    r.first = head.first
    self.of[request] = r
    table.remove(self.ready, 1)
  end
end

local function say(self, over)
  table.sort(over, function(a, b) return a.arrives < b.arrives end)
  for _, r in ipairs(over) do
    self.group:send(ty.tensor({ r.number, r.arrives, r.first, r.token, r.pieces }, { dtype = "f64" }),
      r.place[2] - 1, SAYS)
  end
end

local function step(self)
  self.fresh = {}
  local contents, from, sent = #self.steps, self.now, self.bytes
  self.began = self.group:clock()
  self.engine:step()
  self.now = time(self)
  local what = self.steps[contents + 1]
  if what then
    what.sent, what.taken, what.seconds = self.bytes - sent, self.taken.bytes, what.seconds + self.taken.seconds
    self.taken = { bytes = 0, seconds = 0 }
    local name = what.prompt == 0 and "decode" or what.decodes == 0 and "prompt" or "mixed"
    self.events[#self.events + 1] = { name = name, from = from, to = self.now }
  end
  local over = {}
  for _, pair in ipairs(self.fresh) do
    local r, request = pair[1], pair[2]
    r.first = r.first or self.now
    if goes_over(self, r) then
      r.token = request.tokens[1]
      over[#over + 1] = r
    elseif request.reason then
      self.done[#self.done + 1] = { number = r.number, arrival = r.arrival, prompt = #r.prompt, count = r.count,
        first = r.first, over = self.now, tokens = table.move(request.tokens, 1, #request.tokens, 1, {}) }
    end
  end
  say(self, over)
end

local function check(who, group, requests)
  local sends, receives = {}, {}
  for i, r in ipairs(requests) do
    local place = r.place
    if type(place) ~= "table" or math.type(place[1]) ~= "integer" or math.type(place[2]) ~= "integer"
      or math.min(place[1], place[2]) < 1 or math.max(place[1], place[2]) > group.size then
      arguments.fail("%s: request %d: expected a place of two machines of 1 to %d, got %s", who, i, group.size,
        arguments.describe(place))
    end
    if place[1] ~= place[2] then sends[place[1]], receives[place[2]] = true, true end
  end
  for number in pairs(sends) do
    if receives[number] then
      arguments.fail("%s: requests: expected machines that send keys and values or get some, got %d, which does both",
        who, number)
    end
  end
end

--- What a rank does as a machine: serves those of the requests whose prompts or tokens are its own. All ranks call it
-- with the same list, of { arrival (seconds), prompt (tokens), count, place (numbers of the two machines, which are
-- ranks from 1 on) }. options: limit (2048: tokens of whole prompts in a step), chunk (nil; or tokens of a step, parts
-- of prompts among them), serial_below (512: shorter prompts go over in one piece), bandwidth and latency of the links,
-- page (16) and room (2^20 tokens) of the engines.
---@param group RankGroup
---@param model LanguageModel
---@param requests table[]
---@param options? table
---@return { done: table[], events: table[], bytes: integer, steps: table[] } outcome  done: the requests whose tokens
-- this machine has made: number, arrival, prompt, count, tokens, and first and over, the times of the first and the
-- last; events: { name, from, to, bytes } by the machine's time; bytes: of keys and values sent; steps: see
-- serve.step_time.watch
function M.run(group, model, requests, options)
  local who = "serve.split.run"
  Group.expect(who, group)
  arguments.expect(who, "requests", requests, "a list of tables")
  local o = arguments.read(who, options, DEFAULTS, WANTED)
  check(who, group, requests)
  local longest, queue, expected, all = 1, {}, {}, {}
  for i, given in ipairs(requests) do
    local r = { number = i, arrival = given.arrival, prompt = given.prompt, count = given.count, place = given.place }
    all[i] = r
    longest = math.max(longest, #r.prompt)
    if r.place[1] == group.rank + 1 then queue[#queue + 1] = r
    elseif r.place[2] == group.rank + 1 and r.count > 1 then
      expected[r.place[1] - 1] = (expected[r.place[1] - 1] or 0) + 1
    end
  end
  table.sort(queue, function(a, b) return a.arrival < b.arrival end)
  local engine = Engine.new(model, { requests = 4096, batch = o.chunk or math.max(o.limit, longest) + 4096,
    page = o.page, room = o.room, prefixes = false })
  local self = { group = group, number = group.rank + 1, o = o, engine = engine, now = 0, link = 0,
    began = group:clock(), bytes = 0, events = {}, queue = queue, expected = expected, requests = all, heads = {},
    ready = {}, done = {}, taken = { bytes = 0, seconds = 0 }, of = setmetatable({}, { __mode = "k" }), fresh = {} }
  attach(self)
  self.steps = step_time.watch(engine, function() return group:clock() end)
  while true do
    listen(self)
    take_over(self)
    feed(self)
    if #engine.running > 0 or #engine.waiting > 0 then
      step(self)
    else
      local next_time = queue[1] and queue[1].arrival or math.huge
      for _, head in pairs(self.heads) do next_time = math.min(next_time, head.arrives) end
      if next_time == math.huge then break end
      self.now = math.max(self.now, next_time)
    end
  end
  return { done = self.done, events = self.events, bytes = self.bytes, steps = self.steps }
end

--- What the ranks of run() return, together: the requests in their order.
---@param outcomes table[]
---@return { requests: table[], bytes: integer, steps: table[], rows: table[][] } all  rows: events, for dist.timeline
function M.together(outcomes)
  arguments.expect("serve.split.together", "outcomes", outcomes, "a list of tables")
  local all = { requests = {}, bytes = 0, steps = {}, rows = {} }
  for i, outcome in ipairs(outcomes) do
    for _, r in ipairs(outcome.done) do all.requests[r.number] = r end
    table.move(outcome.steps, 1, #outcome.steps, #all.steps + 1, all.steps)
    all.bytes, all.rows[i] = all.bytes + outcome.bytes, outcome.events
  end
  return all
end

-- ---- one request ----

--- One prompt, computed on rank 0 and decoded on rank 1, by the clocks of the group, of two ranks whose link is that of
-- dist.run. way: "layers" (they go as they are computed), "serial" (all when all are computed) or "stays" (rank 0
-- decodes as well). Returns seconds to the first token (rank 0), until all keys and values have arrived (rank 1) and to
-- the second token (rank 1; of "stays" rank 0), those that rank 0 worked for sending, the events of the rank since, as
-- RankGroup:record() has them, and the tokens.
---@param group RankGroup
---@param model LanguageModel
---@param prompt integer[]
---@param way "layers"|"serial"|"stays"
---@param page? integer  tokens in a page (16)
---@return { first: number?, arrived: number?, second: number?, sending: number, events: table[], tokens: integer[]?,
-- bytes: integer }
function M.transfer(group, model, prompt, way, page)
  local who = "serve.split.transfer"
  Group.expect(who, group)
  arguments.expect(who, "way", way, '"layers" or "serial" or "stays"')
  local engine = Engine.new(model, { page = page, batch = #prompt, prefixes = false })
  local cache, n, bytes = engine.cache, #prompt, 0
  local stays = way == "stays"
  local result = { sending = 0 }
  local function send(make, ...)
    local from = group:clock()
    local x = make(...)
    group:send(x, 1, 1)
    bytes, result.sending = bytes + x:nbytes(), result.sending + group:clock() - from
  end
  group:barrier()
  local events, began = group:record(), group:clock()
  result.events = events
  if group.rank == 0 then
    if way == "layers" then
      cache.placed = function(layer)
        send(cache.export, cache, engine.running[1].sequence, layer, 0, n)
      end
    end
    local request = engine:submit(prompt, { count = stays and 2 or 1, stop_tokens = false,
      on_token = function(request)
        if #request.tokens > 1 then return end
        result.first = group:clock() - began
        if way == "serial" then send(all_layers, cache, request.sequence, n) end
      end })
    group:span("prompt", engine.step, engine)
    if stays then
      group:span("decode", engine.run, engine)
      result.second, result.tokens = group:clock() - began, request.tokens
    else
      group:send(ty.tensor(request.tokens, { dtype = "i64" }), 1, SAYS)
    end
  elseif group.rank == 1 and not stays then
    local parts = {}
    if way == "serial" then
      local x = group:receive(0, 1)
      for layer = 1, cache.layers do parts[layer] = x:select(0, layer - 1) end
    else
      for layer = 1, cache.layers do parts[layer] = group:receive(0, 1) end
    end
    result.arrived = group:clock() - began
    local tokens = group:receive(0, SAYS):tolist()
    local request = group:span("place", engine.adopt, engine, prompt, tokens, { count = 2, stop_tokens = false },
      function(own, sequence)
        for layer, x in ipairs(parts) do own:import(sequence, layer, 0, x) end
      end)
    group:span("decode", engine.run, engine)
    result.second, result.tokens = group:clock() - began, request.tokens
  end
  for _, e in ipairs(events) do e.from, e.to, e.begun = e.from - began, e.to - began, nil end
  result.bytes = bytes
  return result
end

return M
