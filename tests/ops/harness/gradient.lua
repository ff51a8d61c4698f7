-- Gradients by central differences in f64. All float results are reduced to one number by fixed random weights w; the
-- gradient of that for every float input is compared with differences of the values, and the gradient of <gradient, v>
-- (v random) for every input and for w with differences of the first gradient. The gradients in f32 and half precision
-- are compared with that in f64.
--
-- A quick run on another device takes the CPU's gradients, which its own run holds against differences, for the truth:
-- two calls in place of hundreds, and 1e-9 in place of 1e-5.

local case = require "case"
local compare = require "compare"
local dtypes = require "dtypes"
local forward = require "forward"
local layout = require "layout"
local report = require "report"
local template = require "template"

local gradient = {
  most = 40, -- elements of one input that are moved one by one; of more, a random sample
}
local ty

local STEP = 1e-5
local TOLERANCE = 1e-5
local SAME = 1e-9 -- between two ways to the same f64 gradient
local LOOSER = { f32 = 1e-4, f16 = 2e-2, bf16 = 8e-2 }

function gradient.use(library) ty = library end

local function random_list(n)
  local list = {}
  for i = 1, n do list[i] = (math.random(0, 1) * 2 - 1) * (0.3 + math.random()) end
  return list
end

local function constant(values, t)
  return layout.shaped(t:numel() > 0 and values or {}, t.shape, t.dtype, t.device)
end

-- Which slots want a gradient.
local function float_slots(row, instance)
  local list = {}
  for i, s in ipairs(instance.slots) do
    if dtypes.is_float(s.array.dtype) and not (row.constant and row.constant[s.name]) and #s.array > 0 then
      list[#list + 1] = i
    end
  end
  return list
end

local function tensors_of(instance, wanted, name)
  local tensors = instance:tensors(name)
  local leaves = {}
  for k, i in ipairs(wanted) do
    leaves[k] = tensors[i]:detach():requires_grad_()
    tensors[i] = leaves[k]
  end
  return tensors, leaves
end

local function float_results(got)
  local list = {}
  for i = 1, got.n do
    if dtypes.is_float(got[i].dtype) then list[#list + 1] = got[i] end
  end
  return list
end

-- <w, results> as a number, from values alone.
local function value(row, instance, weights)
  local got = float_results(forward.call(row, instance, instance:tensors("contiguous")))
  local sum = 0.0
  for j, t in ipairs(got) do
    local values = layout.values(t)
    for i = 1, #values do sum = sum + weights[j][i] * values[i] end
  end
  return sum
end

-- First gradients: lists of numbers per wanted slot. create_graph: also the tensors, leaves and weight tensors.
local function first(row, instance, wanted, weights, create_graph, name)
  local tensors, leaves = tensors_of(instance, wanted, name or "contiguous")
  local got = float_results(forward.call(row, instance, tensors))
  local loss, ws = nil, {}
  for j, t in ipairs(got) do
    if t.requires_grad then
      ws[j] = constant(weights[j], t)
      if create_graph then ws[j] = ws[j]:requires_grad_() end
      local part = (t * ws[j]):sum()
      loss = loss and loss + part or part
    end
  end
  if not loss then return nil end
  local grads = table.pack(gradient.grad(loss, leaves, create_graph))
  local numbers = {}
  for k, leaf in ipairs(leaves) do
    numbers[k] = grads[k] and layout.values(grads[k]) or nil
    if not numbers[k] then
      numbers[k] = {}
      for i = 1, leaf:numel() do numbers[k][i] = 0.0 end
    end
  end
  return numbers, grads, leaves, ws
end

--- ty.grad with unused inputs allowed, whether it returns a list or several values.
function gradient.grad(loss, inputs, create_graph)
  local g = table.pack(ty.grad(loss, inputs, { create_graph = create_graph or false, allow_unused = true }))
  if g.n == 1 and type(g[1]) == "table" then return table.unpack(g[1], 1, #inputs) end
  return table.unpack(g, 1, #inputs)
end

local function dot(a, b)
  local sum = 0.0
  for i = 1, #a do sum = sum + a[i] * b[i] end
  return sum
end

-- Positions of a list of n to move: all, or a sample.
local function positions(n)
  local list = {}
  for i = 1, n do list[i] = i end
  local count = math.min(n, gradient.most)
  for i = 1, count do
    local j = math.random(i, n)
    list[i], list[j] = list[j], list[i]
  end
  return table.move(list, 1, count, 1, {})
end

-- (f(x + h) - f(x - h)) / 2h for element `at` of slot i.
local function difference(instance, i, at, f)
  local arrays = {}
  for k, s in ipairs(instance.slots) do arrays[k] = s.array end
  local moved = template.copy(arrays[i])
  arrays[i] = moved
  local x = moved[at]
  local h = STEP * math.max(1, math.abs(x))
  moved[at] = x + h
  local above = f(instance:with(arrays))
  moved[at] = x - h
  local below = f(instance:with(arrays))
  return (above - below) / (2 * h)
end

local function largest(list)
  local m = 1
  for _, x in ipairs(list) do
    local a = math.abs(x)
    if a > m and a < math.huge then m = a end
  end
  return m
end

local function check_close(row, where, what, got, want, scale, tol)
  local ok = math.abs(got - want) <= tol * math.max(scale, math.abs(want))
  report.check(ok, row.name, where, "%s is %.10g, by differences %.10g", what, got, want)
end

-- Lists of numbers beside those that the CPU gives; no list stands for zeros.
local function check_by_cpu(row, where, names, got, want, tol)
  for k, name in ipairs(names) do
    local zeros = {}
    for i = 1, #(got[k] or want[k] or {}) do zeros[i] = 0.0 end
    local ok, text = compare.near(got[k] or zeros, want[k] or zeros, tol)
    report.check(ok, row.name, where, "%s: %s", name, text)
  end
end

local function check_first(row, instance, wanted, weights, where, tol, by_cpu)
  local numbers = first(row, instance, wanted, weights, false)
  if not report.check(numbers ~= nil, row.name, where, "the results do not require a gradient") then return nil end
  if by_cpu then
    local names = {}
    for k, i in ipairs(wanted) do names[k] = "gradient for " .. instance.slots[i].name end
    local want = layout.on("cpu", first, row, instance, wanted, weights, false)
    check_by_cpu(row, where, names, numbers, want or {}, by_cpu)
    return numbers
  end
  for k, i in ipairs(wanted) do
    local scale = largest(numbers[k])
    for _, at in ipairs(positions(#instance.slots[i].array)) do
      local want = difference(instance, i, at, function(moved) return value(row, moved, weights) end)
      local what = string.format("gradient for %s[%d]", instance.slots[i].name, at - 1)
      check_close(row, where, what, numbers[k][at], want, scale, tol)
    end
  end
  return numbers
end

-- The gradients of <gradient, direction> for the wanted slots, then for the incoming gradients: lists of numbers, nil
-- where there is none; what the lists belong to; the first gradients that they come from.
local function second(row, instance, wanted, weights, directions)
  local numbers, grads, leaves, ws = first(row, instance, wanted, weights, true)
  local inner
  for k in ipairs(wanted) do
    if grads[k] and grads[k].requires_grad then
      local part = (grads[k] * constant(directions[k], leaves[k])):sum()
      inner = inner and inner + part or part
    end
  end
  local inputs, names = table.move(leaves, 1, #leaves, 1, {}), {}
  for k, i in ipairs(wanted) do names[k] = "second derivative for " .. instance.slots[i].name end
  local w_at = {}
  for j, w in pairs(ws) do
    inputs[#inputs + 1] = w
    w_at[j] = #inputs
    names[#inputs] = "second derivative for the incoming gradient " .. j
  end
  -- Gradients without a graph are constant: their derivatives should be 0.
  local lists = {}
  for k, g in pairs(inner and table.pack(gradient.grad(inner, inputs, false)) or {}) do
    if math.type(k) and g then lists[k] = layout.values(g) end
  end
  return lists, names, w_at, numbers
end

local function check_second(row, instance, wanted, weights, plain, where, tol, by_cpu)
  local directions = {}
  for k, i in ipairs(wanted) do directions[k] = random_list(#instance.slots[i].array) end
  local lists, names, w_at, numbers = second(row, instance, wanted, weights, directions)
  for k, i in ipairs(wanted) do
    local ok, text = compare.near(numbers[k], plain[k], SAME)
    report.check(ok, row.name, where, "gradient for %s with create_graph: %s", instance.slots[i].name, text)
  end
  if by_cpu then
    local want = layout.on("cpu", second, row, instance, wanted, weights, directions)
    return check_by_cpu(row, where, names, lists, want, by_cpu)
  end
  local function along(moved, w)
    local g = first(row, moved, wanted, w, false)
    local sum = 0.0
    for k = 1, #wanted do sum = sum + dot(g[k], directions[k]) end
    return sum
  end
  for k, i in ipairs(wanted) do
    local s = instance.slots[i]
    local got = lists[k]
    local scale = largest(got or {})
    for _, at in ipairs(positions(#s.array)) do
      local want = difference(instance, i, at, function(moved) return along(moved, weights) end)
      local what = ("%s[%d]"):format(names[k], at - 1)
      check_close(row, where, what, got and got[at] or 0.0, want, scale, tol)
    end
  end
  local unmoved = next(w_at) and along(instance, weights)
  for j, k in pairs(w_at) do
    local got = lists[k]
    local scale = largest(got or {})
    for _, at in ipairs(positions(#weights[j])) do
      local moved = {}
      for q, list in pairs(weights) do moved[q] = table.move(list, 1, #list, 1, {}) end
      moved[j][at] = moved[j][at] + 0.5 -- the gradient is linear in w: any step is exact
      local want = (along(instance, moved) - unmoved) / 0.5
      check_close(row, where, ("%s[%d]"):format(names[k], at - 1), got and got[at] or 0.0, want, scale, tol)
    end
  end
end

-- The gradient in other layouts and dtypes, and through the in-place twin, agrees with `plain`.
local function check_variants(row, number, instance, wanted, weights, plain, options)
  local function check(numbers, want, where, tol, dtype)
    for k, i in ipairs(wanted) do
      local ok, text = compare.near(numbers[k], want[k], tol, dtype)
      report.check(ok, row.name, where, "gradient for %s: %s", instance.slots[i].name, text)
    end
  end
  if row.strided ~= false then
    check(first(row, instance, wanted, weights, false, "strided"), plain, case.where(number, "f64", "strided"), SAME)
  end

  local slot = instance.slots[1]
  local twin = row.info.flags.INPLACE and row.inplace ~= false and ty[row.name .. "_"]
  if twin and slot.holder == instance.args and slot.key == 1 and wanted[1] == 1 then
    local function through_twin(x, ...) return twin(x * 1, ...) end
    local result = forward.call(row, instance, instance:tensors("contiguous"))[1]
    if compare.same_shape(result.shape, slot.array.shape) then
      local other = setmetatable({ fn = through_twin }, { __index = row })
      local ok, numbers = pcall(first, other, instance, wanted, weights, false)
      local where = case.where(number, "f64", "in place")
      if ok then check(numbers, plain, where, SAME)
      else -- ops whose rule needs the input that they have overwritten say so
        report.check(tostring(numbers):find("changed in place", 1, true), row.name, where, "%s", numbers)
      end
    end
  end

  for _, dtype in ipairs(options.quick and { "f32" } or { "f32", "f16", "bf16" }) do
    local low = instance:as(dtype, function(x) return dtypes.round(x, dtype) end)
    local high = low:as("f64", function(x) return x end)
    local want = first(row, high, wanted, weights, false)
    local numbers, grads = first(row, low, wanted, weights, false)
    local where = case.where(number, dtype, "gradient")
    local tol = type(row.gradtol) == "table" and row.gradtol[dtype] or LOOSER[dtype]
    if report.check(numbers ~= nil, row.name, where, "the results do not require a gradient") then
      check(numbers, want, where, tol)
      for k, i in ipairs(wanted) do
        local own = low.slots[i].array.dtype
        if grads[k] then
          report.check(grads[k].dtype == own, row.name, where, "the gradient for %s is %s, expected %s",
            instance.slots[i].name, grads[k].dtype, own)
        end
      end
    end
  end
end

local function run_case(row, number, row_case, options)
  local instance = case.new(row.info, number, row_case, "f64")
  if not instance then return false end
  local wanted = float_slots(row, instance)
  if #wanted == 0 then return false end
  local results = float_results(forward.call(row, instance, instance:tensors("contiguous")))
  local weights, any = {}, false
  for j, t in ipairs(results) do
    weights[j] = random_list(t:numel())
    any = any or t:numel() > 0
  end
  if not any then return false end
  local where = case.where(number, "f64", "gradient")
  local tol = type(row.gradtol) == "table" and row.gradtol.f64 or row.gradtol
  if type(tol) ~= "number" then tol = TOLERANCE end
  local by_cpu = options.quick and layout.device ~= "cpu" and (row.gradtol and tol or SAME)
  local plain = check_first(row, instance, wanted, weights, where, tol, by_cpu)
  if not plain then return true end
  if row.grad2 == nil or row.grad2 == true then
    check_second(row, instance, wanted, weights, plain, where, tol, by_cpu)
  end
  check_variants(row, number, instance, wanted, weights, plain, options)
  return true
end

--- All gradient checks of a row; notes ops that have none.
function gradient.run(row, options)
  local info = row.info
  if type(row.grad) == "string" then return report.no_gradient(row.name, row.grad) end
  if not info.differentiable then return report.no_gradient(row.name, "not differentiable") end
  if row.grad == false then
    report.check(false, row.name, "row", "grad = false needs a reason: grad = \"why\"")
    return nil
  end
  if info.flags.WRITES then -- a leaf must not be written to
    local fn = row.fn
    row = setmetatable({ fn = function(x, ...) return fn(x * 1, ...) end }, { __index = row })
  end
  local any = false
  for number, row_case in ipairs(row.cases) do
    if row_case.grad == nil or row_case.grad == true then
      local where = case.where(number, "f64", "gradient")
      local ok, result = xpcall(run_case, report.handler, row, number, row_case, options)
      if not ok then report.check(false, row.name, where, "%s", result) end
      any = any or not ok or result
    end
  end
  if not any then report.check(false, row.name, "row", "differentiable, but no case has a float input to test") end
  if row.grad2 and row.grad2 ~= true then report.no_gradient(row.name, "(first only) " .. row.grad2) end
  return nil
end

return gradient
