--- Adapters switched by row of a batch: several LoRAs on one model, each row of a batch with one of them or with none.
--
--     local set = peft.rows(model)
--     set:add("french", "adapters/french")               -- a folder or a file, as peft.load reads it
--     set:add("poems")                                   -- or the adapter that the model has, which is taken off it
--     set:use { "french", "poems", "french", false }     -- of the rows of the next batches
--     print(model:generate(prompts))
--     set:remove()
--
-- The weights are multiplied once with all rows. What adapters add is two products of batches of matrices, [rows of an
-- adapter, inputs] [inputs, rank] [rank, outputs], whatever the rows' order: rows are brought together by adapter, and
-- adapters with fewer rows are filled up. Where each row has its own adapter there is nothing to bring together. The
-- idea of serving so: Chen et al. 2023, "Punica: Multi-Tenant LoRA Serving"; Sheng et al. 2023, "S-LoRA".
local ty = require "tycho"
local arguments = require "tycho.arguments"
local adapter = require "tycho.peft.adapter"
local files = require "tycho.peft.files"
local layers = require "tycho.peft.layers"

local surgery = ty.nn.surgery
local expect, fail, describe = arguments.expect, arguments.fail, arguments.describe
local M = {}

--- The adapters of a model, by name.
---@class AdapterRows
---@field names string[]  in the order in which they were added
local AdapterRows = {}
AdapterRows.__index = AdapterRows
M.AdapterRows = AdapterRows

-- ---- what a batch's rows add ----

-- The rows of a batch by adapter: numbers of the adapters that are used, i64 [used * most] the rows of each, filled up
-- with row 0, and i64 [rows] where each row is among them. In order (nil, nil): as many rows of each, one after the
-- other.
local function plan_of(list, device)
  local rows_of, used = {}, {}
  for i, number in ipairs(list) do
    if not rows_of[number] then
      rows_of[number] = {}
      used[#used + 1] = number
    end
    table.insert(rows_of[number], i - 1)
  end
  local most, order, back, in_order = 0, {}, {}, true
  for _, number in ipairs(used) do most = math.max(most, #rows_of[number]) end
  for k, number in ipairs(used) do
    for j = 1, most do
      local row = rows_of[number][j]
      if row then back[row + 1] = (k - 1) * most + j - 1 end
      in_order = in_order and row == #order
      order[#order + 1] = row or 0
    end
  end
  local function indices(of) return ty.keep(ty.tensor(of, { dtype = "i64", device = device })) end
  return { rows = #list, used = used, most = most, order = not in_order and indices(order) or nil,
    back = not in_order and indices(back) or nil }
end

-- A and B of the adapters that are used, [used, rank, inputs] and [used, rank, outputs], which wait until others are.
local function matrices(state, plan)
  if state.plan ~= plan then
    local a, b = state.a, state.b
    local whole = #plan.used == a.shape[1]
    for i, number in ipairs(plan.used) do whole = whole and number == i end
    if not whole then
      local at = {}
      for i, number in ipairs(plan.used) do at[i] = number - 1 end
      at = ty.tensor(at, { dtype = "i64", device = a.device })
      a, b = ty.keep(a:index_select(0, at)), ty.keep(b:index_select(0, at))
    end
    state.plan, state.chosen_a, state.chosen_b = plan, a, b
  end
  return state.chosen_a, state.chosen_b
end

local wrapper = surgery.wrapper { name = "Rows", field = "_rows",
  forward = function(base)
    return function(self, x, residual, activation)
      local state = self._rows
      local plan = state.set.plan
      if not plan then return base.forward(self, x, residual, activation) end
      local shape = x.shape
      if shape[1] ~= plan.rows then
        fail("peft.rows: expected a batch of %d rows, as set:use says, got %d", plan.rows, shape[1])
      end
      local a, b = ty.no_grad(matrices, state, plan)
      local y = base.forward(self, x, residual)
      local h = x:to(a.dtype):reshape(plan.rows, -1)
      if plan.order then h = h:index_select(0, plan.order) end
      local added = ty.matmul(ty.matmul(h:reshape(#plan.used, -1, shape[#shape]), a:transpose(1, 2)), b)
      if plan.back then
        added = added:reshape(#plan.used * plan.most, -1):index_select(0, plan.back)
      end
      return surgery.finish(y + added:reshape(y.shape):to(y.dtype), nil, activation)
    end
  end,
  describe = function(state) return ("%d adapters by row"):format(state.a.shape[1] - 1) end }

-- ---- the set ----

local function new(model, options)
  local who = "peft.rows"
  expect(who, "model", model, "a module")
  local o = arguments.read(who, options, { dtype = "f32" })
  adapter.check_dtype(who, o.dtype)
  if rawget(model, "_rows_set") then
    fail("%s: model: expected one without a set, got one that has it: set:remove() takes it off", who)
  end
  local self = setmetatable({ model = model, dtype = o.dtype, names = {}, numbers = {}, parts = {} }, AdapterRows)
  rawset(model, "_rows_set", self)
  return self
end

-- A and B times the scale of each layer of the model's adapter: { name = { a [rank, inputs], b [rank, outputs] } }. A
-- row of a batch times such an A is a few sums along memory, for which nothing is packed.
local function taken(who, self)
  local record, parts = adapter.of(who, self.model), {}
  adapter.plain(who, record)
  if #record.saved > 0 then
    error(who .. ": expected an adapter of low-rank matrices alone, got one that has parameters of its own besides", 0)
  end
  if record.merged then error(who .. ": expected an adapter that is not merged", 0) end
  for _, layer in ipairs(record.layers) do
    local state = layer.module._lora
    if layers.kind(layer.module) ~= "linear" or layer.module.lora_magnitude_vector then
      error(("%s: %s: expected plain LoRA on linear layers, got %s"):format(who, layer.name,
        layer.module.lora_magnitude_vector and "DoRA" or "a layer of another kind"), 0)
    end
    local pair = layers.published(layer.module)
    local scale = state.scale
    parts[layer.name] = ty.no_grad(function()
      local a, b = pair[1][2]:detach():to(self.dtype), pair[2][2]:detach():to(self.dtype)
      return { a = ty.keep(a:clone()), b = ty.keep((b * scale):transpose(0, 1):contiguous()) }
    end)
  end
  return parts
end

-- Stacks the adapters' matrices of each layer, the last of zeros, for rows without an adapter. Adapters of lower rank
-- have zeros besides.
local function stack(self)
  local wanted, modules = {}, select(2, surgery.modules(self.model))
  for _, parts in ipairs(self.parts) do
    for name, part in pairs(parts) do wanted[name] = math.max(wanted[name] or 0, part.a.shape[1]) end
  end
  for name, rank in pairs(wanted) do
    local module = modules[name]
    local inputs, outputs = surgery.sizes(module)
    local options = { dtype = self.dtype, device = module.weight.device }
    local a = ty.zeros({ #self.parts + 1, rank, inputs }, options)
    local b = ty.zeros({ #self.parts + 1, rank, outputs }, options)
    for i, parts in ipairs(self.parts) do
      local part = parts[name]
      if part then
        local r = part.a.shape[1]
        a:select(0, i - 1):narrow(0, 0, r):copy_(part.a)
        b:select(0, i - 1):narrow(0, 0, r):copy_(part.b)
      end
    end
    local state = { set = self, a = ty.keep(a), b = ty.keep(b) }
    if wrapper:state(module) then rawset(module, "_rows", state) else wrapper:wrap(module, state) end
  end
  ty.core.program.renew()
end

--- Adds an adapter: of a folder or a file, as peft.load reads it, or, without a path, the one that the model has, which
-- is taken off it. Plain LoRA on linear layers (PiSSA and rsLoRA too), of any ranks and layers; nothing else of it may
-- be trained. The batches that follow use none until set:use. Returns the set.
---@param name string
---@param path? string
---@return AdapterRows self
function AdapterRows:add(name, path)
  local who = "AdapterRows:add"
  expect(who, "name", name, "a string")
  expect(who, "path", path, "a string or nil")
  if self.removed then fail("%s: expected a set that is on its model, got one that was removed", who) end
  if self.numbers[name] then fail("%s: name: expected a new one, got %s", who, describe(name)) end
  local model = self.model
  if path then
    -- The layers' wrappers stay on: names and weights are what they were.
    files.load(model, path)
  end
  local ok, parts = pcall(taken, who, self)
  if path or ok then adapter.remove(model) end
  if not ok then arguments.raise(parts) end
  self.names[#self.names + 1] = name
  self.parts[#self.parts + 1], self.numbers[name], self.plan = parts, #self.names, nil
  ty.no_grad(stack, self)
  return self
end

--- Says which adapter each row of the next batches has: a list of names, false for none; nil: the model alone, with
-- batches of any size. Returns the set.
---@param rows? (string|false)[]
---@return AdapterRows self
function AdapterRows:use(rows)
  local who = "AdapterRows:use"
  expect(who, "rows", rows, "a list or nil")
  if self.removed then fail("%s: expected a set that is on its model, got one that was removed", who) end
  self.plan = nil
  ty.core.program.renew()
  if not rows then return self end
  local numbers = {}
  for i, name in ipairs(rows) do
    local number = name == false and #self.names + 1 or self.numbers[name]
    if not number then
      fail("%s: rows: expected names of adapters (%s) or false, got %s as element %d", who,
        table.concat(self.names, ", "), describe(name), i)
    end
    numbers[i] = number
  end
  if #numbers == 0 then fail("%s: rows: expected at least one row, got an empty table", who) end
  self.plan = plan_of(numbers, self.model:device())
  return self
end

--- Takes the adapters off the model, which is what it was. Returns the model.
---@return Module model
function AdapterRows:remove()
  for _, layer in ipairs(wrapper:wrapped("AdapterRows:remove", self.model)) do wrapper:unwrap(layer.module) end
  rawset(self.model, "_rows_set", nil)
  self.plan, self.removed = nil, true
  ty.core.program.renew()
  return self.model
end

--- A set of adapters for a model, none yet. options: dtype ("f32", of the adapters).
---@param model Module
---@param options? {dtype?: string}
---@return AdapterRows
function M.new(model, options) return new(model, options) end

return M
