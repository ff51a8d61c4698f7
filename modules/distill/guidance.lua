--- Guidance in one pass: small adapters on a frozen network imitate its guided prediction at any scale. Jensen and
-- Sadat 2025, "Efficient Distillation of Classifier-Free Guidance using Adapters" (AGD): they are trained on states of
-- guided sampling, which is where they will be asked.
--
--     local student = distill.GuidanceAdapters(model, { kind = "attention", hidden = 8 })
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

-- A number [n] as a vector: cosines of random frequencies, layers, a norm, as the authors' code has it; the scale is
-- near 1, where frequencies of order 1 tell it well.
local Scalar = nn.module "GuidanceScale"

function Scalar:init(width)
  self:buffer("frequencies", ty.randn { width })
  self:buffer("phases", ty.rand { width })
  self.fc1, self.fc2, self.norm = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.LayerNorm(width)
end

function Scalar:forward(s)
  local waves = ((s:unsqueeze(1) * self.frequencies + self.phases) * (2 * math.pi)):cos()
  return self.norm(self.fc2(self.fc1(waves):relu()))
end

local function zeros(linear)
  nn.init.zeros(linear.weight)
  nn.init.zeros(linear.bias)
  return linear
end

-- The vectors that an adapter is told: of the scale, and of what the network embeds, brought to one width.
local Told = nn.module "GuidanceTold"

function Told:init(widths, hidden)
  self.scale = Scalar(hidden)
  self.projections = nn.ModuleList {}
  for _, width in ipairs(widths) do self.projections:append(nn.Linear(width, hidden)) end
end

function Told:forward(now)
  local list = { self.scale(now.scale) }
  for i, projection in ipairs(self.projections) do list[i + 1] = projection(now.embedded[i]) end
  return list
end

-- The same for all positions: layers of the sum of the vectors.
local Offset = nn.module "GuidanceOffset"

function Offset:init(widths, hidden, outputs)
  self.told = Told(widths, hidden)
  self.fc1, self.norm = nn.Linear(hidden, hidden), nn.LayerNorm(hidden)
  self.fc2 = zeros(nn.Linear(hidden, outputs))
end

function Offset:forward(x, now)
  local list = self.told(now)
  local sum = list[1]
  for i = 2, #list do sum = sum + list[i] end
  local y = self.fc2(self.norm(self.fc1(sum):relu()))
  for _ = 3, x.ndim do y = y:unsqueeze(1) end
  return y
end

-- Each position attends to the vectors as to tokens, which know their places.
local Cross = nn.module "GuidanceCrossAttention"

function Cross:init(widths, hidden, outputs)
  self.told = Told(widths, hidden)
  self.places = ty.randn({ #widths + 1, hidden }):mul_(0.02):requires_grad_()
  self.q = nn.Linear(outputs, hidden, { bias = false })
  self.k, self.v = nn.Linear(hidden, hidden, { bias = false }), nn.Linear(hidden, hidden, { bias = false })
  self.out = zeros(nn.Linear(hidden, outputs))
end

function Cross:forward(x, now)
  local tokens = ty.stack(self.told(now), 1) + self.places
  local q, k, v = self.q(x), self.k(tokens), self.v(tokens)
  local y = nn.attention(q:unsqueeze(1), k:unsqueeze(1), v:unsqueeze(1)):squeeze(1)
  return self.out(y)
end

local classes = { offset = Offset, attention = Cross }

-- ---- on a network ----

local adapted = nn.surgery.wrapper { name = "Guided", field = "_guidance", forward = function(base)
  return function(self, x, ...)
    local state = self._guidance
    local results = table.pack(base.forward(self, x, ...))
    if state.shared.now then results[1] = results[1] + state.adapter(results[1], state.shared.now) end
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
-- off(), it is the network. At the start adapters add 0. options: kind ("offset": the same vector for all positions;
-- "attention": positions attend to scale, time and condition), hidden (8: width inside of adapters), targets (names of
-- modules, or ends of names; all whose class is called attention; "time": the embedding of time alone, by which all
-- layers are told the scale, as Meng et al. 2023, "On Distillation of Guided Diffusion Models"), embed (a function of
-- (model, t, condition): a list of what the network makes of time and condition, [n, width] each; known for DiT and
-- SD3), widths (of these; measured by a call of embed where it is known), train (false; true: the network's own weights
-- are trained as well).
---@param model Module
---@param options? table
function GuidanceAdapters:init(model, options)
  local who = "GuidanceAdapters"
  expect(who, "model", model, "a module")
  local o = arguments.read(who, options, { kind = "offset", hidden = 8, targets = none, embed = none, widths = none,
    train = false }, { kind = '"offset" or "attention"', hidden = "an integer >= 1",
    targets = '"time" or a list of strings', embed = "a function", widths = "a list of integers >= 1" })
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
  self.adapters = nn.ModuleList {}
  self.shared = {}
  for _, target in ipairs(targets_of(who, model, o.targets)) do
    local linears = nn.surgery.find(who, target.module)
    if #linears == 0 then fail("%s: targets: expected modules with linear layers, got %s", who, target.name) end
    local adapter = classes[o.kind](widths, o.hidden, linears[#linears].module.weight.shape[1])
    self.adapters:append(adapter)
    adapted:wrap(target.module, { adapter = adapter, shared = self.shared })
  end
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
  expect("GuidanceAdapters", "condition.scale", condition.scale, "a tensor")
  local embedded = self.embed(self.model, t, rest)
  self.shared.now = { scale = condition.scale:to(x.dtype), embedded = embedded }
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
function GuidanceAdapters:share() return self.adapters:count_parameters() / self.model:count_parameters() end

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
