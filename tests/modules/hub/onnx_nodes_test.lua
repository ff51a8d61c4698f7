-- The operators of ONNX by the standard's own tests (tests/fixtures/make_onnx.py), with a list of those that differ and
-- why.
local here = (arg and arg[0]:match ".*/" or "tests/modules/hub/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local onnx = require "tycho.hub.onnx"

-- What differs: { pattern of names, why }.
local different = {
  { "^test_.*bernoulli", "other random numbers" },
  { "^test_training_dropout_", "other random numbers" },
  { "^test_training_dropout$", "other random numbers" },
  { "^test_bitwise_not_3d$", "u16 is held by i32, whose bits are more" },
  { "^test_quantizelinear_u?int4$", "the bounds of four bits are not known of a zero point held by eight" },
  { "^test_qlinearmatmul_.D_int8_", "results saturate, as in onnxruntime" },
  { "^test_resize_downsample_scales_%a+_align_corners$",
    "sizes are whole when corners are aligned, as in onnxruntime" },
  { "^test_scan_sum$", "Scan of opset 8 has another form" },
  { "^test_not_", "of opset 1" },
}

-- Operators that are not read.
local unread = { "ImageDecoder", "TfIdfVectorizer" }

local function reason(name)
  for _, row in ipairs(different) do
    if name:find(row[1]) then return row[2] end
  end
end

local function difference(got, want)
  if not ty.is_tensor(got) then return "no tensor" end
  if got.dtype ~= want.dtype then return got.dtype .. " for " .. want.dtype end
  if table.concat(got.shape, ",") ~= table.concat(want.shape, ",") then
    return ("[%s] for [%s]"):format(table.concat(got.shape, ","), table.concat(want.shape, ","))
  end
  if want:numel() == 0 then return nil end
  local g, w = got:to "f64", want:to "f64"
  local same = g:eq(w):logical_or(g:isnan():logical_and(w:isnan()))
  local off = ty.where(same, ty.zeros_like(g), (g - w):abs() - w:abs() * 1e-3):max():item()
  local limit = (want.dtype == "f16" or want.dtype == "bf16") and 1e-2 or 1e-5
  if off ~= off or off > limit then return ("by %g"):format(off) end
end

-- The tensors of one input or output: one, or those of a sequence.
local function value_of(tensors, key)
  if tensors[key] or not tensors[key .. "_0"] then return tensors[key] end
  local list = { sequence = true }
  while tensors[key .. "_" .. #list] do list[#list + 1] = tensors[key .. "_" .. #list] end
  return list
end

local function run(model_path, data_path)
  local model = onnx.load(model_path)
  local tensors = {}
  for _, one in ipairs(ty.io.load_onnx(data_path).graph.initializers) do tensors[one.name] = one.tensor end
  local inputs = {}
  for i, input in ipairs(model.inputs) do
    inputs[i] = value_of(tensors, "in" .. i - 1) or input.kind == "sequence" and { sequence = true } or nil
  end
  local outputs = table.pack(ty.no_grad(model, table.unpack(inputs, 1, #model.inputs)))
  for i in ipairs(model.outputs) do
    local want = value_of(tensors, "out" .. i - 1)
    if ty.is_tensor(want) then
      local off = difference(outputs[i], want)
      if off then error(("output %d differs: %s"):format(i, off), 0) end
    elseif want then
      for k = 1, #want do
        local off = difference(outputs[i][k], want[k])
        if off then error(("output %d, %d differs: %s"):format(i, k, off), 0) end
      end
    end
  end
end

if not pcall(ty.io.load_onnx, check.root .. "tests/fixtures/onnx/lstm.onnx") then
  print "no libprotobuf-c"
  check.finish()
  return
end

check.test("the standard's tests", function()
  local pack = ty.io.load(check.root .. "tests/fixtures/onnx/nodes.npz")
  local files, index = ty.io.to_bytes(pack.files), ty.io.to_bytes(pack.index)
  local seen, passed, known, not_read, without = {}, 0, 0, 0, {}
  for _, op in ipairs(unread) do without[op] = true end
  for name, at, size, data_at, data_size in index:gmatch "(%S+) (%d+) (%d+) (%d+) (%d+)" do
    local model = scratch.spit("model.onnx", files:sub(at + 1, at + size))
    local data = scratch.spit("data.onnx", files:sub(data_at + 1, data_at + data_size))
    local ok, problem = pcall(run, model, data)
    local why = reason(name)
    problem = tostring(problem)
    local unknown = problem:match "operators that are not read: (.*)"
    if ok then
      passed = passed + 1
    elseif unknown then
      for op in unknown:gmatch "([%w_.]+) %(%d+%)" do check.ok(without[op], name .. ": " .. op .. " is not read") end
      not_read = not_read + 1
    elseif why then
      seen[why] = true
      known = known + 1
    else
      check.ok(false, name .. ": " .. problem)
    end
  end
  check.ok(passed >= 1130, passed .. " pass")
  check.ok(known <= 22, known .. " are known to differ")
  check.ok(not_read <= 16, not_read .. " are of operators that are not read")
  for _, row in ipairs(different) do check.ok(seen[row[2]], row[1] .. " is still different") end
end)

scratch.clean()
check.finish()
