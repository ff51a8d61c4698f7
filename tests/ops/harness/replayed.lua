-- Every op inside a recorded call: recorded with some elements and replayed with others, the results (and gradients of
-- the first case) are byte for byte those of a plain call. An op whose shape depends on data must say that it cannot be
-- recorded.

local case = require "case"
local dtypes = require "dtypes"
local layout = require "layout"
local report = require "report"

local replayed = {}
local ty

function replayed.use(library) ty = library end

local CASES = 3 -- of each op

-- The call as a function of its tensors that returns tensors: results, changed arguments and gradients.
local function flat(row, instance, with_gradients)
  return function(...)
    local tensors, leaves, loss = { ... }, {}, nil
    for i, s in ipairs(instance.slots) do
      if with_gradients and dtypes.is_float(s.array.dtype) and not (row.constant and row.constant[s.name]) then
        tensors[i] = tensors[i]:detach():requires_grad_()
        leaves[#leaves + 1] = tensors[i]
      end
    end
    local results, all = instance:call(row.fn, tensors), {}
    for i = 1, results.n do
      if results[i].requires_grad then
        local part = (results[i]:to "f64"):sum()
        loss = loss and loss + part or part
      end
      all[#all + 1] = results[i]
    end
    if row.info.nout == 0 then table.move(tensors, 1, #tensors, #all + 1, all) end
    if loss then
      for _, g in ipairs(ty.grad(loss, leaves, { allow_unused = true })) do all[#all + 1] = g or nil end
    end
    return table.unpack(all)
  end
end

local function values(...)
  local all = {}
  for i, t in ipairs { ... } do all[i] = layout.values(t) end
  return all
end

local function difference(a, b)
  if #a ~= #b then return ("%d results, expected %d"):format(#a, #b) end
  for k = 1, #a do
    for i = 1, math.max(#a[k], #b[k]) do
      local x, y = a[k][i], b[k][i]
      if x ~= y and not (x ~= x and y ~= y) then
        return ("result %d, value %d: %s replayed, %s without"):format(k, i - 1, x, y)
      end
    end
  end
  return nil
end

local function check_case(row, number, row_case, dtype, gradients)
  local instance = case.new(row.info, number, row_case, dtype)
  if not instance then return false end
  local where = case.where(number, dtype, "replayed")
  local fn = flat(row, instance, gradients)
  local compiled = ty.core.program.new(fn, 1, false, false)
  local form = row.strided == false and "contiguous" or "strided"
  local recorded, plain = instance:tensors(form), instance:tensors(form)
  for i, t in ipairs(recorded) do -- other elements, where they are no indices
    if dtypes.is_float(instance.slots[i].array.dtype) and t.ndim > 0 then t:copy_(t:flip(0):clone()) end
  end
  ty.manual_seed(3)
  local ok, message = pcall(compiled, table.unpack(recorded))
  if not ok then
    local refused = tostring(message):find("ty.compile", 1, true)
    report.check(refused, row.name, where, "recording fails: %s", message)
    return true
  end
  local got
  for _ = 1, layout.device == "cpu" and 1 or 3 do -- on a GPU the second replay is captured into graphs
    ty.manual_seed(11)
    got = values(compiled(table.unpack(instance:tensors(form))))
  end
  ty.manual_seed(11)
  local want = values(fn(table.unpack(plain)))
  local text = difference(got, want)
  report.check(text == nil, row.name, where, "%s", text)
  return true
end

--- The check of one op.
function replayed.run(row)
  local done = row.name:find "^empty" and CASES or 0 -- undefined elements cannot be compared
  for number, row_case in ipairs(row.cases) do
    for _, dtype in ipairs(row_case.dtypes or row.dtypes or dtypes.of(row.info.flags)) do
      if done >= CASES then return end
      local gradients = done == 0 and row.info.differentiable and not row.info.flags.WRITES and row_case.grad ~= false
        and type(row.grad) ~= "string"
      local ok, result = xpcall(check_case, report.handler, row, number, row_case, dtype, gradients)
      if not ok then report.check(false, row.name, "replayed", "%s", result) end
      if not ok or result then
        done = done + 1
        break
      end
    end
  end
end

return replayed
