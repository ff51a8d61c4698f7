--- Many adapters of low rank on one engine: each request has one of them or none, and a step of the model computes them
-- all together.
--
--     local set = serve.adapters(engine)
--     for name, folder in pairs(folders) do set:add(name, folder) end     -- thousands, which stay where they are
--     engine:submit(tokens, { adapter = "french" })
--
-- The weights are multiplied once with all tokens. What adapters add to it is one op (ty.lora_segments), whose segments
-- are the tokens of an adapter, of any rank. An adapter is brought when a request with it begins, or shortly before,
-- into pages of the pool that has the keys and values: a row of A or B takes the room of a key or value of one token
-- (of several, where it is longer), so that nothing is set apart for either and no room is lost between them. It stays
-- until its pages are needed and no request runs with it, the longest unused first. Sheng et al. 2023, "S-LoRA: Serving
-- Thousands of Concurrent LoRA Adapters", sections 4 and 5.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local images = require "tycho.serve.adapter_images"

local surgery = ty.nn.surgery
local fail, describe = arguments.fail, arguments.describe

--- The adapters of an engine.
---@class ServeAdapters
---@field engine ServeEngine
local Adapters = {}
Adapters.__index = Adapters

-- ---- what a layer does ----

local wrapper = surgery.wrapper { name = "Served", field = "_served",
  forward = function(base)
    return function(self, x, residual, activation)
      local state = self._served
      local step = state.set.step
      if not step then return base.forward(self, x, residual, activation) end
      local y = base.forward(self, x, residual)
      local shape, part = y.shape, step[state.site]
      if not part then return surgery.finish(y, nil, activation) end
      local h = x:flatten(0, -2)
      local begins = h.shape[1] == step.count and step.begins or step.wanted
      local pool = state.set.pool[state.layer]
      y = ty.lora_segments(y:flatten(0, -2), h, pool.k, pool.v, part.a_rows, part.b_rows, begins, part.ranks)
      return surgery.finish(y:reshape(shape), nil, activation)
    end
  end,
  describe = function() return "adapters by request" end }

-- ---- adapters that are known ----

--- Adapters for an engine, none yet. options: host (nil: any; the most bytes of adapters that are kept in host memory
-- beside those in the pool, the others are read from their files when they are wanted), ahead (8: of so many waiting
-- requests the adapters are brought before their turn), most (nil: any; so many adapters run at once, and requests with
-- one of these pass those who wait for another, 32 times at most: the paper's adapter clustering), pad (nil; every
-- adapter takes the room and the work of this rank, for comparison).
---@param engine ServeEngine
---@param options? {host?: integer, ahead?: integer, most?: integer, pad?: integer}
---@return ServeAdapters
function Adapters.new(engine, options)
  local who = "serve.adapters"
  if getmetatable(arguments.expect(who, "engine", engine, "a table")) ~= require "tycho.serve.engine" then
    fail("%s: engine: expected one of serve.engine, got %s", who, describe(engine))
  end
  local o = arguments.read(who, options, { host = math.maxinteger, ahead = 8, most = arguments.none,
    pad = arguments.none }, { host = "an integer >= 0", ahead = "an integer >= 0", most = "an integer >= 1",
    pad = "an integer >= 1" })
  if engine.adapters then fail("%s: engine: expected one without adapters, got one that has them", who) end
  local self = setmetatable({ engine = engine, model = engine.model, pool = engine.pool, host = o.host,
    ahead = o.ahead, most = o.most or math.maxinteger, in_use = 0, entries = {}, count = 0, clock = 0, host_bytes = 0,
    residences = 0, resident = 0, before = engine.before, form = images.form(who, engine.model, engine.pool, o.pad),
    counts = { fetched = 0, evicted = 0, read = 0 } }, Adapters)
  engine.adapters = self
  engine.before = function(list, counts)
    if self.before then self.before(list, counts) end
    self:begin(list, counts)
  end
  return self
end

--- Adds an adapter under a name: a folder or a file, as peft.load reads it, or the pairs themselves, a list of { name
-- (of a linear layer), a [rank, inputs], b [outputs, rank], scale (1) }, which stay in host memory. Ranks and layers
-- may be any. Files are read when a request asks for them first. Returns the set.
---@param name string
---@param source string|table[]
---@return ServeAdapters self
function Adapters:add(name, source)
  local who = "ServeAdapters:add"
  arguments.expect(who, "name", name, "a string")
  arguments.expect(who, "source", source, "a string or a list")
  if self.removed then fail("%s: expected a set that is on its engine, got one that was removed", who) end
  if self.entries[name] then fail("%s: name: expected a new one, got %s", who, describe(name)) end
  local entry = { name = name, users = 0, used = 0 }
  if type(source) == "string" then
    if not ty.io.stat(source) then fail("%s: source: expected a folder or a file, got %s", who, describe(source)) end
    entry.path = source
  else
    self:take_in(who, entry, images.check(who, source))
  end
  self.entries[name], self.count = entry, self.count + 1
  return self
end

-- Gives a layer the wrapper, once.
local function on(self, site, layer, module)
  local state = wrapper:state(module)
  if not state then
    wrapper:wrap(module, { set = self, site = site, layer = layer })
    ty.core.program.renew()
  elseif state.set ~= self then
    error("the model has the adapters of another engine", 0)
  end
end

-- Makes the image of an adapter of its pairs: what its pages will be.
function Adapters:take_in(who, entry, list)
  local ok, image = pcall(ty.no_grad, images.make, self.form, list)
  if not ok then arguments.raise(image, ("%s: %s: "):format(who, entry.name)) end
  for _, pair in ipairs(image.layers) do
    local fits, problem = pcall(on, self, pair.site, pair.layer, pair.module)
    if not fits then arguments.raise(problem, ("%s: %s: "):format(who, entry.name)) end
  end
  entry.image, entry.pages = image, image.pages
  if entry.path then self.host_bytes = self.host_bytes + image.bytes end
end

-- The image of an adapter, read where it is not there; others go where there is no room for them in host memory.
local function image_of(self, who, entry)
  self.clock = self.clock + 1
  entry.imaged = self.clock
  if not entry.image then
    self:take_in(who, entry, require("tycho.peft").read(self.model, entry.path))
    self.counts.read = self.counts.read + 1
  end
  while self.host_bytes > self.host do
    local oldest
    for _, other in pairs(self.entries) do
      if other.path and other.image and other ~= entry and (not oldest or other.imaged < oldest.imaged) then
        oldest = other
      end
    end
    if not oldest then break end
    self.host_bytes, oldest.image = self.host_bytes - oldest.image.bytes, nil
  end
  return entry.image
end

local function known(self, who, what, name)
  return self.entries[name]
    or fail("%s: %s: expected one of the %d that there are, got %s", who, what, self.count, describe(name))
end

--- How many pages an adapter takes.
---@param who string
---@param name string
---@return integer
function Adapters:pages_of(who, name)
  local entry = known(self, who, "adapter", name)
  if not entry.pages then image_of(self, who, entry) end
  return entry.pages
end

-- ---- adapters in the pool ----

local function use(self, entry)
  self.clock = self.clock + 1
  entry.used = self.clock
end

-- Brings an adapter into pages that are free.
local function bring(self, entry)
  local image, pages, slots, page = image_of(self, "serve.adapters", entry), {}, {}, self.pool.page
  for i = 1, image.pages do
    pages[i] = self.pool:take()
    for j = 0, page - 1 do slots[#slots + 1] = pages[i] * page + j end
  end
  entry.slots = ty.keep(ty.tensor(slots, { dtype = "i64", device = self.engine.device }))
  ty.no_grad(ty.scope, images.put, self.form, image, self.pool, entry.slots)
  self.residences, self.resident = self.residences + 1, self.resident + image.pages
  entry.resident, entry.residence, entry.parts = pages, self.residences, images.rows(image, entry.slots)
  self.counts.fetched = self.counts.fetched + 1
end

local function send_away(self, entry)
  for _, page in ipairs(entry.resident) do self.pool:release(page) end
  self.resident = self.resident - #entry.resident
  entry.resident, entry.slots, entry.parts = nil, nil, nil
  self.counts.evicted = self.counts.evicted + 1
  return entry.pages
end

local PASSES = 32 -- that those who wait longest put up with

--- Whose turn it is of those who wait: a place in the list, 0 where nobody may begin now.
---@param waiting ServeRequest[]
---@return integer
function Adapters:turn(waiting)
  if self.in_use < self.most then return 1 end
  for i, request in ipairs(waiting) do
    local entry = self.entries[request.options.adapter or false]
    if not entry or entry.users > 0 then
      local first, passed = waiting[1], i > 1 and (waiting[1].passed or 0) + 1 or 0
      if passed > PASSES then return 0 end
      first.passed = i > 1 and passed or first.passed
      return i
    end
  end
  return 0
end

--- Keeps the adapter of a request where it is; returns how many pages it lacks, which fetch() takes. What the request
-- holds it gives back by drop().
---@param request ServeRequest
---@return integer pages
function Adapters:hold(request)
  local entry = self.entries[request.options.adapter or false]
  if not entry then return 0 end
  if entry.users == 0 then self.in_use = self.in_use + 1 end
  request.adapter, entry.users = entry, entry.users + 1
  use(self, entry)
  return entry.resident and 0 or entry.pages
end

--- Brings the adapter that a request holds, for which there is room.
---@param request ServeRequest
function Adapters:fetch(request)
  if request.adapter and not request.adapter.resident then bring(self, request.adapter) end
end

--- The request needs its adapter no more.
---@param request ServeRequest
function Adapters:drop(request)
  local entry = request.adapter
  if not entry then return end
  request.adapter, entry.users = nil, entry.users - 1
  if entry.users == 0 then self.in_use = self.in_use - 1 end
end

--- Gives back the pages of adapters that no request holds, the longest unused first, until there are `count`. before:
-- only of those that were last used before this time. Returns how many.
---@param count integer
---@param before? integer
---@return integer freed
function Adapters:evict(count, before)
  local freed = 0
  while freed < count do
    local oldest
    for _, entry in pairs(self.entries) do
      if entry.resident and entry.users == 0 and (not oldest or entry.used < oldest.used) then oldest = entry end
    end
    if not oldest or before and oldest.used > before then break end
    freed = freed + send_away(self, oldest)
  end
  return freed
end

-- Brings the adapters of those who wait next, in the place of such as nobody waits for.
local function look_ahead(self)
  local waiting, now = self.engine.waiting, self.clock
  for pass = 1, 2 do
    for i = 1, math.min(self.ahead, #waiting) do
      local entry = self.entries[waiting[i].options.adapter or false]
      if entry and pass == 1 and entry.resident then use(self, entry) end
      if entry and pass == 2 and not entry.resident then
        local missing = entry.pages - self.pool:room()
        if missing > 0 and self:evict(missing, now) < missing then return end
        use(self, entry)
        -- What cannot be read is an error when its turn comes.
        if not pcall(bring, self, entry) then return end
      end
    end
  end
end

-- ---- the steps ----

--- The requests of a step with those of an adapter beside each other.
---@param list ServeRequest[]
---@return ServeRequest[]
function Adapters:arrange(list)
  local groups, order = {}, {}
  for _, request in ipairs(list) do
    local key = request.adapter or false
    if not groups[key] then
      groups[key] = {}
      order[#order + 1] = key
    end
    table.insert(groups[key], request)
  end
  local result = {}
  for _, key in ipairs(order) do table.move(groups[key], 1, #groups[key], #result + 1, result) end
  return result
end

-- Where the pairs of a step's adapters are, at each site: kept while the adapters are the same.
local function gather(self, order)
  local ids = {}
  for i, entry in ipairs(order) do ids[i] = entry and entry.residence or 0 end
  local key = table.concat(ids, " ")
  if self.gathered and self.gathered.key == key then return self.gathered end
  local device, gathered = self.engine.device, { key = key }
  for _, site in ipairs(self.form.sites) do
    local a, b, ranks = {}, {}, { 0 }
    for i, entry in ipairs(order) do
      local part = entry and entry.parts[site.key]
      ranks[i + 1] = ranks[i] + (part and part.rank or 0)
      if part then a[#a + 1], b[#b + 1] = part.a_rows, part.b_rows end
    end
    if #a > 0 then
      gathered[site.key] = { a_rows = ty.keep(ty.concat(a, 0)), b_rows = ty.keep(ty.concat(b, 0)),
        ranks = ty.keep(ty.tensor(ranks, { dtype = "i64", device = device })) }
    end
  end
  self.gathered = gathered
  return gathered
end

--- Says what the next call of the model is about; see Engine.before.
---@param list ServeRequest[]
---@param counts integer[]
function Adapters:begin(list, counts)
  local order, begins, wanted, last = {}, { 0 }, { 0 }, nil
  for i, request in ipairs(list) do
    local entry = request.adapter or false
    if i == 1 or entry ~= last then
      order[#order + 1], last = entry, entry
      begins[#begins + 1], wanted[#wanted + 1] = begins[#begins], wanted[#wanted]
    end
    local ready = request.sequence.length + counts[i] == #request.prompt + #request.tokens
    begins[#begins], wanted[#wanted] = begins[#begins] + counts[i], wanted[#wanted] + (ready and 1 or 0)
  end
  self.step = nil
  local any = false
  for _, entry in ipairs(order) do any = any or entry end
  if any then
    -- Where no token is wanted the model is asked for the first all the same.
    if wanted[#wanted] == 0 then
      for s = 2, #wanted do wanted[s] = 1 end
    end
    local i64 = { dtype = "i64", device = self.engine.device }
    local gathered = gather(self, order)
    self.step = setmetatable({ count = begins[#begins], begins = ty.tensor(begins, i64),
      wanted = ty.tensor(wanted, i64) }, { __index = gathered })
  end
  look_ahead(self)
end

--- What there is: adapters, resident (of them in the pool), pages (that these take), bytes (of these pages), host_bytes
-- (of adapters from files that are in host memory); and what was done: fetched (into the pool), evicted (from it), read
-- (from files).
---@return table
function Adapters:usage()
  local usage = { adapters = self.count, resident = 0, pages = self.resident, host_bytes = self.host_bytes,
    bytes = self.resident * self.form.page_bytes }
  for _, entry in pairs(self.entries) do
    if entry.resident then usage.resident = usage.resident + 1 end
  end
  for name, count in pairs(self.counts) do usage[name] = count end
  return usage
end

--- Takes an adapter away, with which no request runs or waits. Returns the set.
---@param name string
---@return ServeAdapters self
function Adapters:delete(name)
  local who = "ServeAdapters:delete"
  local entry = known(self, who, "name", name)
  for _, list in ipairs { self.engine.running, self.engine.waiting } do
    for _, request in ipairs(list) do
      if request.options.adapter == name then
        fail("%s: name: expected an adapter with which no request runs or waits, got %s", who, describe(name))
      end
    end
  end
  if entry.resident then send_away(self, entry) end
  if entry.path and entry.image then self.host_bytes = self.host_bytes - entry.image.bytes end
  if self.engine.prefixes then self.engine.prefixes:forget(name) end
  self.entries[name], self.count = nil, self.count - 1
  return self
end

--- Takes the adapters off the engine, which has no requests then, and its model. Returns the engine.
---@return ServeEngine
function Adapters:remove()
  local engine = self.engine
  if #engine.running + #engine.waiting > 0 then
    fail("ServeAdapters:remove: expected an engine without requests, got one with %d",
      #engine.running + #engine.waiting)
  end
  for name in pairs(self.entries) do self:delete(name) end
  for _, layer in ipairs(wrapper:wrapped("ServeAdapters:remove", self.model)) do wrapper:unwrap(layer.module) end
  engine.adapters, engine.before, self.step, self.removed = nil, self.before, nil, true
  ty.core.program.renew()
  return engine
end

return Adapters
