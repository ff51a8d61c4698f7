--- ONNX files as models: hub.load "model.onnx" and hub.save_onnx.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local nn = require "tycho.nn"
local graphs = require "tycho.hub.onnx.graph"

local M = {}

local OLDEST, NEWEST = 7, 25 -- opsets

-- ---- parameters, by the names of the file ----

local Group = nn.module "Group" -- what stands before a dot in names

local Model = nn.module "OnnxModel"

-- A name that a field of a module may have.
local function field(owner, name)
  while nn.Module[name] ~= nil or rawget(owner, name) ~= nil do name = name .. "_" end
  return name
end

-- The module and the field for a name: "encoder.0.weight" is the field weight of the module encoder.0.
local function place(root, name)
  local at = root
  local path, leaf = name:match "^(.*)%.([^.]+)$"
  for part in (path or ""):gmatch "[^.]*" do
    local child = rawget(at, part)
    if part == "" and path then return root, field(root, (name:gsub("%.", "_"))) end
    if part ~= "" then
      if child == nil and nn.Module[part] == nil then
        child = Group()
        at[part] = child
      end
      if not arguments.is_module(child) then return root, field(root, (name:gsub("%.", "_"))) end
      at = child
    end
  end
  return at, field(at, leaf or name)
end

-- Names of initializers that are no parameters although they are of floats: statistics, bounds, single numbers.
local function not_trained(graph)
  local names = {}
  graphs.each_node(graph, function(node)
    local from = node.op == "BatchNormalization" and 4 or (graphs.by_host[node.op]
      or node.op:find "QuantizeLinear") and 2
      or math.huge
    for i = from, #node.inputs do
      if i <= #node.inputs then names[node.inputs[i]] = true end
    end
  end)
  return names
end

-- Small lists of integers are shapes, dimensions and the like.
local function is_structure(t) return not t:is_floating_point() and t.ndim <= 1 and t:numel() <= 64 end

function Model:init(file, options)
  local graph, state, constants, known = file.graph, {}, {}, { ["="] = true }
  graphs.check_operators(graph)
  local fixed, given = not_trained(graph), {}
  for _, key in ipairs { "state", "inputs", "outputs", "opset", "metadata", "moved", "moved_to", "plan" } do
    rawset(self, key, false) -- no parameter is called so
  end
  rawset(self, "state", state)
  for _, one in ipairs(graph.initializers) do
    local t, name = one.tensor, one.name
    if given[name] then error(("there are two initializers %s"):format(name), 0) end
    given[name] = true
    if is_structure(t) then
      constants[name] = ty.keep(t)
    else
      if t:is_floating_point() and options.dtype then t = t:to(options.dtype) end
      if options.device ~= "cpu" then t = t:to { device = options.device } end
      local owner, key = place(self, name)
      state[name] = { owner = owner, key = key }
      if t:is_floating_point() and t.ndim > 0 and not fixed[name] then
        owner:parameter(key, t:requires_grad_())
      else
        owner:buffer(key, t)
      end
    end
  end
  local inputs = {}
  for _, input in ipairs(graph.inputs) do
    if not given[input.name] then inputs[#inputs + 1] = input end -- before IR 4 initializers are inputs as well
  end
  rawset(self, "inputs", inputs)
  rawset(self, "outputs", graph.outputs)
  rawset(self, "opset", file.opset[""] or file.opset["ai.onnx"])
  rawset(self, "metadata", file.metadata)
  rawset(self, "moved", setmetatable({}, { __mode = "k" }))
  local ready = { inputs = inputs, outputs = graph.outputs, nodes = graph.nodes, initializers = {} }
  for _, one in ipairs(graph.initializers) do ready.initializers[#ready.initializers + 1] = { name = one.name } end
  rawset(self, "plan", graphs.prepare(ready, known, constants, self.opset))
end

-- ---- what comes in ----

local function shape_text(shape)
  local parts = {}
  for i, size in ipairs(shape) do parts[i] = size and tostring(size) or "?" end
  return "[" .. table.concat(parts, ", ") .. "]"
end

local function is_whole(dtype) return dtype:find "^[iu]%d" ~= nil end

-- One input as the graph wants it; `sizes`: what names of sizes stand for, so far.
local function check_input(input, t, sizes)
  local who = ("OnnxModel: input %s"):format(input.name)
  arguments.expect("OnnxModel", "input " .. input.name, t, input.kind == "sequence" and "a table" or "a tensor")
  if input.kind then
    local list = table.move(t, 1, #t, 1, { sequence = true })
    return list
  end
  local wanted = ("%s %s"):format(shape_text(input.shape or {}), input.dtype or "")
  local got = ("%s %s"):format(shape_text(t.shape), t.dtype)
  if input.dtype and input.dtype ~= t.dtype then
    if is_whole(input.dtype) and is_whole(t.dtype) then
      t = t:to(input.dtype)
    elseif not (t:is_floating_point() and input.dtype:find "f%d") then
      arguments.fail("%s: expected %s, got %s", who, wanted, got)
    end
  end
  if input.shape then
    local fits = #input.shape == t.ndim
    for i, size in ipairs(input.shape) do
      if fits and math.type(size) == "integer" then fits = size == t.shape[i] end
      if fits and type(size) == "string" then
        if sizes[size] and sizes[size] ~= t.shape[i] then
          arguments.fail("%s: expected %s with %s = %d as in another input, got %s", who, wanted, size, sizes[size],
            got)
        end
        sizes[size] = t.shape[i]
      end
    end
    if not fits then arguments.fail("%s: expected %s, got %s", who, wanted, got) end
  end
  return t
end

local function names_of(values)
  local names = {}
  for i, value in ipairs(values) do names[i] = value.name end
  return table.concat(names, ", ")
end

-- The inputs in order, given one after another or by name.
local function gather_inputs(self, ...)
  local given, list, sizes = { ... }, {}, {}
  local count = select("#", ...)
  local by_name = count == 1 and type(given[1]) == "table" and not ty.is_tensor(given[1])
    and not (self.inputs[1] and self.inputs[1].kind and #given[1] > 0)
  if by_name then
    local known = {}
    for _, input in ipairs(self.inputs) do known[input.name] = true end
    for name in pairs(given[1]) do
      if not known[name] then
        arguments.fail("OnnxModel: there is no input %s; the inputs are %s", tostring(name), names_of(self.inputs))
      end
    end
  elseif count > #self.inputs then
    arguments.fail("OnnxModel: expected %d inputs (%s), got %d", #self.inputs, names_of(self.inputs), count)
  end
  for i, input in ipairs(self.inputs) do
    local t
    if by_name then t = given[1][input.name] else t = given[i] end
    if t == nil and input.kind ~= "optional" then
      arguments.fail("OnnxModel: input %s: expected %s %s, got nil", input.name,
        input.shape and shape_text(input.shape) or "a tensor", input.dtype or "")
    end
    list[i] = check_input(input, t, sizes)
  end
  return list
end

--- Computes the outputs, in their order, of inputs that come in theirs or in one table by name.
function Model:forward(...)
  local inputs, state = gather_inputs(self, ...), self.state
  local around = setmetatable({}, { __index = function(_, name)
    local at = state[name]
    return at and rawget(at.owner, at.key)
  end })
  local device = self:device()
  for _, t in ipairs(inputs) do
    if ty.is_tensor(t) and t.device ~= "cpu" then device = t.device end
  end
  if rawget(self, "moved_to") ~= device then
    rawset(self, "moved", setmetatable({}, { __mode = "k" }))
    rawset(self, "moved_to", device)
  end
  local results = table.pack(pcall(graphs.run, self.plan, around, inputs, { device = device, moved = self.moved,
    module_training = self.training, training = true }))
  if not results[1] then arguments.raise(results[2], "OnnxModel: ") end
  return table.unpack(results, 2, results.n)
end

function Model:describe() return ("%d nodes, opset %d"):format(#self.plan.steps, self.opset) end

--- An ONNX file as a model, in evaluation mode. Its initializers of floats are parameters under their names, other
-- large ones buffers. In training mode dropout drops and batch normalisation takes the batch's statistics, elsewhere
-- both do what the file says. Fields: inputs and outputs, lists of { name, dtype, shape } where a shape has numbers,
-- names or false; opset; metadata.
---@param path string
---@param options? {dtype?: string, device?: string}
---@return Module
function M.load(path, options)
  local file = ty.io.load_onnx(path)
  local opset = file.opset[""] or file.opset["ai.onnx"]
  if not opset then error(("onnx %s: it does not say which opset it is of"):format(path), 0) end
  if opset < OLDEST or opset > NEWEST then
    error(("onnx %s: it is of opset %d, %d to %d are read"):format(path, opset, OLDEST, NEWEST), 0)
  end
  options = options or {}
  local ok, model = pcall(Model, file, { dtype = options.dtype, device = options.device or "cpu" })
  if not ok then error(("onnx %s: %s"):format(path, tostring(model)), 0) end
  return model:eval()
end

return M
