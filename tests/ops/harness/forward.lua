-- Values: every case x dtype x layout against the reference; shapes and dtypes; inputs left alone; in-place twins;
-- the meta device.

local case = require "case"
local compare = require "compare"
local dtypes = require "dtypes"
local layout = require "layout"
local report = require "report"

local forward = {}
local ty

function forward.use(library) ty = library end

--- The option by which creating ops are told a device; the others find it in their inputs.
function forward.elsewhere(row, device)
  for _, arg in ipairs(row.info.args) do
    if arg.kind == "device" then return { device = device } end
  end
end

--- Calls an op of a row with the tensors given; random ops always from the same seed.
function forward.call(row, instance, tensors, more, fn)
  if row.info.flags.RANDOM then ty.manual_seed(11) end
  if layout.device ~= "cpu" and #tensors == 0 and not more then more = forward.elsewhere(row, layout.device) end
  return instance:call(fn or row.fn, tensors, more)
end

-- The results to compare: what the op returned, or for ops that return nothing the tensors that it changed.
local function results_of(row, got, tensors)
  if row.info.nout > 0 then return got end
  local all = { n = #tensors }
  for i, t in ipairs(tensors) do all[i] = t end
  return all
end

-- References of ops that return nothing change the arrays that they are given.
local function wanted_of(row, want, arrays)
  if row.info.nout > 0 or want.n > 0 then return want end
  local all = { n = #arrays }
  for i, a in ipairs(arrays) do all[i] = a end
  return all
end

local function check_results(row, instance, got, want, where, is_meta)
  local name = row.name
  report.check(got.n == want.n, name, where, "%d results, expected %d", got.n, want.n)
  for i = 1, math.min(got.n, want.n) do
    local t, w = got[i], compare.as_array(want[i])
    local at = got.n > 1 and where .. " result " .. i or where
    local dtype = compare.result_dtype(row, instance, i, w) or t.dtype
    local fits = report.check(compare.same_shape(t.shape, w.shape), name, at, "shape %s, expected %s",
      compare.shape_text(t.shape), compare.shape_text(w.shape))
    fits = report.check(t.dtype == dtype, name, at, "dtype %s, expected %s", t.dtype, dtype) and fits
    if fits then
      if is_meta then
        report.check(tostring(t.device) == "meta", name, at, "device %s, expected meta", t.device)
      elseif compare.has_values(w) then
        local blocks = dtypes.is_quantized(t.dtype)
        local computed = dtypes.is_half(instance.dtype) and not blocks and instance.dtype or t.dtype
        local near = blocks or dtypes.is_float(t.dtype)
        local tol = near and compare.tolerance(instance.tol or row.tol, computed) or 0
        local ok, text = compare.near(layout.values(t), w, tol, t.dtype, row.strict)
        report.check(ok, name, at, "%s", text)
      end
    end
  end
end

local function check_inputs(row, instance, tensors, where)
  if row.info.flags.WRITES or row.writes then return end -- writes = true: only sometimes, as batch_norm
  for i, s in ipairs(instance.slots) do
    local ok, text = compare.equal(layout.values(tensors[i]), s.array)
    report.check(ok, row.name, where, "input %s was changed: %s", s.name, text)
  end
end

-- Counts the filling around windows, to see that a write into them left it alone.
local function filling(tensors, wholes)
  local function count(t)
    local n = 0
    for _, v in ipairs(layout.values(t)) do
      if v ~= v or v == 99 then n = n + 1 end
    end
    return n
  end
  local n = 0
  for i, whole in pairs(wholes) do n = n + count(whole) - count(tensors[i]) end
  return n
end

-- A tensor kept for a gradient that is then written to in place is noticed: the write counted.
local function check_version(row, instance, where)
  local tensors = instance:tensors("contiguous")
  local p = ty.ones_like(tensors[1]):requires_grad_()
  local loss = (p * tensors[1]):sum()
  forward.call(row, instance, tensors, nil, ty[row.name .. "_"])
  local ok, message = pcall(loss.backward, loss)
  local noticed = not ok and tostring(message):find("changed in place", 1, true)
  report.check(noticed, row.name, where, "the write was not noticed by the graph: %s", ok and "no error" or message)
end

-- x:op_(...) gives what the op gives, in x.
local function check_inplace(row, instance, where, name)
  local first = instance.slots[1]
  if not row.info.flags.INPLACE or row.inplace == false or not first then return end
  if first.holder ~= instance.args or first.key ~= 1 then return end
  local plain = forward.call(row, instance, instance:tensors(name))[1]
  if plain.dtype ~= first.array.dtype or not compare.same_shape(plain.shape, first.array.shape) then return end
  local tensors, wholes = instance:windows(name)
  local twin = ty.core[row.name .. "_"]
  if not report.check(twin ~= nil, row.name, where, "there is no %s_", row.name) then return end
  local before = filling(tensors, wholes)
  forward.call(row, instance, tensors, nil, twin)
  report.check(before == filling(tensors, wholes), row.name, where .. " in place", "it wrote outside of the view")
  local ok, text = compare.equal(layout.values(tensors[1]), layout.values(plain))
  report.check(ok, row.name, where .. " in place", "%s", text)
  for i = 2, #tensors do
    ok, text = compare.equal(layout.values(tensors[i]), instance.slots[i].array)
    report.check(ok, row.name, where .. " in place", "input %s was changed: %s", instance.slots[i].name, text)
  end
  if name == "contiguous" and dtypes.is_float(first.array.dtype) then
    check_version(row, instance, where .. " in place")
  end
end

local function check_meta(row, instance, want, where)
  if row.meta == false or type(row.meta) == "string" then return end
  local tensors = {}
  for i, t in ipairs(instance:tensors("contiguous")) do tensors[i] = t:to { device = "meta" } end
  local more = #tensors == 0 and forward.elsewhere(row, "meta") or nil
  if #tensors == 0 and not more then return end
  local got = forward.call(row, instance, tensors, more)
  if row.info.nout > 0 then check_results(row, instance, got, want, where .. " meta", true) end
end

local function check_layout(row, number, instance, name)
  local where = case.where(number, instance.dtype, name)
  local ok, message = xpcall(function()
    local tensors, wholes = instance:windows(name)
    local before = row.info.flags.WRITES and filling(tensors, wholes)
    local got = forward.call(row, instance, tensors)
    if before then
      report.check(before == filling(tensors, wholes), row.name, where, "it wrote outside of the views")
    end
    local want
    if row.ref then
      want = instance.want or wanted_of(row, instance:expected(row.ref))
      instance.want = want -- for its other layouts
      check_results(row, instance, results_of(row, got, tensors), want, where)
    end
    if row.info.flags.WRITES and row.info.nout == 1 then
      local same, text = compare.equal(layout.values(tensors[1]), layout.values(got[1]))
      report.check(same, row.name, where, "the result is not the input that was written to: %s", text)
    end
    check_inputs(row, instance, tensors, where)
    if name ~= "broadcast" then check_inplace(row, instance, where, name) end
    if name == "contiguous" and want then check_meta(row, instance, want, where) end
  end, report.handler)
  if not ok then report.check(false, row.name, where, "%s", message) end
end

-- Integers and bool give what they give as f32.
local function check_promoted(row, number, instance)
  local tensors = instance:tensors "contiguous"
  for _, dtype in ipairs { "i64", "u8", "bool" } do
    tensors[1] = ty.arange(tensors[1]:numel()):reshape(instance.slots[1].array.shape):to { dtype = dtype,
      device = layout.device }
    local ok, got = pcall(forward.call, row, instance, tensors)
    local where = case.where(number, dtype, "promoted")
    if report.check(ok, row.name, where, "%s", got) then
      tensors[1] = tensors[1]:to "f32"
      local want = forward.call(row, instance, tensors)
      for i, t in ipairs(want) do
        local same, text = compare.equal(layout.values(got[i]), layout.values(t))
        report.check(same and got[i].dtype == "f32", row.name, where, "%s %s", got[i].dtype, text)
      end
    end
  end
end

--- All value checks of one case.
function forward.run(row, number, row_case, options)
  local info = row.info
  local list = row_case.dtypes or row.dtypes or dtypes.of(info.flags, options.quick)
  for _, dtype in ipairs(list) do
    local instance = case.new(info, number, row_case, dtype)
    if instance then
      instance.tol = row_case.tol
      if info.flags.PROMOTED and dtype == "f32" and number == 1 then check_promoted(row, number, instance) end
      for _, name in ipairs(options.quick and (dtype == "f32" or dtype == "i64") and layout.names or
        options.quick and { "contiguous" } or layout.names) do
        local variant = instance
        if name == "broadcast" then
          variant = not (info.flags.WRITES or row.broadcast == false) and instance:repeated() or nil
          if variant then variant.tol = row_case.tol end
        end
        if name == "strided" and (#instance.slots == 0 or row.strided == false) then variant = nil end
        if variant then check_layout(row, number, variant, name) end
      end
      if not instance:follows() then break end -- every dtype would be the same call
    end
  end
end

return forward
