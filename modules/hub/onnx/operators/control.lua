--- If, Loop and Scan of ONNX: graphs that nodes have, which see the names around them.
local ty = require "tycho"
local values = require "tycho.hub.onnx.values"

local M = {}

function M.If(x, a, c)
  return c.run(values.scalar(x[1]) == true and a.then_branch or a.else_branch, {})
end

local function truth(t) return values.scalar(t) == true or values.scalar(t) == 1 end

function M.Loop(x, a, c)
  local most = x[1] and values.scalar(x[1]) or math.huge
  local going = not x[2] or truth(x[2])
  local carried, scans = {}, {}
  local ncarried = x.n - 2
  for i = 1, ncarried do carried[i] = x[i + 2] end
  local nscans = #a.body.outputs - 1 - ncarried
  for i = 1, nscans do scans[i] = {} end
  local turn = 0
  while going and turn < most do
    local results = table.pack(c.run(a.body, { ty.tensor(turn, { dtype = "i64" }), ty.tensor(1):ne(0),
      table.unpack(carried, 1, ncarried) }))
    going = truth(results[1])
    for i = 1, ncarried do carried[i] = results[i + 1] end
    for i = 1, nscans do scans[i][turn + 1] = results[1 + ncarried + i] end
    turn = turn + 1
  end
  local out = { table.unpack(carried, 1, ncarried) }
  for i = 1, nscans do
    out[ncarried + i] = turn > 0 and ty.stack(scans[i], 0) or ty.zeros { 0 }
  end
  return table.unpack(out, 1, ncarried + nscans)
end

function M.Scan(x, a, c)
  if c.opset < 9 then error("Scan before opset 9 is not read", 0) end
  local nin = a.num_scan_inputs
  local nstates = x.n - nin
  local state, sequences = {}, {}
  for i = 1, nstates do state[i] = x[i] end
  local function option(name, i) return a[name] and a[name][i] or 0 end
  local steps
  for i = 1, nin do
    local t = x[nstates + i]
    t = t:movedim(values.axis(option("scan_input_axes", i), t.ndim), 0)
    if option("scan_input_directions", i) == 1 then t = t:flip(0) end
    sequences[i], steps = t, t.shape[1]
  end
  local nout = #a.body.outputs - nstates
  local scans = {}
  for i = 1, nout do scans[i] = {} end
  for step = 1, steps do
    local inputs = { table.unpack(state, 1, nstates) }
    for i = 1, nin do inputs[nstates + i] = sequences[i]:select(0, step - 1) end
    local results = table.pack(c.run(a.body, inputs))
    for i = 1, nstates do state[i] = results[i] end
    for i = 1, nout do scans[i][step] = results[nstates + i] end
  end
  local out = { table.unpack(state, 1, nstates) }
  for i = 1, nout do
    local t = ty.stack(scans[i], 0)
    if option("scan_output_directions", i) == 1 then t = t:flip(0) end
    local dim = values.axis(option("scan_output_axes", i), t.ndim)
    out[nstates + i] = dim == 0 and t or t:movedim(0, dim)
  end
  return table.unpack(out, 1, nstates + nout)
end

--- The graph once for each element of sequences; other inputs are the same each time.
function M.SequenceMap(x, a, c)
  local out, n = {}, #x[1]
  for i = 1, #a.body.outputs do out[i] = { sequence = true } end
  for at = 1, n do
    local inputs = {}
    for i = 1, x.n do
      if ty.is_tensor(x[i]) then
        inputs[i] = x[i]
      else
        inputs[i] = x[i][at] or error(("input %d has %d elements, the first has %d"):format(i, #x[i], n), 0)
      end
    end
    local results = table.pack(c.run(a.body, inputs))
    for i = 1, #out do out[i][at] = results[i] end
  end
  return table.unpack(out)
end

return M
