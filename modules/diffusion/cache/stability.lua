--- SADA (Jiang et al. 2025, "SADA: Stability-guided Adaptive Diffusion Acceleration"): where the path of a sample bends
-- evenly the next step needs no call of the network, and where it does not, only the tokens that disturb it are
-- computed anew. With x the sample, y = dx/dp its derivative along the path and h the step, backwards in noise,
--
--     x^ = x + h (y + h/2 y') - 2/3 h d2      y' and d2: first and second difference of y over the last steps
--
-- (on an even grid 5/6 y(t) + 5/6 y(t+1) - 4/6 y(t+2), equation 7), and a step that led to x_next is stable where
-- the mean of (x_next - x^) d2 is below 0 (criterion 3.4). Then y of the next step follows on a straight line from the
-- last two, and what the solver makes of that is exact where x is quadratic in p. Late in sampling clean samples are
-- asked for at every so many steps alone, and those between lie on the polynomial through the last of them.
-- Differences are taken on the grid as it is, in x / (alpha + sigma) over p = sigma / (alpha + sigma), where every
-- schedule is finite. Each sample decides for itself.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local blocks_of = require "tycho.diffusion.blocks"
local frame = require("tycho.diffusion.solver.frame").flow
local predictions = require "tycho.diffusion.prediction"
local samples = require "tycho.diffusion.cache.samples"

local Stability = {}
Stability.__index = Stability

local WHO = "cache.stability"

--- A part of a sampler. options: from and to (0.2 and 0.94: shares of the steps between which calls are left out),
-- late (0.48: the share from which on clean samples are interpolated; 1: never), interval (4: of these, steps from one
-- call to the next), terms (4: calls that a polynomial goes through), most (4: steps in a row without a call), tokens
-- (1: the share of the tokens that are computed in a step that is not stable), network (whose blocks take part in that:
-- a transformer whose tokens carry their places, such as DiT or SD3Transformer2DModel; wanted where tokens < 1).
---@param options? table
---@return table part
local function new(options)
  local self = arguments.read(WHO, options, { from = 0.2, to = 0.94, late = 0.48, interval = 4, terms = 4, most = 4,
    tokens = 1, network = arguments.none }, { from = "a number in [0, 1]", to = "a number in [0, 1]",
    late = "a number in [0, 1]", interval = "an integer >= 1", terms = "an integer >= 1", most = "an integer >= 0",
    tokens = "a number in (0, 1]", network = "a module" })
  if self.tokens < 1 then
    arguments.expect(WHO, "network", self.network, "a module")
    self.blocks = blocks_of(self.network)
  end
  return setmetatable(self, Stability)
end

function Stability.start() return { trace = {}, skipped = {}, row = {}, anchors = {}, features = {}, notes = {} } end

--- Takes the orders out of the network of the option `network`, if there was one.
function Stability:remove()
  if self.blocks then self.blocks:remove() end
end

-- ---- the path ----

-- Differences of y at the last of three places: y + h/2 y' and d2. entries: { place, y }, the oldest first.
local function differences(entries, h)
  local a, b, c = entries[1], entries[2], entries[3]
  local slope = (c.y - b.y) / (c.place - b.place)
  local straight = b.y + (b.y - a.y) * ((c.place - b.place) / (b.place - a.place))
  return c.y + slope * (h / 2), c.y - straight
end

-- y at a place, on the straight line through the last two of the path.
local function ahead(trace, place)
  local b, c = trace[#trace - 1], trace[#trace]
  return c.y + (c.y - b.y) * ((place - c.place) / (c.place - b.place))
end

-- The polynomial through { place, x0 }, at a place: Lagrange's form.
local function interpolated(anchors, place)
  local sum
  for i, anchor in ipairs(anchors) do
    local weight = 1.0
    for j, other in ipairs(anchors) do
      if j ~= i then weight = weight * (place - other.place) / (anchor.place - other.place) end
    end
    local term = anchor.x0 * weight
    sum = sum and sum + term or term
  end
  return sum
end

-- [n, 1, ...] of 1 and 0, by a list of booleans.
local function mask(list, like)
  local values, shape = {}, { #list }
  for i, set in ipairs(list) do values[i] = set and 1 or 0 end
  for d = 2, like.ndim do shape[d] = 1 end
  return ty.tensor(values, { device = like.device }):reshape(shape):gt(0)
end

-- ---- tokens ----

-- Runs next with orders for every block: of the rows' tokens only those at index [rows, k] are computed, the others
-- stay as they were; without index all are, and are kept.
local function with_tokens(self, state, request, index, next)
  local blocks, ids = self.blocks, samples.of(request)
  local function key(i, row) return ("%d %s %d"):format(i, request.branches[(row - 1) // #ids + 1],
    ids[(row - 1) % #ids + 1]) end
  for i, name in ipairs(blocks.names) do
    blocks:replace(name, name, function(run_block, _, x, ...)
      local y, text
      if index then
        local wide = index:unsqueeze(2):expand(index.shape[1], index.shape[2], x.shape[3])
        local part
        part, text = run_block(x:gather(1, wide), ...)
        local rows = {}
        for r = 1, x.shape[1] do rows[r] = state.features[key(i, r)] end
        y = ty.concat(rows, 0):scatter(1, wide, part)
      else
        y, text = run_block(x, ...)
      end
      for r = 1, x.shape[1] do state.features[key(i, r)] = ty.keep(y:narrow(0, r - 1, 1):clone()) end
      return y, text
    end)
  end
  local ok, y = pcall(next, request)
  blocks:clear()
  if not ok then error(y, 0) end
  return y
end

-- The tokens of each row of a request that disturb the path most, i64 [rows, k].
local function unstable_tokens(self, state, request)
  local list = {}
  for _ = 1, #request.branches do
    for _, id in ipairs(samples.of(request)) do
      local score = state.scores:narrow(0, id, 1)
      local k = math.max(1, math.ceil(self.tokens * score.shape[2]))
      local _, places = score:topk(k, 1)
      list[#list + 1] = places
    end
  end
  return ty.concat(list, 0)
end

-- How much each token disturbs the path, [n, tokens]: the means of `product` over the patches of the network.
local function token_scores(self, product)
  local patch = self.network.config and self.network.config.patch_size or self.network.patch or 1
  return product:mean(1, true):avg_pool2d(patch):flatten(1)
end

local function call_network(self, run, state, request, next)
  if not self.blocks then return next(request) end
  local whole, part = {}, {}
  for place, id in ipairs(samples.of(request)) do
    local by_token = state.scores and state.sparse and state.sparse[id + 1]
    table.insert(by_token and part or whole, place)
    if by_token then state.notes[id + 1][run.step] = "tokens" end
  end
  local rows = {}
  for _, places in ipairs { whole, part } do
    if #places > 0 then
      local narrowed = samples.narrow(request, places)
      local index = places == part and unstable_tokens(self, state, narrowed) or nil
      local split = samples.split(narrowed, with_tokens(self, state, narrowed, index, next))
      for name, list in pairs(split) do
        rows[name] = rows[name] or {}
        for i, place in ipairs(places) do rows[name][place] = list[i] end
      end
    end
  end
  return samples.join(request, rows)
end

-- ---- the stages of a step ----

function Stability:call(run, next, request)
  local state = run.state[self]
  local places = {}
  for place, id in ipairs(samples.of(request)) do
    state.notes[id + 1] = state.notes[id + 1] or {}
    if not state.skipped[id + 1] then
      places[#places + 1] = place
      state.notes[id + 1][run.step] = "call"
    end
  end
  if #places == #samples.of(request) then return call_network(self, run, state, request, next) end
  local narrowed = samples.narrow(request, places)
  local made = samples.split(narrowed, call_network(self, run, state, narrowed, next))
  -- Rows of samples that are left out are never looked at: predict() puts their estimates there.
  local rows = samples.split(request, ty.zeros_like(request.x))
  for name, list in pairs(made) do
    for i, place in ipairs(places) do rows[name][place] = list[i] end
  end
  return samples.join(request, rows)
end

-- What goes on for samples without a call: the clean sample between anchors, or the derivative ahead.
local function estimate(self, run, state, x, point, skipped)
  local place, scale = frame.place(point), frame.scale(point)
  local y = ahead(state.trace, place)
  if state.late then
    -- x / scale = (1 - p) x0 + p e, so y = e - x0 = (x / scale - x0) / p.
    local x0 = interpolated(state.anchors, place)
    y = (x / scale - x0) / place
  end
  for i, set in ipairs(skipped) do
    state.notes[i] = state.notes[i] or {}
    if set then state.notes[i][run.step] = state.late and "between" or "ahead" end
  end
  local made = predictions.new(frame.kind, x, y, point, run.data)
  return run.clip and made:with_sample(run.clip(made:as "sample", point)) or made
end

function Stability:predict(run, next, x, point)
  local state, some, all = run.state[self], false, true
  for i = 1, x.shape[1] do
    some, all = some or state.skipped[i] or false, all and state.skipped[i] or false
  end
  if all then return estimate(self, run, state, x, point, state.skipped) end
  local made = next(x, point)
  if not some then return made end
  local guessed = estimate(self, run, state, x, point, state.skipped)
  local y = ty.where(mask(state.skipped, x), guessed:as(frame.kind), made:as(frame.kind))
  return predictions.new(frame.kind, x, y, point, run.data)
end

-- Which samples go without a call in the step that follows, from what this one did.
local function decide(self, run, state, x, y, point, to, x_next)
  local n, steps, following = x.shape[1], #run.points - 1, run.step + 1
  local trace, place = state.trace, frame.place(point)
  trace[#trace + 1] = { place = place, y = ty.keep(y) }
  if #trace > 3 then table.remove(trace, 1) end
  if (run.step - 1) % self.interval == 0 then -- a step with a call, late in sampling
    table.insert(state.anchors, { place = place, x0 = ty.keep(x / frame.scale(point) - y * place) })
    if #state.anchors > self.terms then table.remove(state.anchors, 1) end
  end
  local inside = following > self.from * steps and following <= self.to * steps and following < steps
  state.late = inside and following > self.late * steps and #state.anchors >= math.min(2, self.terms)
  state.skipped, state.sparse = {}, {}
  if not inside or #trace < 3 then return end
  if state.late then
    local skips = (following - 1) % self.interval ~= 0
    for i = 1, n do state.skipped[i] = skips end
    return
  end
  local h = frame.place(to) - place
  local straight, bend = differences(trace, h)
  local expected = x / frame.scale(point) + straight * h - bend * (2 / 3 * h)
  local product = (x_next / frame.scale(to) - expected) * bend
  local means = product:flatten(1):mean(1):tolist()
  for i = 1, n do
    local row = state.row[i] or 0
    local skips = means[i] < 0 and row < self.most
    state.row[i], state.skipped[i], state.sparse[i] = skips and row + 1 or 0, skips, not skips and means[i] >= 0
  end
  if self.blocks then state.scores = ty.keep(token_scores(self, product)) end
end

function Stability:advance(run, next, prediction, to)
  local state, point = run.state[self], prediction.point
  local x_next = next(prediction, to)
  if run.step < #run.points - 1 then
    decide(self, run, state, prediction.x, prediction:as(frame.kind), point, to, x_next)
  end
  return x_next
end

--- What a run of a sampler with this part noted, for each sample by step: "call", "tokens" (a call for some tokens
-- alone), "ahead" (none: the derivative on a straight line) or "between" (none: the clean sample on a polynomial).
---@param run Run
---@return string[][]
function Stability:notes(run)
  local state = type(run) == "table" and type(run.state) == "table" and run.state[self]
  if not state then error("cache.stability: notes: run: expected a run of a sampler with this part, got another", 2) end
  return state.notes
end

return new
