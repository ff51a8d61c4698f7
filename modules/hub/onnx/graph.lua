--- The graph of an ONNX file made ready: names checked, operators looked up, what is constant computed, and for each
-- value known where it is used last; and running it.
local ty = require "tycho"
local operators = require "tycho.hub.onnx.operators"
local values = require "tycho.hub.onnx.values"

local M = {}

-- Operators whose results are not the same each time, or that have graphs.
local never_folded = { RandomNormal = true, RandomNormalLike = true, RandomUniform = true, RandomUniformLike = true,
  Bernoulli = true, Dropout = true, If = true, Loop = true, Scan = true }

-- Operators whose results are, or hold, values that somebody else has as well.
local shares = { If = true, Loop = true, Scan = true, SequenceAt = true, SequenceConstruct = true,
  SequenceInsert = true, SequenceErase = true, SequenceEmpty = true, SplitToSequence = true, Constant = true }

-- Operators of which all inputs but the first are read on the host: shapes, dimensions, bounds.
M.by_host = { Reshape = true, Expand = true, Slice = true, Pad = true, Tile = true, Resize = true, Upsample = true,
  Squeeze = true, Unsqueeze = true, Split = true, TopK = true, Clip = true, CumSum = true, Trilu = true, Dropout = true,
  ConstantOfShape = true, Range = true, CenterCropPad = true, AffineGrid = true, MaxUnpool = true, If = true,
  Loop = true, SplitToSequence = true, SequenceAt = true, SequenceInsert = true, SequenceErase = true }
for name in pairs(operators) do
  if name:find "^Reduce" then M.by_host[name] = true end
end

local MOST_FOLDED = 1 << 20 -- elements of what is computed once and kept

local function label(node, at)
  return node.name and ("node %s (%s)"):format(node.name, node.op) or ("node %d (%s)"):format(at, node.op)
end

local function graphs_of(node)
  local found = {}
  for key, value in pairs(node.attributes) do
    if type(value) == "table" and value.nodes then found[#found + 1] = { key, value } end
  end
  table.sort(found, function(a, b) return a[1] < b[1] end)
  return found
end

local function each_node(graph, fn)
  for _, node in ipairs(graph.nodes) do
    fn(node)
    for _, sub in ipairs(graphs_of(node)) do each_node(sub[2], fn) end
  end
end
M.each_node = each_node

--- Raises one error with all operators that are not known and how often they occur.
function M.check_operators(graph)
  local counts, names = {}, {}
  each_node(graph, function(node)
    local domain = node.domain
    if domain == "ai.onnx" then domain = nil end
    local name = domain and domain .. "." .. node.op or node.op
    if domain or not operators[node.op] then
      if not counts[name] then names[#names + 1] = name end
      counts[name] = (counts[name] or 0) + 1
    end
  end)
  if #names == 0 then return end
  table.sort(names)
  for i, name in ipairs(names) do names[i] = ("%s (%d)"):format(name, counts[name]) end
  error("operators that are not read: " .. table.concat(names, ", "), 0)
end

-- What went wrong in an operator, without the place in its source; of inputs or attributes that it did not expect.
local function reason(text)
  text = tostring(text)
  local place = text:match "([%w_]+/[%w_]+%.lua:%d+): [^\n]*attempt to"
  if place then return ("its inputs or attributes are not what the operator takes (%s)"):format(place) end
  return (text:gsub("^[^\n]-%.lua:%d+: ", ""))
end

-- Whether what a step makes of constants may be too much to be kept, by the operators that make much of little.
local function makes_much(step, x)
  if step.op == "ConstantOfShape" then return values.product(values.ints(x[1])) > MOST_FOLDED end
  if step.op == "Expand" then return values.product(values.ints(x[2])) > MOST_FOLDED end
  if step.op == "Tile" then return values.product(values.ints(x[2])) * x[1]:numel() > MOST_FOLDED end
  if step.op == "Range" then
    return math.abs((values.scalar(x[2]) - values.scalar(x[1])) / values.scalar(x[3])) > MOST_FOLDED
  end
  return step.op == "OneHot" or step.op == "Pad" or step.op == "Resize"
end

-- Makes inputs of a node ready and calls its operator.
local function call(step, x, c)
  c.outputs = #step.outputs
  return table.pack(pcall(step.fn, x, step.attributes, c))
end

-- Computes a step whose inputs are all constants; whether that was possible.
local function fold(step, constants, opset)
  local x = { n = #step.inputs }
  for i, name in ipairs(step.inputs) do
    if name ~= "" then
      x[i] = constants[name]
      if not x[i] then return false end
    end
  end
  local ok, much = pcall(makes_much, step, x)
  if not ok or much then return false end
  local results = ty.no_grad(call, step, x, { opset = opset })
  if not results[1] then return false end
  for i = 1, #step.outputs do
    local t = results[i + 1]
    if step.outputs[i] ~= "" and not (ty.is_tensor(t) and t:numel() <= MOST_FOLDED) then return false end
  end
  for i, name in ipairs(step.outputs) do
    if name ~= "" then constants[name] = ty.keep(results[i + 1]) end
  end
  return true
end

--- Makes a graph ready. known: names that are there before it, of what is around it. constants: tensors by name, to
-- which what is computed is added. Returns { inputs, outputs, steps, uses }: uses are the names of the surroundings.
---@param graph table
---@param known table<string, boolean>
---@param constants table<string, Tensor>
---@param opset integer
---@return table
function M.prepare(graph, known, constants, opset)
  local plan = { inputs = {}, outputs = {}, steps = {}, uses = {}, constants = constants, opset = opset }
  local made, all_made = {}, {}
  constants = setmetatable({}, { __index = constants }) -- those of this graph hide others of the same name
  plan.constants = constants
  for _, initializer in ipairs(graph.initializers) do
    made[initializer.name] = true
    if initializer.tensor and not known["="] then constants[initializer.name] = ty.keep(initializer.tensor) end
  end
  for i, input in ipairs(graph.inputs) do
    plan.inputs[i] = input.name
    made[input.name] = true
  end
  for _, node in ipairs(graph.nodes) do
    for _, name in ipairs(node.outputs) do all_made[name] = true end
  end
  local visible = setmetatable({}, { __index = function(_, name) return made[name] or name ~= "=" and known[name] end })
  for at, node in ipairs(graph.nodes) do
    local step = { fn = operators[node.op], op = node.op, label = label(node, at), inputs = node.inputs,
      outputs = node.outputs, attributes = node.attributes, reads = {} }
    local seen = {}
    local function read(name)
      if name == "" or seen[name] then return end
      seen[name] = true
      if not visible[name] then
        error(("%s: its input %s is %s"):format(step.label, name, all_made[name]
          and "computed after it: the nodes are not in order, or in a circle" or "computed nowhere"), 0)
      end
      step.reads[#step.reads + 1] = name
      if not made[name] then plan.uses[name] = true end
    end
    for _, name in ipairs(node.inputs) do read(name) end
    for _, sub in ipairs(graphs_of(node)) do
      if step.attributes == node.attributes then step.attributes = setmetatable({}, { __index = node.attributes }) end
      local inner = M.prepare(sub[2], visible, constants, opset)
      step.attributes[sub[1]] = inner
      for name in pairs(inner.uses) do read(name) end
    end
    for _, name in ipairs(node.outputs) do
      if name ~= "" and made[name] then error(("%s: %s is computed twice"):format(step.label, name), 0) end
      made[name] = true
    end
    if never_folded[node.op] or not fold(step, constants, opset) then plan.steps[#plan.steps + 1] = step end
  end
  local last = {}
  for i, output in ipairs(graph.outputs) do
    if not visible[output.name] then error(("the output %s is computed nowhere"):format(output.name), 0) end
    plan.outputs[i] = output.name
    if not made[output.name] then plan.uses[output.name] = true end
    last[output.name] = true
  end
  for i = #plan.steps, 1, -1 do
    local step = plan.steps[i]
    step.free = {}
    for _, name in ipairs(step.reads) do
      if not last[name] then
        last[name] = true
        step.free[#step.free + 1] = name
      end
    end
    for _, name in ipairs(step.outputs) do -- what nobody reads
      if name ~= "" and not last[name] then step.free[#step.free + 1] = name end
    end
    step.reads = nil
  end
  return plan
end

-- What a step reads, on the device where its data are.
local function move(x, step, device, moved)
  local on
  for i = 1, M.by_host[step.op] and 1 or x.n do
    if ty.is_tensor(x[i]) and x[i].device ~= "cpu" then on = true end
  end
  if not on then return end
  for i = 1, M.by_host[step.op] and 1 or x.n do
    local t = x[i]
    if ty.is_tensor(t) and t.device == "cpu" then
      local there = moved[t]
      if not there then
        there = t:to { device = device }
        moved[t] = there
      end
      x[i] = there
    end
  end
end

--- Runs a graph that is ready. env: values by name of what is around it; context: device, moved (a table for constants
-- that were moved), module_training, training.
---@param plan table
---@param around table
---@param inputs Tensor[]
---@param context table
function M.run(plan, around, inputs, context)
  local constants = plan.constants
  local env = setmetatable({}, { __index = function(_, name)
    local t = constants[name]
    if t == nil then t = around[name] end
    return t
  end })
  local owned = {} -- how many names hold what the steps have made
  for i, name in ipairs(plan.inputs) do env[name] = inputs[i] end
  local c = setmetatable({ opset = plan.opset }, { __index = context })
  function c.run(graph, given) return M.run(graph, env, given, context) end
  for _, step in ipairs(plan.steps) do
    local x = { n = #step.inputs }
    for i, name in ipairs(step.inputs) do
      if name ~= "" then x[i] = env[name] end
    end
    if context.device ~= "cpu" then move(x, step, context.device, context.moved) end
    local results = call(step, x, c)
    if not results[1] then error(("%s: %s"):format(step.label, reason(results[2])), 0) end
    for i, name in ipairs(step.outputs) do
      local t = results[i + 1]
      if name ~= "" then
        if t == nil then error(("%s: it makes no output %d"):format(step.label, i), 0) end
        rawset(env, name, t)
        if shares[step.op] then -- and what it gives may have come from around it
          owned[t] = nil
        elseif ty.is_tensor(t) then
          local given = false
          for k = 1, x.n do given = given or rawequal(x[k], t) end
          if owned[t] then owned[t] = owned[t] + 1 elseif not given then owned[t] = 1 end
        end
      end
    end
    if shares[step.op] then -- what it was given lives on elsewhere
      for k = 1, x.n do
        if x[k] ~= nil then owned[x[k]] = nil end
      end
    end
    for _, name in ipairs(step.free) do
      local t = rawget(env, name)
      if t ~= nil then
        rawset(env, name, nil)
        if owned[t] then
          owned[t] = owned[t] - 1
          if owned[t] == 0 then
            owned[t] = nil
            t:free()
          end
        end
      end
    end
  end
  local out = {}
  for i, name in ipairs(plan.outputs) do out[i] = env[name] end
  return table.unpack(out, 1, #plan.outputs)
end

return M
