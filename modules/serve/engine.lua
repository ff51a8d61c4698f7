--- An engine for many requests to one language model: they come and go at any time, and in each step of the model all
-- of them go on at once, packed one after another without padding, over pages of keys and values that grow with them.
--
--     local engine = serve.engine(model, { tokenizer = tokenizer, requests = 32 })
--     local a = engine:submit(tokenizer:encode "In the beginning", { count = 50 })
--     local b = engine:submit(tokenizer:encode "And it came", { count = 20, temperature = 0.8, seed = 1 })
--     while engine:step() do end          -- or engine:run(); then a.tokens, b.tokens
--
-- Requests join and leave between steps (Yu et al. 2022, Orca). Long prompts are taken in parts beside the tokens of
-- others, which do not wait for them (Agrawal et al. 2023, "SARATHI: Efficient LLM Inference by Piggybacking Decodes
-- with Chunked Prefills"). When the pages run out, the youngest request gives its pages back and is computed again
-- later (Kwon et al. 2023, PagedAttention). Requests with the same beginning share its pages (tycho.serve.prefixes).
local ty = require "tycho"
local arguments = require "tycho.arguments"
local choice = require "tycho.serve.choice"
local llm = require "tycho.llm"
local Prefixes = require "tycho.serve.prefixes"
local sampling = require "tycho.llm.sampling"

local none = ty.nn.none

--- What was asked of an engine, and how far it is.
---@class ServeRequest
---@field prompt integer[]
---@field tokens integer[]  what has come so far
---@field reason? "stop"|"length"|"cancelled"|"failed"  why it ended; nil while it runs
---@field error? string  where it failed
---@field logprobs? number[]  of each token, where they were asked for
local Request = {}
Request.__index = Request

--- Ends a request; the engine gives it no more tokens.
function Request:cancel()
  if not self.reason then self.engine:finish(self, "cancelled") end
end

--- Runs the engine until this request has ended, and returns its tokens.
---@return integer[] tokens
function Request:wait()
  while not self.reason and self.engine:step() do end
  if self.reason == "failed" then error("request: " .. self.error, 2) end
  return self.tokens
end

--- A model, its requests and the pages of their keys and values.
---@class ServeEngine
---@field model LanguageModel
---@field tokenizer? table
---@field cache PackedCache
---@field adapters? ServeAdapters
local Engine = {}
Engine.__index = Engine

--- An engine. options: tokenizer (for who asks in texts; the engine itself takes tokens), requests (at once, 64), batch
-- (the most tokens of a step, 256), room (the most tokens whose keys and values are kept, 16384), page (tokens in a
-- page, 16), dtype (of keys and values; nil: the model's), prefixes (true: beginnings are shared), within (a function
-- that runs the function it is given with each step of the model, such as one of tycho.offload that has its layers at
-- hand), timing (a function that is called before and after each step of the model, as timing(tokens, done)).
---@param model LanguageModel
---@param options? table
---@return ServeEngine
function Engine.new(model, options)
  arguments.expect("serve.engine", "model", model, "a module")
  local o = arguments.read("serve.engine", options, { tokenizer = none, requests = 64, batch = 256, room = 16384,
    page = 16, dtype = none, prefixes = true, within = none, timing = none }, {
    requests = "an integer >= 1", batch = "an integer >= 1", room = "an integer >= 1", page = "an integer >= 1",
    dtype = "a string", prefixes = "a boolean", within = "a function",
    timing = "a function" })
  local plain = type(model.hidden) == "function" and type(model.cache) == "function" and model:cache()
  if not plain or getmetatable(plain) ~= llm.Cache or model.bias then
    arguments.fail("serve.engine: model: expected a decoder whose attention takes packed sequences, got a %s",
      getmetatable(model).__name or "module")
  end
  local cache = llm.PackedCache.new(plain.layers, { page = o.page, most = math.max(1, o.room // o.page),
    dtype = o.dtype })
  return setmetatable({ model = model:eval(), device = model:device(), tokenizer = o.tokenizer, cache = cache,
    pool = cache.pool, most_requests = o.requests, most_tokens = o.batch,
    prefixes = o.prefixes and Prefixes.new(cache.pool) or nil, within = o.within, timing = o.timing,
    running = {}, waiting = {}, numbers = 0,
    counts = { steps = 0, tokens = 0, computed = 0, shared = 0, preempted = 0 } }, Engine)
end

-- ---- requests ----

local function check_prompt(self, who, tokens)
  if ty.is_tensor(tokens) then tokens = tokens:flatten():tolist() end
  arguments.expect(who, "tokens", tokens, "a list")
  if #tokens == 0 then arguments.fail("%s: tokens: expected at least one, got none", who) end
  local most = self.model.config and self.model.config.vocab_size or math.maxinteger
  for i, token in ipairs(tokens) do
    if math.type(token) ~= "integer" or token < 0 or token >= most then
      arguments.fail("%s: tokens: expected integers in [0, %d), got %s at place %d", who, most,
        arguments.describe(token), i)
    end
  end
  return table.move(tokens, 1, #tokens, 1, {})
end

-- The set of tokens that end a request.
local function stops(self, given)
  if given == false then return {} end
  if given == nil or given == true then return require("tycho.llm.generate").ends(self.model) end
  local set = {}
  for _, token in ipairs(type(given) == "table" and given or { given }) do set[token] = true end
  return set
end

-- A request, not yet waiting.
local function new_request(self, who, tokens, options)
  local prompt = check_prompt(self, who, tokens)
  local o = arguments.read(who, options, { count = 16, temperature = 0, top_k = 0, top_p = 1, min_p = 0,
    repetition_penalty = 1, seed = 0, stop_tokens = none, logprobs = false, on_token = none, on_end = none,
    adapter = none },
    { count = "an integer >= 1", seed = "an integer", stop_tokens = "an integer or a list of integers or a boolean",
      logprobs = "a boolean", on_token = "a function", on_end = "a function", adapter = "a string" })
  sampling.check(who, o)
  local longest, context = #prompt + o.count, self.model.context
  if context and longest > context then
    arguments.fail(who .. ": tokens: expected at most %d with the %d that are asked for, as the model sees %d, "
      .. "got %d", context - o.count, o.count, context, #prompt)
  end
  local room = self.pool.most * self.pool.page
  if o.adapter then
    if not self.adapters then
      arguments.fail("%s: adapter: expected nil, as the engine has none (serve.adapters), got %s", who,
        arguments.describe(o.adapter))
    end
    room = room - self.adapters:pages_of(who, o.adapter) * self.pool.page
  end
  if longest > room then
    arguments.fail(who .. ": tokens: expected at most %d with the %d that are asked for, as the engine has room "
      .. "for %d%s, got %d", room - o.count, o.count, room, o.adapter and " beside the adapter" or "", #prompt)
  end
  self.numbers = self.numbers + 1
  return setmetatable({ engine = self, number = self.numbers, prompt = prompt, tokens = {}, options = o,
    seed = o.seed, count = o.count, stops = stops(self, o.stop_tokens), logprobs = o.logprobs and {} or nil }, Request)
end

--- Asks for what follows `tokens`. options: count (the most new tokens, 16), those of tycho.llm.sampling (temperature,
-- 0 by default: the most likely token; top_k, top_p, min_p, repetition_penalty), seed (0: of its own stream of random
-- numbers), stop_tokens (one or a list; nil: those of the model; false: none), logprobs (false), on_token(request,
-- token), on_end(request, reason), adapter (the name of one of those of tycho.serve.adapters).
---@param tokens integer[]|Tensor
---@param options? table
---@return ServeRequest
function Engine:submit(tokens, options)
  local request = new_request(self, "serve.submit", tokens, options)
  table.insert(self.waiting, request)
  return request
end

-- Gives back the pages of a request, which may begin again later.
local function withdraw(self, request)
  self.cache:release(request.sequence)
  request.sequence, request.node, request.kept = nil, nil, nil
  if self.adapters then self.adapters:drop(request) end
end

-- Token number i of what a request has so far, prompt included.
local function token_at(request, i)
  local n = #request.prompt
  return i <= n and request.prompt[i] or request.tokens[i - n]
end

local function known(request) return #request.prompt + #request.tokens end

-- All tokens so far as one list.
local function text_of(request)
  local all = table.move(request.prompt, 1, #request.prompt, 1, {})
  return table.move(request.tokens, 1, #request.tokens, #all + 1, all)
end

local function remove(list, what)
  for i, x in ipairs(list) do
    if x == what then return table.remove(list, i) end
  end
end

--- Ends a request and gives its pages back.
---@param request ServeRequest
---@param reason string
function Engine:finish(request, reason)
  if getmetatable(request) ~= Request or request.engine ~= self then
    arguments.fail("ServeEngine:finish: request: expected one of this engine, got %s", arguments.describe(request))
  end
  if request.reason then return end
  request.reason = reason
  if not remove(self.running, request) then remove(self.waiting, request) end
  if request.sequence then withdraw(self, request) end
  if request.options.on_end then request.options.on_end(request, reason) end
end

-- ---- the pages ----

-- Frees up to `count` pages that no request needs now: those of adapters, which come back sooner, then of beginnings.
local function evict(self, count)
  local freed = self.adapters and self.adapters:evict(count) or 0
  if freed < count and self.prefixes then freed = freed + self.prefixes:evict(count - freed) end
  return freed
end

-- Begins, or begins again, with the pages that are there already. False, and nothing done, where the pages for the rest
-- of what is known are lacking: of those that run none gives its pages up for one that begins.
local function admit(self, request)
  local pages
  if self.prefixes then pages, request.node = self.prefixes:find(text_of(request), request.options.adapter) end
  request.sequence = self.cache:sequence(pages)
  request.kept = #request.sequence.pages
  local needed = (known(request) + self.pool.page - 1) // self.pool.page - request.kept
  if self.adapters then needed = needed + self.adapters:hold(request) end
  local missing = needed - self.pool:room()
  if missing > 0 and evict(self, missing) < missing then
    withdraw(self, request)
    return false
  end
  if self.adapters then
    local ok, problem = pcall(self.adapters.fetch, self.adapters, request)
    if not ok then
      request.error = tostring(problem)
      self:finish(request, "failed")
      return false
    end
  end
  self.counts.shared = self.counts.shared + request.sequence.length
  return true
end

-- Sends the youngest running request back to wait.
local function preempt(self)
  local request = table.remove(self.running)
  withdraw(self, request)
  table.insert(self.waiting, 1, request)
  self.counts.preempted = self.counts.preempted + 1
  return request
end

-- Pages for `count` tokens more of a running request, if need be those of beginnings that nobody uses, or of younger
-- requests. False when the request itself had to go.
local function reserve(self, request, count)
  while not self.cache:reserve(request.sequence, count) do
    local missing = (request.sequence.length + count + self.pool.page - 1) // self.pool.page
      - #request.sequence.pages - self.pool:room()
    if evict(self, missing) < missing and preempt(self) == request then return false end
  end
  return true
end

-- Full pages of a request are there for others.
local function remember(self, request)
  local sequence, page = request.sequence, self.pool.page
  if not self.prefixes or (request.kept + 1) * page > sequence.length then return end
  local all = text_of(request)
  while (request.kept + 1) * page <= sequence.length do
    local first = request.kept * page + 1
    request.kept = request.kept + 1
    request.node = self.prefixes:add(request.node, all, first, sequence.pages[request.kept])
  end
end

--- Takes over a request whose prompt another engine has computed. tokens: those that have come so far, one at least;
-- options as submit() has them; fill(cache, sequence, count) puts the keys and values of the first `count` tokens, all
-- but the last, into the pages of a sequence: PackedCache:import(). Returns nil, and nothing is taken, while there is
-- no room.
---@param prompt integer[]|Tensor
---@param tokens integer[]
---@param options table?
---@param fill fun(cache: PackedCache, sequence: PackedSequence, count: integer)
---@return ServeRequest?
function Engine:adopt(prompt, tokens, options, fill)
  local who = "serve.adopt"
  arguments.expect(who, "tokens", tokens, "a list of integers")
  if #tokens == 0 then arguments.fail("%s: tokens: expected at least one, got none", who) end
  arguments.expect(who, "fill", fill, "a function")
  if type(options) == "table" and options.adapter ~= nil then
    arguments.fail("%s: adapter: expected nil, as keys and values come without one, got %s", who,
      arguments.describe(options.adapter))
  end
  if #self.running >= self.most_requests then return nil end
  local request = new_request(self, who, prompt, options)
  table.move(tokens, 1, #tokens, 1, request.tokens)
  request.sequence, request.kept = self.cache:sequence(), 0
  request.node = self.prefixes and self.prefixes:root()
  local count = #request.prompt + #tokens - 1
  local missing = (count + self.pool.page - 1) // self.pool.page - self.pool:room()
  if missing > 0 then evict(self, missing) end
  if not self.cache:reserve(request.sequence, count) then return nil end
  local ok, problem = pcall(ty.no_grad, ty.scope, fill, self.cache, request.sequence, count)
  if not ok then
    withdraw(self, request)
    error(problem, 0)
  end
  self.cache:extend(request.sequence, count)
  table.insert(self.running, request)
  if request.stops[tokens[#tokens]] then self:finish(request, "stop")
  elseif #tokens >= request.count then self:finish(request, "length") end
  return request
end

-- ---- the steps ----

-- Requests of this step with how many tokens of each: one of those that decode, then what the step has room for of
-- prompts, the oldest first.
local function plan(self)
  local left, counts, preempted = self.most_tokens, {}, self.counts.preempted
  for pass = 1, 2 do
    local i = 1
    while i <= #self.running and left > 0 do
      local request = self.running[i]
      local missing = known(request) - request.sequence.length
      if (missing == 1) == (pass == 1) then
        local count = math.min(missing, left)
        if not reserve(self, request, count) then break end
        counts[request], left = count, left - count
      end
      i = i + 1
    end
  end
  while left > 0 and #self.waiting > 0 and #self.running < self.most_requests
    and self.counts.preempted == preempted do
    local at = self.adapters and self.adapters:turn(self.waiting) or 1
    local request = self.waiting[at]
    if not request or not admit(self, request) then break end
    table.remove(self.waiting, at)
    table.insert(self.running, request)
    local count = math.min(known(request) - request.sequence.length, left)
    self.cache:reserve(request.sequence, count)
    counts[request], left = count, left - count
  end
  local list = {}
  for _, request in ipairs(self.running) do
    if counts[request] then list[#list + 1] = request end
  end
  if self.adapters then list = self.adapters:arrange(list) end
  return list, counts
end

-- Logits [m, vocabulary] of the requests whose tokens are all computed, and these.
local function compute(self, list, counts)
  local sequences, numbers, tokens, ready, places = {}, {}, {}, {}, {}
  for i, request in ipairs(list) do
    sequences[i], numbers[i] = request.sequence, counts[request]
    for j = request.sequence.length + 1, request.sequence.length + numbers[i] do
      tokens[#tokens + 1] = token_at(request, j)
    end
    if request.sequence.length + numbers[i] == known(request) then
      ready[#ready + 1], places[#places + 1] = request, #tokens - 1
    end
  end
  local model, device = self.model, self.device
  if self.before then self.before(list, numbers) end
  if self.timing then self.timing(#tokens, false) end
  self.cache:begin(sequences, numbers, device)
  local i64 = { dtype = "i64", device = device }
  local wanted = ty.tensor(#places > 0 and places or { 0 }, i64)
  local function pass()
    local hidden = model:hidden(ty.tensor({ tokens }, i64), { cache = self.cache, places = wanted })
    -- Not every family looks at places.
    if hidden.shape[2] ~= wanted.shape[1] then hidden = hidden:index_select(1, wanted) end
    return #places > 0 and model:head(hidden:select(0, 0)) or nil
  end
  local logits = self.within and self.within(pass) or not self.within and pass() or nil
  if self.timing then self.timing(#tokens, true) end
  self.counts.steps, self.counts.computed = self.counts.steps + 1, self.counts.computed + #tokens
  return logits, ready
end

-- Hands a token over, and ends the request if it was the last one.
local function deliver(self, request, token)
  local tokens = request.tokens
  tokens[#tokens + 1] = token
  self.counts.tokens = self.counts.tokens + 1
  if request.options.on_token then request.options.on_token(request, token) end
  if request.stops[token] then self:finish(request, "stop")
  elseif #tokens >= request.count then self:finish(request, "length") end
end

--- One step of the model for all requests that there is room for. Returns whether there is more to do.
---@return boolean
function Engine:step()
  if #self.running == 0 and #self.waiting == 0 then return false end
  local list, counts = plan(self)
  if #list == 0 then return #self.running > 0 or #self.waiting > 0 end
  local ok, problem = pcall(ty.no_grad, function()
    return ty.scope(function()
      local logits, ready = compute(self, list, counts)
      for _, request in ipairs(list) do remember(self, request) end
      if not logits then return end
      local tokens = choice.choose(logits, ready)
      local shares
      for i, request in ipairs(ready) do
        if request.logprobs then
          shares = shares or logits:to("f32"):log_softmax(-1)
          table.insert(request.logprobs, shares:select(0, i - 1):select(0, tokens[i]):item())
        end
      end
      for i, request in ipairs(ready) do
        if not request.reason then deliver(self, request, tokens[i]) end
      end
    end)
  end)
  if self.adapters then self.adapters.step = nil end
  if not ok then
    for _, request in ipairs(list) do
      request.error = tostring(problem)
      self:finish(request, "failed")
    end
    error(problem, 0)
  end
  return #self.running > 0 or #self.waiting > 0
end

--- Steps until nothing is left to do.
function Engine:run()
  while self:step() do end
end

--- How full the engine is: running and waiting requests, pages and pages_used; and what it has done so far: steps,
-- tokens (that requests got), computed (tokens that went through the model), shared (tokens whose pages were there),
-- preempted.
---@return table
function Engine:usage()
  local usage = { running = #self.running, waiting = #self.waiting, pages = self.pool.most,
    pages_used = self.pool.pages - #self.pool.free, pages_kept = self.prefixes and self.prefixes.count or 0 }
  for name, count in pairs(self.counts) do usage[name] = count end
  return usage
end

return Engine
