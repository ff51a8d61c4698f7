--- Models as ONNX files: one call is traced op by op, and each op becomes nodes of the standard. What an op that is not
-- known is made of is tried in its place.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local values = require "tycho.hub.onnx.values"

local M = {}

local OPSET, IR = 20, 9

-- Op -> function(b, args, out): names of the results, or nil and why it cannot be written.
local written = {}
for _, kind in ipairs { "elementwise", "shape", "nn" } do
  for name, fn in pairs(require("tycho.hub.onnx.written." .. kind)) do written[name] = fn end
end

-- Results that share memory with an argument: after one of these, writing in place changes several values.
local views = { reshape = true, flatten = true, transpose = true, permute = true, expand = true, squeeze = true,
  unsqueeze = true, slice = true, select = true, narrow = true, diagonal = true, detach = true, contiguous = true }

-- ---- the builder, which translations are given ----

local Builder = {}
Builder.__index = Builder

local function new_builder()
  return setmetatable({ nodes = {}, initializers = {}, names = {}, live = {}, parameters = {}, constants = {},
    taken = {}, viewed = {}, count = 0, problems = {} }, Builder)
end

-- A name that is free.
function Builder:fresh(hint)
  local name = hint
  while not name or self.taken[name] do
    self.count = self.count + 1
    name = ("%s_%d"):format(hint or "v", self.count)
  end
  self.taken[name] = true
  return name
end

local function add_initializer(b, name, t)
  b.initializers[#b.initializers + 1] = { name = name, tensor = t }
  return name
end

--- The name of a tensor: a result of before, a parameter, or a constant.
function Builder:name(t)
  local name = self.names[t]
  if name then return name end
  name = self.parameters[t]
  if name then
    add_initializer(self, name, t:detach())
  else
    name = add_initializer(self, self:fresh "constant", t:detach())
  end
  self.names[t] = name
  return name
end

--- The name of a constant: integers as a list (dtype i64), or one number of a dtype.
function Builder:constant(value, dtype)
  dtype = dtype or "i64"
  local key = dtype .. ":" .. (type(value) == "table" and "[" .. table.concat(value, ",") .. "]"
    or ("%s"):format(type(value) == "number" and ("%.17g"):format(value) or tostring(value)))
  if not self.constants[key] then
    local t
    if type(value) == "boolean" then
      t = ty.tensor(value and 1 or 0):ne(0)
    else
      t = ty.tensor(value, { dtype = dtype })
    end
    self.constants[key] = add_initializer(self, self:fresh "constant", t)
  end
  return self.constants[key]
end

--- Adds a node; its inputs are names, "" for one that is left out. Returns the names of its results.
function Builder:emit(op, inputs, attributes, results)
  local outputs = {}
  for i = 1, results or 1 do outputs[i] = self:fresh(op:lower()) end
  self.nodes[#self.nodes + 1] = { op = op, name = ("%s_%d"):format(op, #self.nodes), inputs = inputs, outputs = outputs,
    attributes = attributes }
  return table.unpack(outputs)
end

--- The name of a tensor or number as an operand of this dtype.
function Builder:operand(v, dtype)
  if not ty.is_tensor(v) then return self:constant(v, dtype) end
  local name = self:name(v)
  if v.dtype == dtype then return name end
  return self:emit("Cast", { name }, { to = values.numbers[dtype] })
end

function Builder:cast(name, dtype) return self:emit("Cast", { name }, { to = values.numbers[dtype] }) end

-- ---- reading the trace ----

local function each_tensor(args, fn)
  for _, v in pairs(args) do
    if ty.is_tensor(v) then
      fn(v)
    elseif type(v) == "table" then
      for _, t in ipairs(v) do
        if ty.is_tensor(t) then fn(t) end
      end
    end
  end
end

local function is_live(b, event)
  local live = false
  each_tensor(event.args, function(t) live = live or b.live[t] end)
  return live
end

-- The place behind event i and what it is made of.
local function behind(events, i)
  local depth = events[i].depth
  i = i + 1
  while events[i] and events[i].depth > depth do i = i + 1 end
  return i
end

local function problem(b, text)
  if not b.problems[text] then
    b.problems[text] = 0
    b.problems[#b.problems + 1] = text
  end
  b.problems[text] = b.problems[text] + 1
end

local function bind(b, event, results)
  for i, out in ipairs(event.out) do
    if out and results[i] then
      b.names[out], b.live[out] = results[i], true
    end
  end
end

local translate

local function translate_one(b, events, i)
  local event, last = events[i], behind(events, i)
  if event.inplace or event.op:find "_$" then
    local target = event.inplace and event.out[1] or event.args.x
    if not is_live(b, event) then return last end
    if not event.inplace or b.viewed[target] or not b.live[target] then
      problem(b, event.op .. " in place")
      return last
    end
  elseif not is_live(b, event) then
    return last -- a constant, which is written where it is used
  end
  if views[event.op] then
    each_tensor(event.args, function(t) b.viewed[t] = true end)
    for _, out in ipairs(event.out) do b.viewed[out] = true end
  end
  for _, out in ipairs(event.out) do
    if out then b.live[out] = true end
  end
  local fn, why = written[event.op], nil
  if fn then
    local before = #b.nodes
    local results = table.pack(fn(b, event.args, event.out))
    if results[1] then
      bind(b, event, results)
      return last
    end
    why = results[2]
    for k = #b.nodes, before + 1, -1 do b.nodes[k] = nil end
  end
  if event.composed and last > i + 1 then
    translate(b, events, i + 1, last, event.depth + 1)
    local all = true
    for _, out in ipairs(event.out) do all = all and (not out or b.names[out] ~= nil) end
    if all or #b.problems > 0 then return last end
  end
  problem(b, why and ("%s (%s)"):format(event.op, why) or event.op)
  return last
end

-- Events i to last - 1 of one depth.
translate = function(b, events, i, last)
  while i < last do i = translate_one(b, events, i) end
end

-- ---- the function ----

local function value_info(name, t) return { name = name, dtype = t.dtype, shape = t.shape } end

local function pack_inputs(inputs)
  if ty.is_tensor(inputs) then return { inputs } end
  arguments.expect("hub.save_onnx", "inputs", inputs, "a tensor or a list of tensors")
  if #inputs == 0 then arguments.fail("hub.save_onnx: inputs: expected at least one tensor, got an empty table") end
  return inputs
end

local function names_option(name, given, count)
  if given == ty.nn.none or given == nil then return nil end
  if type(given) ~= "table" or #given ~= count then
    arguments.fail("hub.save_onnx: %s: expected a list of %d names, got %s", name, count, arguments.describe(given))
  end
  for _, one in ipairs(given) do arguments.expect("hub.save_onnx", name, one, "a string") end
  return given
end

-- Whether results are those wanted; else an error that begins so.
local function same_results(who, again, results)
  for i, want in ipairs(results) do
    local got = again[i]
    if not ty.is_tensor(got) or got.dtype ~= want.dtype or table.concat(got.shape, ",") ~= table.concat(want.shape, ",")
    then
      error(("hub.save_onnx: %s, result %d is %s, the model's is %s"):format(who, i, arguments.describe(got),
        arguments.describe(want)), 0)
    end
    if want:numel() > 0 then
      local a, e = got:to "f64", want:detach():to { device = "cpu" }:to "f64"
      local same = a:eq(e):logical_or(a:isnan():logical_and(e:isnan()))
      local off = ty.where(same, ty.zeros_like(a), (a - e):abs()):max():item()
      local size = ty.where(e:isfinite(), e:abs(), ty.zeros_like(e)):max():item()
      local limit = (want.dtype == "f16" or want.dtype == "bf16") and 0.05 or 1e-3
      if off ~= off or off > limit * (size + 1e-6) then
        error(("hub.save_onnx: %s, result %d differs by %g of %g"):format(who, i, off, size), 0)
      end
    end
  end
end

-- What was written, read again, gives the same numbers; also those of the inputs turned around, which tells of
-- decisions that the model made by looking at numbers, and the file has made for good.
local function compare(path, run, inputs, results)
  local model = require("tycho.hub.onnx").load(path)
  local here, turned = {}, {}
  for i, t in ipairs(inputs) do
    here[i] = t:detach():to { device = "cpu" }
    turned[i] = t.ndim > 0 and t:detach():flip(t.ndim - 1) or t:detach()
  end
  local function read(list)
    return ty.no_grad(function() return { model(table.unpack(list)) } end)
  end
  same_results("read again", read(here), results)
  local ok, wanted = pcall(function() return { run(table.unpack(turned)) } end)
  if not ok then return end -- the model does not take such inputs
  for i, t in ipairs(turned) do turned[i] = t:to { device = "cpu" } end
  local tensors = {}
  for _, t in ipairs(wanted) do
    if ty.is_tensor(t) then tensors[#tensors + 1] = t end
  end
  local fine, again = pcall(read, turned)
  if not fine then error(("hub.save_onnx: for other inputs, what was written fails: %s"):format(tostring(again)), 0) end
  same_results("for other inputs", again, tensors)
end

-- The model's tensors by name, and the names in order.
local function state_of(model)
  local names, tensors = {}, {}
  if not arguments.is_module(model) then return names, tensors end
  for name, t in pairs(model:state_dict()) do
    local own = model:get(name)
    names[#names + 1], tensors[name] = name, ty.is_tensor(own) and own or t
  end
  table.sort(names)
  return names, tensors
end

-- The tensors among the results.
local function tensors_of(results)
  local tensors = {}
  for i, result in ipairs(results) do
    if ty.is_tensor(result) then
      tensors[#tensors + 1] = result
    elseif type(result) == "table" then
      arguments.fail("hub.save_onnx: result %d of the model: expected a tensor, got a table; give options.call", i)
    end
  end
  if #tensors == 0 then arguments.fail("hub.save_onnx: model: expected results that are tensors, got none") end
  return tensors
end

-- The graph of one call of run, with the results of that.
local function graph_of(model, run, inputs, o)
  local names, tensors = state_of(model)
  local given = { table.unpack(inputs) }
  for i, name in ipairs(names) do given[#inputs + i] = tensors[name] end
  local done = table.pack(pcall(ty.core.program.trace, run, table.unpack(given)))
  if not done[1] then arguments.raise(done[2], "hub.save_onnx: ") end
  local events, results = done[2], tensors_of(done[4])
  given = done[3]
  local b = new_builder()
  local graph = { name = arguments.is_module(model) and getmetatable(model).__name or "function", inputs = {},
    outputs = {} }
  local input_names = names_option("input_names", o.input_names, #inputs)
  local output_names = names_option("output_names", o.output_names, #results)
  for i = 1, #inputs do
    local name = b:fresh(input_names and input_names[i] or #inputs == 1 and "input" or "input_" .. i)
    b.names[given[i]], b.live[given[i]] = name, true
    graph.inputs[i] = value_info(name, given[i])
  end
  for i, name in ipairs(names) do
    local t = given[#inputs + i]
    b.parameters[t] = b.parameters[t] or name
    b.taken[name], b.live[t] = true, true
  end
  translate(b, events, 1, #events + 1)
  if #b.problems > 0 then
    table.sort(b.problems)
    for i, text in ipairs(b.problems) do b.problems[i] = ("%s (%d)"):format(text, b.problems[text]) end
    arguments.fail("hub.save_onnx: ops that cannot be written: %s", table.concat(b.problems, ", "))
  end
  for i, t in ipairs(results) do
    local name = b:fresh(output_names and output_names[i] or #results == 1 and "output" or "output_" .. i)
    b.nodes[#b.nodes + 1] = { op = "Identity", inputs = { b:name(t) }, outputs = { name } }
    graph.outputs[i] = value_info(name, t)
  end
  local used = {}
  for _, node in ipairs(b.nodes) do
    for _, name in ipairs(node.inputs) do used[name] = true end
  end
  graph.nodes, graph.initializers = b.nodes, {}
  for _, one in ipairs(b.initializers) do -- but those of what was tried in vain
    if used[one.name] then graph.initializers[#graph.initializers + 1] = one end
  end
  return graph, results
end

local function write(model, inputs, path, o)
  local function run(...)
    local list = table.move({ ... }, 1, #inputs, 1, {})
    if o.call then return ty.no_grad(o.call, model, table.unpack(list)) end
    return ty.no_grad(model, table.unpack(list))
  end
  local graph, results = graph_of(model, run, inputs, o)
  local bytes = 0
  for _, one in ipairs(graph.initializers) do bytes = bytes + one.tensor:nbytes() end
  if o.external == nil then o.external = bytes > 1.5 * 2 ^ 30 end
  ty.io.save_onnx(path, { ir_version = IR, producer_name = "tycho", producer_version = ty.version,
    opset = { [""] = OPSET }, graph = graph }, { external = o.external })
  if not o.check then return end
  local ok, problem_ = pcall(compare, path, run, inputs, results)
  if not ok then
    ty.io.remove(path)
    if o.external then ty.io.remove(path .. ".data") end
    error(problem_, 0)
  end
end

--- Writes what a model does to inputs as an ONNX file of opset 20: one call is traced, in evaluation mode and without
-- gradients. Sizes are those of the inputs. Names of initializers are those of the parameters. All ops that ONNX has no
-- nodes for are named in one error. The file is then read again, and its results compared with the model's for the
-- inputs and for the inputs turned around, so that decisions which the model makes by looking at numbers do not go
-- unseen. options: input_names, output_names (lists of strings), call (a function(model, inputs...) in place of the
-- model's own call), external (weights in the file path.data; by itself from 1.5 GB on), check (true).
---@param model Module|function
---@param inputs Tensor|Tensor[]
---@param path string
---@param options? table
function M.save(model, inputs, path, options)
  arguments.expect("hub.save_onnx", "model", model, "a module or a function")
  inputs = pack_inputs(inputs)
  arguments.expect("hub.save_onnx", "inputs", inputs, "a list of tensors")
  arguments.expect("hub.save_onnx", "path", path, "a string")
  local o = arguments.read("hub.save_onnx", options, { input_names = arguments.none, output_names = arguments.none,
    call = arguments.none, external = arguments.none, check = true }, { call = "a function", external = "a boolean",
    check = "a boolean" })
  local list = {}
  for i, t in ipairs(inputs) do list[i] = t:detach() end
  local training = arguments.is_module(model) and model.training
  if training then model:eval() end
  local ok, problem_ = pcall(write, model, list, path, o)
  if training then model:train() end
  if not ok then error(problem_, 0) end
end

return M
