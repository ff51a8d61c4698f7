-- Every op inside ty.vmap: what it gives for a batch is what a loop over the samples gives, whichever of its inputs
-- differ by sample; so are the gradients taken inside, of each sample, and outside, through the mapped call. An op
-- without a rule must say so. The samples are the case's values, moved round by one, two ... places where the op takes
-- that.

local case = require "case"
local compare = require "compare"
local dtypes = require "dtypes"
local layout = require "layout"
local report = require "report"
local template = require "template"

local mapped = { covered = {}, refused = {} }
local ty

function mapped.use(library) ty = library end

local SAMPLES = 3
local CASES = 6 -- of each op
local SLACK = 20 -- sums in another order

local function turned(array, by)
  local copy = template.copy(array)
  for i = 1, #array do copy[i] = array[(i - 1 + by) % #array + 1] end
  return copy
end

-- What can be added up, by fixed factors.
local function weighted(t)
  local n = t:numel()
  local w = (ty.arange(n, { dtype = "f64", device = t.device }) * 1.7 + 0.3):cos()
  return (t:to "f64" * w:reshape(t.shape)):sum()
end

-- The call on tensors: its results, those it changed, and the gradients that are asked for.
local function body(row, instance, leaves)
  return function(...)
    local tensors, inputs = { ... }, {}
    for _, i in ipairs(leaves or {}) do
      tensors[i] = tensors[i]:detach():requires_grad_()
      inputs[#inputs + 1] = tensors[i]
    end
    local results, all = instance:call(row.fn, tensors), {}
    local loss
    for i = 1, results.n do
      if results[i].requires_grad then
        local part = weighted(results[i])
        loss = loss and loss + part or part
      end
      all[#all + 1] = results[i]:detach()
    end
    if row.info.nout == 0 or row.info.flags.WRITES then table.move(tensors, 1, #tensors, #all + 1, all) end
    if loss and leaves then
      local grads = ty.grad(loss, inputs, { allow_unused = true })
      for k, x in ipairs(inputs) do all[#all + 1] = grads[k] or ty.zeros_like(x:detach()) end
    end
    return table.unpack(all)
  end
end

-- The tensors of sample s; those that are not mapped are the first's.
local function sample(arrays, map, s)
  local list = {}
  for i, of in ipairs(arrays) do list[i] = layout.tensor(of[map[i] and s or 1], "contiguous") end
  return list
end

local function loop(fn, arrays, map)
  local samples = {}
  for s = 1, SAMPLES do samples[s] = table.pack(fn(table.unpack(sample(arrays, map, s)))) end
  if layout.device ~= "cpu" then ty.cuda.synchronize(layout.device) end -- positions that do not fit are told then
  return samples
end

local function same_shapes(samples)
  for s = 2, SAMPLES do
    for i = 1, samples[1].n do
      if not compare.same_shape(samples[s][i].shape, samples[1][i].shape) then return false end
    end
  end
  return true
end

local function batches(arrays, map)
  local list, dims = {}, {}
  for i, of in ipairs(arrays) do
    dims[i] = map[i] and 0 or false
    if map[i] then
      local all = {}
      for s = 1, SAMPLES do all[s] = layout.tensor(of[s], "contiguous") end
      list[i] = ty.stack(all)
    else
      list[i] = layout.tensor(of[1], "contiguous")
    end
  end
  return list, dims
end

local function check_near(row, where, got, want, dtype)
  local tol = dtypes.is_float(dtype) and SLACK * compare.tolerance(row.tol, dtype) or 0
  local ok, text = compare.near(layout.values(got), layout.values(want), tol)
  report.check(ok, row.name, where, "%s", text)
end

local refusal = { "ty.vmap", "inside ty.vmap", "vmap:" }
local function is_refusal(message)
  for _, text in ipairs(refusal) do
    if tostring(message):find(text, 1, true) then return true end
  end
  return false
end

-- One way of mapping; returns whether there was a rule.
local function check_map(row, instance, arrays, map, leaves, where)
  local fn = body(row, instance, leaves)
  local ok, samples = pcall(loop, fn, arrays, map)
  if not ok then return nil end
  local list, dims = batches(arrays, map)
  local got = table.pack(pcall(ty.vmap(fn, { in_dims = dims }), table.unpack(list)))
  if not got[1] then
    report.check(is_refusal(got[2]), row.name, where, "fails in another way than by a refusal: %s", got[2])
    return false
  end
  if not report.check(same_shapes(samples), row.name, where, "has a result where shapes differ by sample") then
    return true
  end
  for i = 1, samples[1].n do
    local each = {}
    for s = 1, SAMPLES do each[s] = samples[s][i] end
    local want = ty.stack(each)
    local at = where .. " result " .. i
    local fits = report.check(compare.same_shape(got[i + 1].shape, want.shape), row.name, at, "shape %s, expected %s",
      compare.shape_text(got[i + 1].shape), compare.shape_text(want.shape))
    fits = report.check(got[i + 1].dtype == want.dtype, row.name, at, "dtype %s, expected %s", got[i + 1].dtype,
      want.dtype) and fits
    if fits then check_near(row, at, got[i + 1], want, want.dtype) end
  end
  return true, samples
end

-- The gradient through the mapped call, from outside.
local function check_outside(row, instance, arrays, map, leaves, samples, where)
  local list, dims = batches(arrays, map)
  local inputs = {}
  for k, i in ipairs(leaves) do
    list[i] = list[i]:requires_grad_()
    inputs[k] = list[i]
  end
  local results = table.pack(ty.vmap(function(...)
    local all, kept = instance:call(row.fn, { ... }), {}
    for i = 1, all.n do
      if all[i].requires_grad then kept[#kept + 1] = weighted(all[i]) end
    end
    return table.unpack(kept)
  end, { in_dims = dims })(table.unpack(list)))
  local loss
  for i = 1, results.n do loss = loss and loss + results[i]:sum() or results[i]:sum() end
  if not loss then return end
  local grads = ty.grad(loss, inputs, { allow_unused = true })
  for k, i in ipairs(leaves) do
    local each = {}
    for s = 1, SAMPLES do each[s] = samples[s][samples[1].n - #leaves + k] end
    local want = map[i] and ty.stack(each) or ty.stack(each):sum(0)
    local got = grads[k] or ty.zeros_like(inputs[k]:detach())
    local at = ("%s gradient %d from outside"):format(where, i)
    if report.check(compare.same_shape(got.shape, want.shape), row.name, at, "shape %s, expected %s",
      compare.shape_text(got.shape), compare.shape_text(want.shape)) then
      check_near(row, at, got, want, want.dtype)
    end
  end
end

-- Ways to choose which inputs differ: all of them, and each alone.
local function all_maps(instance)
  local list, n = { {} }, 0
  for i, s in ipairs(instance.slots) do
    if not dtypes.is_quantized(s.array.dtype) then
      list[1][i], n = true, n + 1
      if n <= 4 then list[#list + 1] = { [i] = true } end
    end
  end
  if n == 1 then list[2] = nil end
  return n > 0 and list or {}
end

-- Samples of each array; `way`: 1 all are turned, 2 those of floats, 3 none.
local function samples_of(instance, way)
  local arrays = {}
  for i, s in ipairs(instance.slots) do
    local turn = way == 1 or way == 2 and dtypes.is_float(s.array.dtype)
    arrays[i] = {}
    for k = 1, SAMPLES do arrays[i][k] = turn and turned(s.array, k - 1) or s.array end
  end
  return arrays
end

local function check_case(row, number, instance)
  local where = case.where(number, instance.dtype, "mapped")
  local leaves = {}
  for i, s in ipairs(instance.slots) do
    local wanted = dtypes.is_float(s.array.dtype) and not (row.constant and row.constant[s.name]) and #s.array > 0
    if wanted and row.info.differentiable and not row.info.flags.WRITES then leaves[#leaves + 1] = i end
  end
  for k, map in ipairs(all_maps(instance)) do
    local there, arrays
    for way = 1, 3 do
      arrays = samples_of(instance, way)
      there = check_map(row, instance, arrays, map, nil, where .. " " .. k)
      if there ~= nil then break end
    end
    if there then mapped.covered[row.name] = true
    elseif there == false then mapped.refused[row.name] = true end
    if there and #leaves > 0 and not row.grad then
      local ok, samples = check_map(row, instance, arrays, map, leaves, where .. " " .. k .. " gradient")
      there = ok
      if there then check_outside(row, instance, arrays, map, leaves, samples, where .. " " .. k)
      elseif there == false then mapped.refused[row.name .. "'s gradient"] = true end
    end
  end
end

-- What is drawn goes by the place among all samples; what nobody wrote is no value.
local no_values = { dropout_apply = true, empty_like = true }

function mapped.run(row)
  if row.info.flags.RANDOM or no_values[row.name] then return end -- tests/lua/vmap_test.lua
  for number, row_case in ipairs(row.cases) do
    if number > CASES then break end
    for _, dtype in ipairs(row_case.dtypes or row.dtypes or dtypes.of(row.info.flags, true)) do
      local instance = case.new(row.info, number, row_case, dtype)
      local half = dtypes.is_half(dtype) or dtypes.is_quantized(dtype)
      if instance and #instance.slots > 0 and not half then
        instance.tol = row_case.tol
        local ok, message = xpcall(check_case, report.trace and debug.traceback or tostring, row, number, instance)
        report.check(ok, row.name, case.where(number, dtype, "mapped"), "%s", message)
        break
      end
    end
  end
end

-- ---- what was seen ----

local function sorted(set)
  local list = {}
  for name in pairs(set) do list[#list + 1] = name end
  table.sort(list)
  return list
end

function mapped.summary()
  local covered, refused = sorted(mapped.covered), sorted(mapped.refused)
  return ("%d ops inside ty.vmap as in loops; refused for some arguments: %s"):format(#covered,
    #refused > 0 and table.concat(refused, " ") or "none")
end

return mapped
