--- Guidance in one pass: small adapters on a frozen network imitate its guided prediction at any scale. Jensen and
-- Sadat 2025, "Efficient Distillation of Classifier-Free Guidance using Adapters" (AGD): they are trained on states of
-- guided sampling, which is where they will be asked.
--
--     local student = distill.GuidanceAdapters(model, { kind = "attention", hidden = 8, heads = 8 })
--     distill.fit(student, store:loader(), { loss = distill.guidance_loss, steps = 400 })   -- of distill.trajectories
--     local samples = flow:sample(student, shape, { condition = { labels = labels, scale = ty.full({ n }, 3) } })
--
-- What an adapter knows of time and condition are the network's own embeddings of them, which are frozen.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local material = require "tycho.distill.material"

local nn = ty.nn
local expect, fail, none = arguments.expect, arguments.fail, arguments.none

-- ---- adapters ----

local function zeros(linear)
  nn.init.zeros(linear.weight)
  nn.init.zeros(linear.bias)
  return linear
end

-- The vectors that adapters are told, one of the scale and one of each thing that the network embeds, [n, 1 + things,
-- width]; the same for all adapters. The authors' code makes a number cosines of random frequencies, of which it has
-- hundreds; where there are ten, layers of the number itself tell it better.
local Told = nn.module "GuidanceTold"

function Told:init(widths, width)
  self.fc1, self.fc2 = nn.Linear(1, 2 * width), nn.Linear(2 * width, width)
  self.projections = nn.ModuleList {}
  for _, inputs in ipairs(widths) do self.projections:append(nn.Linear(inputs, width)) end
end

function Told:forward(scale, embedded)
  local list = { self.fc2(self.fc1(scale:unsqueeze(1)):relu()) }
  for i, projection in ipairs(self.projections) do list[i + 1] = projection(embedded[i]) end
  return ty.stack(list, 1)
end

-- The same for all positions: layers of the sum of the vectors.
local Offset = nn.module "GuidanceOffset"

function Offset:init(o)
  self.fc1, self.norm = nn.Linear(o.told, o.hidden), nn.LayerNorm(o.hidden)
  self.fc2 = zeros(nn.Linear(o.hidden, o.outputs))
end

function Offset:forward(_, told) return self.fc2(self.norm(self.fc1(told:sum(1)):relu())) end

-- Each position of what the layer is given attends to the vectors as to tokens, which know their places. (What the
-- layer gives knows less of the picture: its own attention has mixed the positions.)
local Cross = nn.module "GuidanceCrossAttention"

function Cross:init(o)
  self.heads = o.heads
  self.places = ty.randn({ o.tokens, o.told }):mul_(0.02):requires_grad_()
  self.q = nn.Linear(o.inputs, o.hidden, { bias = false })
  self.k, self.v = nn.Linear(o.told, o.hidden, { bias = false }), nn.Linear(o.told, o.hidden, { bias = false })
  self.out = zeros(nn.Linear(o.hidden, o.outputs))
end

function Cross:forward(x, told)
  local tokens = told + self.places
  local function split(y) return y:reshape(y.shape[1], y.shape[2], self.heads, -1):transpose(1, 2) end
  return self.out(nn.attention(split(self.q(x)), split(self.k(tokens)), split(self.v(tokens))))
end

local classes = { offset = Offset, attention = Cross }

-- ---- on a network ----

local adapted = nn.surgery.wrapper { name = "Guided", field = "_guidance", forward = function(base)
  return function(self, x, ...)
    local state = self._guidance
    local results, now = table.pack(base.forward(self, x, ...)), state.shared.now
    if now then
      local y = state.adapter(x, now.told)
      y = y * now.weight:reshape(-1, table.unpack({ 1, 1, 1 }, 1, y.ndim - 1))
      for _ = y.ndim + 1, results[1].ndim do y = y:unsqueeze(1) end
      results[1] = results[1] + y
    end
    return table.unpack(results, 1, results.n)
  end
end }

-- What the networks of tycho.models make of time and condition, as a list of [n, width].
local function own_embeddings(model, t, condition)
  if model.t_embedder and model.y_embedder then
    return { model.t_embedder(t), model.y_embedder(condition.labels) }
  elseif model.time_text_embed and condition.text then
    return { model.time_text_embed(t, condition.text.pooled) }
  end
  return fail("GuidanceAdapters: embed: expected a function, for a network without t_embedder and y_embedder, or "
    .. "time_text_embed; got none")
end

local function targets_of(who, model, targets)
  local names, modules = nn.surgery.modules(model)
  local list = {}
  local wanted
  if targets == "time" then
    local name = model.t_embedder and "t_embedder" or model.time_text_embed and "time_text_embed"
    targets = { name or fail('%s: targets: expected a network with t_embedder or time_text_embed for "time", '
      .. "got neither", who) }
  end
  if targets then
    local set, problem = nn.surgery.resolve(targets, names, modules)
    wanted = set or fail("%s: targets: %s", who, problem)
  end
  for _, name in ipairs(names) do
    local class = getmetatable(modules[name]).__name
    if wanted and wanted[name] or not wanted and class:find "Attention" then
      list[#list + 1] = { name = name, module = modules[name] }
    end
  end
  if #list == 0 then fail("%s: targets: expected a network with attention, or names of modules; found none", who) end
  return list
end

---@class GuidanceAdapters: Module
---@field model Module
---@field null_label? integer
local GuidanceAdapters = nn.module "GuidanceAdapters"

--- Adapters on the attention of a network, which is frozen; it is called as model(x, t, condition), with
-- condition.scale [n], the scale of guidance, besides what the network itself is told. Without a scale, and after
-- off(), it is the network. At the start adapters add 0. What guidance adds to the conditional prediction is
-- (scale - 1) (conditional - null), so what adapters add is multiplied by scale - 1, and at scale 1 as well it is the
-- network; the paper's have to learn that. options: kind ("offset": the same vector for all positions; "attention":
-- positions attend to scale, time and condition), hidden (8: width inside of adapters), heads (1: of "attention"), told
-- (8: width of what adapters are told, which they share), targets (names of modules, or ends of names; all whose class
-- is called attention; "time": the embedding of time alone, by which all layers are told the scale, as Meng et al.
-- 2023, "On Distillation of Guided Diffusion Models"), embed (a function of (model, t, condition): a list of what the
-- network makes of time and condition, [n, width] each; known for DiT and SD3), widths (of these; known where embed
-- is), train (false; true: the network's own weights are trained as well).
---@param model Module
---@param options? table
function GuidanceAdapters:init(model, options)
  local who = "GuidanceAdapters"
  expect(who, "model", model, "a module")
  local o = arguments.read(who, options, { kind = "offset", hidden = 8, heads = 1, told = 8, targets = none,
    embed = none, widths = none, train = false }, { kind = '"offset" or "attention"', hidden = "an integer >= 1",
    heads = "an integer >= 1", told = "an integer >= 1", targets = '"time" or a list of strings',
    embed = "a function", widths = "a list of integers >= 1" })
  if o.hidden % o.heads ~= 0 then
    fail("%s: heads: expected a divisor of hidden, %d, got %d", who, o.hidden, o.heads)
  end
  local widths = o.widths
  if not widths then
    local linear = function(module)
      local list = nn.surgery.find(who, module)
      return list[#list].module.weight.shape[1]
    end
    if model.t_embedder and model.y_embedder and not o.embed then
      local width = linear(model.t_embedder)
      widths = { width, width }
    elseif model.time_text_embed and not o.embed then
      widths = { linear(model.time_text_embed) }
    else
      fail("%s: widths: expected those of what embed returns, got none", who)
    end
  end
  model:requires_grad_(o.train)
  self.model, self.null_label, self.embed = model, model.null_label, o.embed or own_embeddings
  self.told, self.adapters = Told(widths, o.told), nn.ModuleList {}
  self.shared = {}
  for _, target in ipairs(targets_of(who, model, o.targets)) do
    local linears = nn.surgery.find(who, target.module)
    if #linears == 0 then fail("%s: targets: expected modules with linear layers, got %s", who, target.name) end
    local adapter = classes[o.kind] { hidden = o.hidden, heads = o.heads, told = o.told, tokens = 1 + #widths,
      inputs = linears[1].module.weight.shape[2], outputs = linears[#linears].module.weight.shape[1] }
    self.adapters:append(adapter)
    adapted:wrap(target.module, { adapter = adapter, shared = self.shared })
  end
  self.told:to(model:device())
  self.adapters:to(model:device())
end

--- What the network with its adapters says: the guided prediction, of the scales in condition.scale.
---@param x Tensor
---@param t Tensor
---@param condition table
---@return Tensor
function GuidanceAdapters:forward(x, t, condition)
  expect("GuidanceAdapters", "condition", condition, "a table")
  local rest = {}
  for key, value in pairs(condition) do
    if key ~= "scale" then rest[key] = value end
  end
  if condition.scale == nil or self.shared.off then return self.model(x, t, rest) end
  local scale = expect("GuidanceAdapters", "condition.scale", condition.scale, "a tensor")
  if scale.ndim ~= 1 or scale.shape[1] ~= x.shape[1] then
    fail("GuidanceAdapters: condition.scale: expected [%d], got %s", x.shape[1], arguments.describe(scale))
  end
  local weight = scale:to(x.dtype) - 1
  self.shared.now = { weight = weight, told = self.told(weight, self.embed(self.model, t, rest)) }
  local result = table.pack(pcall(self.model, x, t, rest))
  self.shared.now = nil
  if not result[1] then error(result[2], 0) end
  return result[2]
end

--- The network at one scale of guidance, for samplers: a function of (x, t, condition) that adds condition.scale.
---@param scale number
---@return fun(x: Tensor, t: Tensor, condition: table): Tensor
function GuidanceAdapters:at(scale)
  expect("GuidanceAdapters:at", "scale", scale, "a finite number")
  return function(x, t, condition)
    local told = { scale = ty.full({ x.shape[1] }, scale, { device = x.device }) }
    for key, value in pairs(condition) do told[key] = value end
    return self(x, t, told)
  end
end

--- Switches the adapters off, or on again with false: the network as it was, whatever the condition says of a scale.
---@param off? boolean  (true)
---@return GuidanceAdapters
function GuidanceAdapters:off(off)
  self.shared.off = expect("GuidanceAdapters:off", "off", off, "a boolean or nil") ~= false
  return self
end

--- Takes the adapters away; the network is a plain one again.
---@return Module model
function GuidanceAdapters:unwrap()
  for _, layer in ipairs(adapted:wrapped("GuidanceAdapters:unwrap", self.model)) do adapted:unwrap(layer.module) end
  return self.model
end

--- The parameters of the adapters, of all those of the network itself.
---@return number share
function GuidanceAdapters:share()
  return (self.told:count_parameters() + self.adapters:count_parameters()) / self.model:count_parameters()
end

--- The loss of adapters on states of guided sampling, for distill.fit on what distill.trajectories made: the mean
-- square distance of one pass to the guided prediction.
---@param parts DistillParts
---@param batch table
---@return Tensor
local function loss(parts, batch)
  local who = "distill.guidance_loss"
  expect(who, "batch", batch, "a table")
  for _, name in ipairs { "x", "time", "scale", "target" } do
    expect(who, "batch." .. name, batch[name], "a tensor")
  end
  local condition = material.condition(batch)
  condition.scale = batch.scale
  return ty.mse_loss(parts.student(batch.x, batch.time, condition), batch.target)
end

--- How far one pass is from the guided prediction on states of distill.trajectories: the root mean square of their
-- difference, of that of the guided prediction. options: batch (250: states at once).
---@param student Module
---@param items table<string, Tensor>  x, time, scale, target, condition.*; the tensors of a store of them
---@param options? { batch?: integer }
---@return number
local function distance(student, items, options)
  local who = "distill.guidance_distance"
  expect(who, "student", student, "a module")
  expect(who, "items", items, "a table")
  expect(who, "items.target", items.target, "a tensor")
  local o = arguments.read(who, options, { batch = 250 }, { batch = "an integer >= 1" })
  local there = { device = student:device() }
  return ty.no_grad(function()
    local sum, norm, count = 0.0, 0.0, items.target.shape[1]
    for start = 0, count - 1, o.batch do
      ty.scope(function()
        local n, part = math.min(o.batch, count - start), {}
        for name, tensor in pairs(items) do part[name] = tensor:narrow(0, start, n):to(there) end
        sum = sum + loss({ student = student }, part):item() * n
        norm = norm + part.target:square():mean():item() * n
      end)
    end
    return math.sqrt(sum / norm)
  end)
end

return { GuidanceAdapters = GuidanceAdapters, loss = loss, distance = distance }
