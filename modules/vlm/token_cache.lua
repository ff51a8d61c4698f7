--- A policy that keeps from one control step to the next what its decoder made of a picture: keys and values of tokens
-- that a learned selector finds unchanged in what matters are used again, at their positions, and these tokens go
-- through no layer. How many, a second network says. Wei et al. 2026, "Learning to Accelerate Vision-Language-Action
-- Models through Adaptive Visual Token Caching" (arXiv 2602.00686): a Cached Token Selector and a Cache Ratio
-- Predictor, trained end to end by a relaxed choice. What they see is not in the abstract; here it is what the tower
-- makes of a place now, and how that differs from when the place was last computed.
--
--     local gate = vlm.token_cache.Gate(model)
--     vlm.token_cache.fit(model, gate, batches, loss, { cost = 0.01 })
--     local policy = vlm.token_cache.apply(model, { choose = gate:chooser() })
--     observation.episodes = { 7, 8 }              -- whose memory each row has
--     policy:encode(observation); policy:denoise(x, t, condition)
local ty = require "tycho"
local arguments = require "tycho.arguments"

local nn = ty.nn
local M = {}

--- Shares of a picture's tokens of which the ratio predictor chooses one.
M.ratios = { 0, 0.25, 0.5, 0.75, 0.875, 1 }

local function check_model(who, model)
  arguments.expect(who, "model", model, "a module")
  if not model.language_model or not model.action_head or not model.see then
    arguments.fail("%s: model: expected a policy such as models.ActionModel, got %s", who, arguments.describe(model))
  end
end

-- ---- the decoder with a memory ----

-- Queries of x [n, q, width] and keys and values of y [n, t, width], by heads, turned to their positions.
local function project(attention, x, y, turn_x, turn_y)
  local q = nn.split_heads(attention.q_proj(x), attention.heads)
  local k = nn.split_heads(attention.k_proj(y), attention.kv_heads)
  return ty.rotary(q, turn_x[1], turn_x[2], false), ty.rotary(k, turn_y[1], turn_y[2], false),
    nn.split_heads(attention.v_proj(y), attention.kv_heads)
end

local function tail(x, dim) return x:narrow(dim, x.shape[dim + 1] - 1, 1) end

--- All tokens go through the decoder, and of the picture's the keys and values are mixed with those of before, m * old
-- + (1 - m) * new in every layer: the relaxed form of using them again. Where m is 1 or 0, the result is that of
-- resume(). Returns the query's state [n, hidden] and the mixed keys and values of the picture, { { k, v } of each
-- layer }.
---@param model ActionModel
---@param x Tensor      [n, t, hidden], of model:embed()
---@param old? table    what this or resume() returned; nil: nothing is mixed
---@param m? Tensor     [n, places], how much of the old is used
---@return Tensor query
---@return table memory
function M.mixed(model, x, old, m)
  local who = "token_cache.mixed"
  check_model(who, model)
  arguments.expect(who, "x", x, "a tensor")
  if old then arguments.expect(who, "m", m, "a tensor") end
  local body, places, at = model.language_model.model, model.places, model:turns(x)
  local turn, memory, behind = { at.cos, at.sin }, {}, x.shape[2] - model.places
  local share = old and m:unsqueeze(1):unsqueeze(-1)
  for i, layer in ipairs(body.layers) do
    local y, last = layer.input_layernorm(x), i == #body.layers
    local asked, turn_asked = y, turn
    if last then asked, turn_asked = tail(y, 1), { tail(at.cos, 0), tail(at.sin, 0) } end
    local q, k, v = project(layer.self_attn, asked, y, turn_asked, turn)
    local seen = { k:narrow(2, 0, places), v:narrow(2, 0, places) }
    if old then
      for j = 1, 2 do seen[j] = old[i][j] * share + seen[j] * (1 - share) end
      k = ty.concat({ seen[1], k:narrow(2, places, behind) }, 2)
      v = ty.concat({ seen[2], v:narrow(2, places, behind) }, 2)
    end
    memory[i] = seen
    if last then x = tail(x, 1) end
    x = x + layer.self_attn.o_proj(nn.attention(q, k, v, { causal = true }))
    x = x + layer.mlp(layer.post_attention_layernorm(x))
  end
  return body.norm(x):select(1, 0), memory
end

--- The tokens at `fresh` and those behind the picture go through the decoder; keys and values of the picture's others
-- are those of before. Nothing else is computed.
---@param model ActionModel
---@param x Tensor      [n, t, hidden], of model:embed()
---@param old table     { { k, v } of each layer }, [n, heads, places, width] each
---@param fresh Tensor  i64 [n, count], places in their order
---@return Tensor query
---@return table memory
function M.resume(model, x, old, fresh)
  local who = "token_cache.resume"
  check_model(who, model)
  arguments.expect(who, "x", x, "a tensor")
  arguments.expect(who, "old", old, "a table")
  arguments.expect(who, "fresh", fresh, "a tensor")
  local body, places, at = model.language_model.model, model.places, model:turns(x)
  local n, t, width, count = x.shape[1], x.shape[2], x.shape[3], fresh.shape[2]
  local behind = t - places
  local positions = ty.arange(places, t, { device = x.device }):expand(n, behind)
  if count > 0 then
    positions = ty.concat({ fresh, positions }, 1)
    x = x:gather(1, positions:unsqueeze(-1):expand(n, count + behind, width))
  else
    x = x:narrow(1, places, behind)
  end
  local cos, sin = ty.embedding(at.cos, positions):unsqueeze(1), ty.embedding(at.sin, positions):unsqueeze(1)
  local mask = ty.arange(t, { device = x.device }):reshape(1, 1, 1, t):le(positions:reshape(n, 1, count + behind, 1))
  local turn, memory = { cos, sin }, {}
  for i, layer in ipairs(body.layers) do
    local y, last = layer.input_layernorm(x), i == #body.layers
    local asked, turn_asked = y, turn
    if last then asked, turn_asked, mask = tail(y, 1), { tail(cos, 2), tail(sin, 2) }, tail(mask, 2) end
    local q, k, v = project(layer.self_attn, asked, y, turn_asked, turn)
    local seen = { old[i][1], old[i][2] }
    if count > 0 then
      local heads, size = k.shape[2], k.shape[4]
      local index = fresh:reshape(n, 1, count, 1):expand(n, heads, count, size)
      seen[1], seen[2] = seen[1]:scatter(2, index, k:narrow(2, 0, count)), seen[2]:scatter(2, index,
        v:narrow(2, 0, count))
    end
    memory[i] = seen
    k = ty.concat({ seen[1], k:narrow(2, count, behind) }, 2)
    v = ty.concat({ seen[2], v:narrow(2, count, behind) }, 2)
    if last then x = tail(x, 1) end
    x = x + layer.self_attn.o_proj(nn.attention(q, k, v, { mask = mask }))
    x = x + layer.mlp(layer.post_attention_layernorm(x))
  end
  return body.norm(x):select(1, 0), memory
end

-- ---- the choice ----

-- A 1 for each of the `counts` (a list, one for each row) largest of scores [n, places].
local function largest(scores, counts)
  local n, places = scores.shape[1], scores.shape[2]
  local rank = scores:argsort(1, true):argsort(1) -- 0: the largest
  return rank:lt(ty.tensor(counts, { dtype = "i64" }):to({ device = scores.device }):reshape(n, 1):expand(n, places))
end

--- The learned choice: a selector that scores each of the picture's tokens, the higher the sooner it is used again, and
-- a predictor of how many of them are.
---@class TokenGate: Module
local Gate = nn.module "TokenGate"
M.Gate = Gate

--- options: width (24, of both networks), ratios (M.ratios: from which the predictor chooses).
---@param model ActionModel
---@param options? { width?: integer, ratios?: number[] }
function Gate:init(model, options)
  check_model("TokenGate", model)
  local o = arguments.read("TokenGate", options, { width = 24, ratios = M.ratios }, { width = "an integer >= 1",
    ratios = "a list of numbers" })
  local hidden = model.language_model.config.hidden_size
  self.ratios, self.places = o.ratios, model.places
  self.inner = nn.Linear(2 * hidden + 1, o.width)
  self.score = nn.Linear(o.width, 1)
  self.ratio = nn.Sequential(nn.Linear(2 * o.width + 2 * model.config.state_size, o.width), nn.SiLU(),
    nn.Linear(o.width, #o.ratios))
  nn.init.zeros(self.ratio[3].weight)
  nn.init.zeros(self.ratio[3].bias)
end

--- Scores [n, places] and logits of the ratios [n, ratios]. seen, before: what the tower makes of the places now, and
-- what it made when each was last computed, [n, places, hidden]; states, states_before [n, numbers].
function Gate:forward(seen, before, states, states_before)
  for name, x in pairs { seen = seen or false, before = before or false, states = states or false,
    states_before = states_before or false } do
    arguments.expect("TokenGate", name, x, "a tensor")
  end
  local change = seen - before
  local h = self.inner(ty.concat({ seen, change, change:square():sum({ -1 }, true):sqrt() }, 2)):silu()
  local logits = self.ratio(ty.concat({ h:mean { 1 }, h:max(1), states, states - states_before }, 1))
  return self.score(h):squeeze(-1), logits
end

--- The mask of what is used again, [n, places], 1 or 0 forward: of each ratio the top tokens, of the ratios one.
-- Backward it is the relaxed one (straight through): a Gumbel softmax of the ratios, and sigmoids of how far scores lie
-- from the last one that is taken. tau: of both; noise (true): whether ratios are drawn or the likeliest are taken.
---@param scores Tensor
---@param logits Tensor
---@param options? { tau?: number, noise?: boolean }
---@return Tensor
function Gate:mask(scores, logits, options)
  local who = "TokenGate:mask"
  arguments.expect(who, "scores", scores, "a tensor")
  arguments.expect(who, "logits", logits, "a tensor")
  local o = arguments.read(who, options, { tau = 1, noise = true }, { tau = "a number > 0" })
  local n, places = scores.shape[1], scores.shape[2]
  local chosen
  if o.noise then
    chosen = ty.gumbel_softmax(logits, o.tau, true)
  else
    local soft = (logits / o.tau):softmax(-1)
    chosen = ty.one_hot(logits:argmax(1), #self.ratios):to(soft.dtype) + soft - soft:detach()
  end
  local sorted = scores:sort(1, true)
  local mask
  for i, ratio in ipairs(self.ratios) do
    local count = math.floor(ratio * places + 0.5)
    local part
    if count == 0 or count == places then
      part = ty.full({ n, places }, count == 0 and 0 or 1, { device = scores.device })
    else
      -- Between the last that is taken and the first that is not.
      local edge = (sorted:narrow(1, count - 1, 1) + sorted:narrow(1, count, 1)) / 2
      local soft = ((scores - edge) / o.tau):sigmoid()
      local hard = ty.no_grad(function() return scores:gt(edge):to(scores.dtype) end)
      part = hard + soft - soft:detach()
    end
    part = part * chosen:narrow(1, i - 1, 1)
    mask = mask and mask + part or part
  end
  return mask
end

--- The choice as apply() takes it: the likeliest ratio, the highest scores.
---@return fun(now: table): Tensor
function Gate:chooser()
  return function(now)
    local scores, logits = self:forward(now.seen, now.before, now.states, now.states_before)
    local counts = logits:argmax(1):tolist()
    for i, number in ipairs(counts) do counts[i] = math.floor(self.ratios[number + 1] * self.places + 0.5) end
    return largest(scores, counts)
  end
end

--- Other choices, to compare with: "fixed" (share: so many of the tokens by a gate's scores), "random" (share), and
-- "similar" (those whose cosine with what the tower made before is above `above`: a rule that learns nothing).
---@param kind string
---@param options { share?: number, above?: number, gate?: TokenGate }
---@return fun(now: table): Tensor
function M.chooser(kind, options)
  local who, none = "token_cache.chooser", arguments.none
  arguments.expect(who, "kind", kind, "a string")
  local o = arguments.read(who, options, { share = 0.5, above = 0.99, gate = none }, {
    share = "a number in [0, 1]", above = "a finite number", gate = "a module" })
  local function counts(seen)
    local list = {}
    for i = 1, seen.shape[1] do list[i] = math.floor(o.share * seen.shape[2] + 0.5) end
    return list
  end
  if kind == "fixed" then
    if not o.gate then arguments.fail("%s: gate: expected a module, got nil", who) end
    return function(now)
      return largest((o.gate(now.seen, now.before, now.states, now.states_before)), counts(now.seen))
    end
  elseif kind == "random" then
    return function(now)
      local drawn = ty.rand({ now.seen.shape[1], now.seen.shape[2] }, { device = now.seen.device })
      return largest(drawn, counts(now.seen))
    end
  elseif kind == "similar" then
    return function(now)
      local a, b = now.seen, now.before
      local cosine = (a * b):sum(-1) / (a:square():sum(-1) * b:square():sum(-1)):sqrt():clamp(1e-12)
      return cosine:gt(o.above)
    end
  end
  arguments.fail('%s: kind: expected "fixed", "random" or "similar", got %s', who, arguments.describe(kind))
end

-- ---- training ----

--- Trains a gate; the policy stays. batches(step) gives a table with `now` and `before`, observations of a control step
-- and of the one before it, and what `loss` needs; loss(query, batch) is that of the policy (imitation of the expert)
-- under the query's state. To it comes `cost` times the mean share that is computed anew. options: steps (150), lr
-- (3e-3), cost (0.01), tau (1). Returns { loss, reused: means of the last fifth; seconds of a step }.
---@param model ActionModel
---@param gate TokenGate
---@param batches fun(step: integer): table
---@param loss fun(query: Tensor, batch: table): Tensor
---@param options? table
---@return table report
function M.fit(model, gate, batches, loss, options)
  local who = "token_cache.fit"
  check_model(who, model)
  arguments.expect(who, "gate", gate, "a module")
  arguments.expect(who, "batches", batches, "a function")
  arguments.expect(who, "loss", loss, "a function")
  local o = arguments.read(who, options, { steps = 150, lr = 3e-3, cost = 0.01, tau = 1 }, { steps = "an integer >= 1",
    lr = "a number > 0", cost = "a number >= 0", tau = "a number > 0" })
  local frozen = {}
  for _, p in ipairs(model:parameters()) do
    if p.requires_grad then
      frozen[#frozen + 1] = p
      p:requires_grad_(false)
    end
  end
  local optimizer = ty.optim.AdamW(gate:parameters(), { lr = o.lr, weight_decay = 0, clip_norm = 1,
    schedule = ty.optim.cosine { steps = o.steps, warmup = math.min(20, o.steps // 5) } })
  local report, counted, began = { loss = 0, reused = 0 }, 0, os.clock()
  for step, _, log in ty.train.steps(nil, o.steps, { title = "gate" }) do
    local batch = batches(step)
    local now, before = batch.now, batch.before
    local seen, earlier, memory, x = ty.no_grad(function()
      local a, b = model:see(now.images, now.words), model:see(before.images, before.words)
      before.seen, now.seen = b, a
      local _, memory = M.mixed(model, model:embed(before))
      return a, b, memory, model:embed(now)
    end)
    local scores, logits = gate(seen, earlier, now.states, before.states)
    local mask = gate:mask(scores, logits, { tau = o.tau })
    local policy = loss((M.mixed(model, x, memory, mask)), batch)
    local reused = mask:mean()
    optimizer:step(policy + (1 - reused) * o.cost)
    if step > o.steps - math.max(1, o.steps // 5) then
      counted, report.loss, report.reused = counted + 1, report.loss + policy:item(), report.reused + reused:item()
    end
    if step % 10 == 0 then log { loss = policy:item(), reused = reused:item() } end
  end
  for _, p in ipairs(frozen) do p:requires_grad_(true) end
  report.loss, report.reused, report.seconds = report.loss / counted, report.reused / counted,
    (os.clock() - began) / o.steps
  return report
end

-- ---- the policy ----

--- A policy with a memory: encode and denoise, as the model it was made of.
---@class CachedPolicy
---@field model ActionModel
---@field reused number  tokens that were used again, of all that were seen, since the last reset()
local Cached = {}
Cached.__index = Cached
Cached.__name = "CachedPolicy"

--- A policy that uses again what `choose` says: a function of { seen, before, states, states_before } that gives bool
-- [n, places]. The first time that an episode is seen, all is computed. Rows of which as many tokens are computed go
-- through the decoder together; what is computed is brought up to a multiple of `step` (8) by tokens at the front of
-- the picture.
---@param model ActionModel
---@param options { choose: fun(now: table): Tensor, step?: integer }
---@return CachedPolicy
function M.apply(model, options)
  local who = "token_cache.apply"
  check_model(who, model)
  local o = arguments.read(who, options, { choose = arguments.none, step = 8 }, { choose = "a function",
    step = "an integer >= 1" })
  if not o.choose then arguments.fail("%s: choose: expected a function, got nil", who) end
  return setmetatable({ model = model, choose = o.choose, step = o.step }, Cached):reset()
end

--- Forgets all episodes.
---@return CachedPolicy
function Cached:reset()
  self.slots, self.count, self.room, self.pool = {}, 0, 0, nil
  self.used, self.all, self.reused = 0, 0, 0
  return self
end

--- The device of the model.
function Cached:device() return self.model:device() end

-- Puts what was computed into the rows `slots` (i64) of the pool, which grows.
local function remember(self, slots, given)
  if self.room < self.count then
    local room = math.max(self.count, 2 * self.room)
    local old, pool = self.pool, {}
    for key, x in pairs(given) do
      local shape = x.shape
      shape[1] = room
      pool[key] = ty.unscoped(ty.zeros, shape, { device = x.device })
      if old then pool[key]:narrow(0, 0, self.room):copy_(old[key]) end
    end
    self.pool, self.room = pool, room
  end
  for key, x in pairs(given) do self.pool[key]:index_copy_(0, slots, x) end
end

-- Memory of a decoder as a flat table, and back.
local function flat(memory, more)
  for i, pair in ipairs(memory) do more["k" .. i], more["v" .. i] = pair[1], pair[2] end
  return more
end

--- The condition of actions: { query [n, hidden], reused (bool [n, places]) }. observation: as of ActionModel:embed,
-- and episodes: a list that names whose memory each row has.
---@param observation table
---@return table
function Cached:encode(observation)
  local who = "CachedPolicy:encode"
  arguments.expect(who, "observation", observation, "a table")
  arguments.expect(who, "observation.episodes", observation.episodes, "a list")
  local model, places = self.model, self.model.places
  return ty.no_grad(function()
    local seen = model:see(observation.images, observation.words)
    local x = model:embed { images = observation.images, words = observation.words, states = observation.states,
      seen = seen }
    local n, device = x.shape[1], x.device
    local slots, groups, old_rows, old_slots = {}, { [places] = {} }, {}, {}
    for i, episode in ipairs(observation.episodes) do
      if self.slots[episode] then
        old_rows[#old_rows + 1], old_slots[#old_slots + 1] = i - 1, self.slots[episode]
      else
        self.slots[episode], self.count = self.count, self.count + 1
        table.insert(groups[places], i)
      end
      slots[i] = self.slots[episode]
    end
    local function integers(list) return ty.tensor(list, { dtype = "i64" }):to { device = device } end
    local reuse = ty.zeros({ n, places }, { dtype = "bool", device = device })
    if #old_rows > 0 then
      local rows, at = integers(old_rows), integers(old_slots)
      local chosen = self.choose { seen = seen:index_select(0, rows), before = self.pool.seen:index_select(0, at),
        states = observation.states:index_select(0, rows), states_before = self.pool.states:index_select(0, at) }
      -- Up to a multiple of the step: the first that would be used again are computed too.
      local counts = chosen:to("i64"):sum({ 1 }):tolist()
      local least = {}
      for i, count in ipairs(counts) do
        local kept = count == places and places or count // self.step * self.step
        least[i] = count - kept
        local fresh = places - kept
        groups[fresh] = groups[fresh] or {}
        table.insert(groups[fresh], old_rows[i] + 1)
      end
      local before = chosen:to("i64"):cumsum(1)
      chosen = chosen:logical_and(before:gt(integers(least):reshape(-1, 1)))
      reuse = reuse:index_copy(0, rows, chosen)
    end
    local query = ty.zeros({ n, x.shape[3] }, { device = device })
    for fresh, list in pairs(groups) do
      if #list > 0 then
        local rows, at = {}, {}
        for i, row in ipairs(list) do rows[i], at[i] = row - 1, slots[row] end
        rows, at = integers(rows), integers(at)
        local part, q, memory = #list == n and x or x:index_select(0, rows)
        local now = seen:index_select(0, rows)
        local mask = reuse:index_select(0, rows)
        if fresh == places then
          q, memory = M.mixed(model, part)
        else
          local old = {}
          for i = 1, #model.language_model.model.layers do
            old[i] = { self.pool["k" .. i]:index_select(0, at), self.pool["v" .. i]:index_select(0, at) }
          end
          local order = mask:to("i64"):argsort(1):narrow(1, 0, fresh)
          q, memory = M.resume(model, part, old, order:sort(1))
          now = ty.where(mask:unsqueeze(-1), self.pool.seen:index_select(0, at), now)
        end
        remember(self, at, flat(memory, { seen = now, states = observation.states:index_select(0, rows) }))
        query = query:index_copy(0, rows, q)
      end
    end
    self.used, self.all = self.used + reuse:to("f32"):sum():item(), self.all + n * places
    self.reused = self.used / self.all
    return { query = query, reused = reuse }
  end)
end

--- Clean actions by noised ones, as of the model.
---@param x Tensor
---@param t Tensor
---@param condition table
---@return Tensor
function Cached:denoise(x, t, condition) return self.model:denoise(x, t, condition) end

return M
