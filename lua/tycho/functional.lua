--- Derivatives of functions of tensors: ty.vjp, ty.jvp, ty.jacobian, ty.hessian (ty.vmap, which maps
-- functions over a batch, is a file of its own); modules as functions of their
-- parameters: ty.functional_call.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local base = require "tycho.nn.module"

local expect, fail, describe = arguments.expect, arguments.fail, arguments.describe
local M = {}

-- The inputs as leaves of their own, or still joined to what they come from, so that derivatives of the derivatives
-- reach it. Returns the list and whether there was only one tensor.
local function prepare(who, inputs, joined)
  expect(who, "inputs", inputs, "a tensor or a list of tensors")
  local single = ty.is_tensor(inputs)
  local list = {}
  for i, x in ipairs(single and { inputs } or inputs) do
    if not x:is_floating_point() then fail("%s: inputs: expected float tensors, got %s", who, tostring(x.dtype)) end
    list[i] = joined and x.requires_grad and x:clone() or x:detach():requires_grad_()
  end
  if #list == 0 then fail("%s: inputs: expected at least one tensor, got an empty table", who) end
  return list, single
end

-- fn's tensors.
local function outputs_of(who, fn, list)
  expect(who, "fn", fn, "a function")
  local outputs = table.pack(fn(table.unpack(list)))
  if outputs.n == 0 then fail("%s: fn: expected it to return a tensor, got nothing", who) end
  for i = 1, outputs.n do expect(who, "fn(...)", outputs[i], "a tensor") end
  return outputs
end

-- ty.grad that gives zeros where there is no way from outputs to inputs.
local function gradients(outputs, inputs, grad_outputs, options)
  local ways, given = {}, {}
  for i, y in ipairs(outputs) do
    if y.requires_grad then ways[#ways + 1], given[#given + 1] = y, grad_outputs[i] end
  end
  local grads = {}
  if #ways > 0 then
    options.grad_outputs, options.allow_unused = given, true
    grads = ty.grad(ways, inputs, options)
  end
  local result = {}
  for i, x in ipairs(inputs) do result[i] = grads[i] or ty.zeros_like(x:detach()) end
  return result
end

-- v as a list that fits the tensors; ones where it is left out and the tensors are numbers.
local function vectors(who, v, tensors, what)
  if v == nil then
    if #tensors == 1 and tensors[1]:numel() == 1 then return { ty.ones_like(tensors[1]:detach()) } end
    fail("%s: v: expected tensors shaped like the %s, got nil", who, what)
  end
  expect(who, "v", v, "a tensor or a list of tensors")
  local list = ty.is_tensor(v) and { v } or v
  if #list ~= #tensors then fail("%s: v: expected %d tensors, one for each of the %s, got %d", who, #tensors, what,
    #list) end
  for i, t in ipairs(tensors) do
    if table.concat(list[i].shape, ",") ~= table.concat(t.shape, ",") then
      fail("%s: v: expected the shape of the %s %s, got %s", who, what, describe(t), describe(list[i]))
    end
  end
  return list
end

local function detached(list)
  for i, t in ipairs(list) do list[i] = t:detach() end
  return list
end

local function one_or_all(list, single)
  if single then return list[1] end
  return list
end

local create_kind = { create_graph = false }

--- The function that gives the gradient of fn, whose first result is one number, to one of its arguments: what
--- ty.grad(fn) is, and PyTorch's torch.func.grad.
---
---     local slope = ty.grad(function(x) return (x ^ 3):sum() end)
---     slope(ty.tensor { 1.0, 2.0 })   -- {3., 12.}
---
---@param fn fun(...: any): Tensor
---@param at? integer  which argument, from 1 (1)
---@return fun(...: any): Tensor
function M.grad(fn, at)
  at = expect("grad", "argument", at == nil and 1 or at, "an integer >= 1")
  return function(...)
    local given = table.pack(...)
    local x = expect("grad", ("argument %d"):format(at), given[at], "a tensor")
    local list = prepare("grad", x, x.requires_grad)
    given[at] = list[1]
    local y = expect("grad", "fn(...)", (fn(table.unpack(given, 1, given.n))), "a tensor")
    if y:numel() ~= 1 then
      fail("grad: fn: expected it to return one number, got %s; ty.jacobian has the derivatives of more", describe(y))
    end
    return gradients({ y }, list, vectors("grad", nil, { y }, "outputs"), { create_graph = x.requires_grad })[1]
  end
end

--- The outputs of fn and the product of v with its Jacobian, the gradient that backward passes compute.
--
--     local y, g = ty.vjp(function(x) return x:sin() end, x, v)
--
---@param fn fun(...: Tensor): Tensor
---@param inputs Tensor|Tensor[]  what fn is called with
---@param v? Tensor|Tensor[]      shaped like the outputs; 1 where fn gives a number
---@param options? {create_graph: boolean}  for derivatives of the result
---@return Tensor|Tensor[] outputs a list where fn returns several
---@return Tensor|Tensor[] product shaped like inputs
function M.vjp(fn, inputs, v, options)
  local create = arguments.read("vjp", options, create_kind).create_graph
  local list, single = prepare("vjp", inputs, create)
  local outputs = outputs_of("vjp", fn, list)
  local grads = gradients(outputs, list, vectors("vjp", v, outputs, "outputs"), { create_graph = create })
  outputs.n = nil
  if not create then detached(outputs) end
  return one_or_all(outputs, #outputs == 1), one_or_all(grads, single)
end

--- The outputs of fn and the product of its Jacobian with v, the derivative along v: by two backward passes, since the
-- gradient is linear in what outputs are multiplied with.
---@param fn fun(...: Tensor): Tensor
---@param inputs Tensor|Tensor[]  what fn is called with
---@param v? Tensor|Tensor[]      shaped like the inputs; 1 where there is one number
---@param options? {create_graph: boolean}  for derivatives of the result
---@return Tensor|Tensor[] outputs a list where fn returns several
---@return Tensor|Tensor[] product shaped like outputs
function M.jvp(fn, inputs, v, options)
  local create = arguments.read("jvp", options, create_kind).create_graph
  local list = prepare("jvp", inputs, create)
  v = vectors("jvp", v, list, "inputs")
  local outputs = outputs_of("jvp", fn, list)
  local dummies = {}
  for i, y in ipairs(outputs) do dummies[i] = ty.zeros_like(y:detach()):requires_grad_() end
  local grads = gradients(outputs, list, dummies, { create_graph = true })
  local products = gradients(grads, dummies, v, { create_graph = create })
  outputs.n = nil
  if not create then detached(outputs) end
  return one_or_all(outputs, #outputs == 1), one_or_all(products, #products == 1)
end

-- Rows `start` to `stop` of the Jacobian of y for each of the inputs, by a backward pass for each row.
local function rows_one_by_one(y, list, create, start, stop)
  local rows, n = {}, y:numel()
  for k in ipairs(list) do rows[k] = {} end
  for i = start, stop do
    local one = ty.zeros({ n }, { dtype = y.dtype, device = y.device })
    one:select(0, i):fill_(1)
    local grads = gradients({ y }, list, { one:reshape(y.shape) }, { create_graph = create, keep_graph = true })
    for k, g in ipairs(grads) do rows[k][i - start + 1] = g end
  end
  for k in ipairs(list) do rows[k] = ty.stack(rows[k]) end
  return rows
end

local AT_ONCE = 64 -- rows; more take memory without being faster

-- The same by one pass that ty.vmap maps over the rows; nil where an op has no rule.
local function rows_at_once(y, list, create, start, stop)
  local ones = ty.one_hot(ty.arange(start, stop + 1, { device = y.device }), y:numel()):to(y.dtype)
  local shape = y.shape
  table.insert(shape, 1, stop - start + 1)
  local rows = table.pack(pcall(ty.vmap(function(v)
    return table.unpack(gradients({ y }, list, { v }, { create_graph = create, keep_graph = true }))
  end), ones:reshape(shape)))
  if rows[1] then return table.move(rows, 2, rows.n, 1, {}) end
  if not tostring(rows[2]):find("vmap", 1, true) then error(rows[2], 0) end
  return nil
end

-- The Jacobian of y for each of the inputs.
local function rows_of(y, list, create)
  local parts, n, mapped = {}, y:numel(), y:numel() > 1
  for k in ipairs(list) do parts[k] = {} end
  for start = 0, n - 1, AT_ONCE do
    local stop = math.min(start + AT_ONCE, n) - 1
    local rows = mapped and rows_at_once(y, list, create, start, stop)
    mapped = rows ~= nil and mapped
    rows = rows or rows_one_by_one(y, list, create, start, stop)
    for k, part in ipairs(rows) do table.insert(parts[k], part) end
  end
  local result = {}
  for k, x in ipairs(list) do
    local shape = y.shape
    table.move(x.shape, 1, x.ndim, #shape + 1, shape)
    result[k] = n > 0 and ty.concat(parts[k]):reshape(shape) or ty.zeros(shape, { dtype = x.dtype, device = x.device })
  end
  return result
end

--- The derivatives of each element of the outputs of fn by each element of its inputs: [output's shape, input's shape].
-- One backward pass, mapped over the elements of the outputs; one for each element where an op has no rule for ty.vmap.
---@param fn fun(...: Tensor): Tensor
---@param inputs Tensor|Tensor[]  a list: of each output a list, by inputs
---@param options? {create_graph: boolean}  for derivatives of the result
---@return Tensor|Tensor[]|Tensor[][] # a list by outputs where fn returns several
function M.jacobian(fn, inputs, options)
  local create = arguments.read("jacobian", options, create_kind).create_graph
  local list, single = prepare("jacobian", inputs, create)
  local outputs, result = outputs_of("jacobian", fn, list), {}
  for i, y in ipairs(outputs) do result[i] = one_or_all(rows_of(y, list, create), single) end
  return one_or_all(result, #outputs == 1)
end

--- The second derivatives of a number that fn computes: [input's shape, input's shape].
---@param fn fun(...: Tensor): Tensor
---@param inputs Tensor|Tensor[]  a list: a list of lists, by both
---@param options? {create_graph: boolean}  for derivatives of the result
---@return Tensor|Tensor[][]
function M.hessian(fn, inputs, options)
  local create = arguments.read("hessian", options, create_kind).create_graph
  local list, single = prepare("hessian", inputs, create)
  local outputs = outputs_of("hessian", fn, list)
  if #outputs ~= 1 or outputs[1]:numel() ~= 1 then
    fail("hessian: fn: expected it to return one number, got %s", describe(outputs[1]))
  end
  local grads = gradients(outputs, list, { ty.ones_like(outputs[1]:detach()) }, { create_graph = true })
  local result = {}
  for i, g in ipairs(grads) do result[i] = one_or_all(rows_of(g, list, create), single) end
  return one_or_all(result, single)
end

--- module(...) with other parameters and buffers, by their names in state_dict(); those not named stay. The module's
-- own are left as they are, gradients go to the ones given.
--
--     local loss = ty.functional_call(model, { ["head.weight"] = w }, x):square():sum()
--
---@param module Module
---@param parameters table<string, Tensor>
---@return any # what the module returns
function M.functional_call(module, parameters, ...)
  expect("functional_call", "module", module, "a module")
  expect("functional_call", "parameters", parameters, "a table")
  local places, known = {}, {}
  base.walk_state(module, function(_, name, tensor, owner, key)
    known[name] = true
    local given = parameters[name]
    if given == nil then return end
    expect("functional_call", name, given, "a tensor")
    if table.concat(given.shape, ",") ~= table.concat(tensor.shape, ",") then
      fail("functional_call: %s: expected the shape of the module's %s, got %s", name, describe(tensor),
        describe(given))
    end
    places[#places + 1] = { owner, key, tensor, given }
  end)
  for name in pairs(parameters) do
    if not known[name] then fail("functional_call: the module has no parameter '%s'", tostring(name)) end
  end
  for _, place in ipairs(places) do rawset(place[1], place[2], place[4]) end
  local result = table.pack(pcall(module, ...))
  for _, place in ipairs(places) do rawset(place[1], place[2], place[3]) end
  if not result[1] then error(result[2], 0) end
  return table.unpack(result, 2, result.n)
end

return M
