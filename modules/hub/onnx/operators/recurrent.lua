--- RNN, LSTM and GRU of ONNX, forward, backward and both ways.
local ty = require "tycho"
local values = require "tycho.hub.onnx.values"

local M = {}

local activations = {
  Sigmoid = function(x) return x:sigmoid() end,
  Tanh = function(x) return x:tanh() end,
  Relu = function(x) return x:relu() end,
  Affine = function(x, alpha, beta) return x * (alpha or 1) + (beta or 0) end,
  LeakyRelu = function(x, alpha) return ty.leaky_relu(x, alpha or 0.01) end,
  ThresholdedRelu = function(x, alpha) return ty.where(x:gt(alpha or 1), x, ty.zeros_like(x)) end,
  ScaledTanh = function(x, alpha, beta) return (x * (beta or 1)):tanh() * (alpha or 1) end,
  HardSigmoid = function(x, alpha, beta) return (x * (alpha or 0.2) + (beta or 0.5)):clamp(0, 1) end,
  Elu = function(x, alpha) return ty.elu(x, alpha or 1) end,
  Softsign = function(x) return x / (x:abs() + 1) end,
  Softplus = function(x) return x:softplus() end,
}

-- The activations of one direction; the names are those of ONNX, written as it pleases.
local function functions(a, names, direction)
  local fns = {}
  for i, default in ipairs(names) do
    local at = direction * #names + i
    local name = a.activations and a.activations[at] or default
    local found
    for known, fn in pairs(activations) do
      if known:lower() == name:lower() then found = fn end
    end
    if not found then error(("activation %s is not known"):format(name), 0) end
    local alpha, beta = a.activation_alpha and a.activation_alpha[at], a.activation_beta and a.activation_beta[at]
    local clip = a.clip
    fns[i] = function(x)
      if clip then x = x:clamp(-clip, clip) end
      return found(x, alpha, beta)
    end
  end
  return fns
end

-- One step of a cell: gates of the input and of the state, state -> state.
local cells = {}

cells.RNN = { gates = 1, names = { "Tanh" }, step = function(f, x, r, _, state)
  return { f[1](x + r(state[1])) }
end }

cells.GRU = { gates = 3, names = { "Sigmoid", "Tanh" }, step = function(f, x, r, bias, state, a, _, weight)
  local d, h = state[1].shape[2], state[1]
  local zr = x:narrow(1, 0, 2 * d)
  local new
  local n
  if a.linear_before_reset == 1 then
    local all = r(h)
    zr = f[1](zr + all:narrow(1, 0, 2 * d))
    n = f[2](x:narrow(1, 2 * d, d) + zr:narrow(1, d, d) * all:narrow(1, 2 * d, d))
  else
    local upper = ty.matmul(h, weight:narrow(0, 0, 2 * d):transpose(0, 1))
    zr = f[1](zr + (bias and upper + bias:narrow(0, 0, 2 * d) or upper))
    local lower = ty.matmul(h * zr:narrow(1, d, d), weight:narrow(0, 2 * d, d):transpose(0, 1))
    n = f[2](x:narrow(1, 2 * d, d) + (bias and lower + bias:narrow(0, 2 * d, d) or lower))
  end
  local z = zr:narrow(1, 0, d)
  new = n + z * (h - n)
  return { new }
end }

cells.LSTM = { gates = 4, names = { "Sigmoid", "Tanh", "Tanh" }, step = function(f, x, r, _, state, a, peep)
  local h, c = state[1], state[2]
  local d = h.shape[2]
  local gates = x + r(h)
  local i, o = gates:narrow(1, 0, d), gates:narrow(1, d, d)
  local g, new = gates:narrow(1, 2 * d, d), gates:narrow(1, 3 * d, d)
  if peep then i, g = i + peep:narrow(0, 0, d) * c, g + peep:narrow(0, 2 * d, d) * c end
  i = f[1](i)
  g = a.input_forget == 1 and 1 - i or f[1](g)
  local cell = g * c + i * f[2](new)
  if peep then o = o + peep:narrow(0, d, d) * cell end
  return { f[1](o) * f[3](cell), cell }
end }

-- Steps of all sequences turned around, each up to its length.
local function turned(x, lengths)
  if not lengths then return x:flip(0) end
  local steps, rows = x.shape[1], {}
  for j = 1, steps do
    rows[j] = {}
    for i, length in ipairs(lengths) do rows[j][i] = j <= length and length - j or j - 1 end
  end
  local index = values.i64(rows):to { device = x.device }:unsqueeze(2):expand(x.shape)
  return x:gather(0, index:contiguous())
end

-- Gates in the order of Tycho's recurrence.
local orders = { LSTM = { 1, 3, 4, 2 }, GRU = { 2, 1, 3 } }

local function reordered(t, kind)
  local parts, d = {}, t.shape[1] // #orders[kind]
  for i, gate in ipairs(orders[kind]) do parts[i] = t:narrow(0, (gate - 1) * d, d) end
  return ty.concat(parts, 0)
end

-- All steps of one direction by Tycho's op.
local function by_recurrence(kind, x, weight, recurrent, input_bias, bias, state)
  local gates = ty.linear(x, reordered(weight, kind), input_bias and reordered(input_bias, kind))
  local start = {}
  for i, s in ipairs(state) do start[i] = s end
  local y, last = ty.recurrence(gates, reordered(recurrent, kind):unsqueeze(0), bias and reordered(bias, kind),
    ty.stack(start, 0), kind:lower())
  local states = {}
  for i = 1, #state do states[i] = last:select(0, i - 1) end
  return y, states
end

local function by_steps(kind, x, weight, recurrent, input_bias, bias, state, o)
  local cell, a = cells[kind], o.attributes
  local gates = ty.linear(x, weight, input_bias)
  local function r(h) return ty.linear(h, recurrent, bias) end
  local outputs = {}
  for t = 1, x.shape[1] do
    local new = cell.step(o.functions, gates:select(0, t - 1), r, bias, state, a, o.peephole, recurrent)
    local y = new[1]
    if o.lengths then
      local flags = {}
      for i, length in ipairs(o.lengths) do flags[i] = { t <= length and 1 or 0 } end
      local alive = ty.tensor(flags):ne(0):to { device = x.device }
      y = ty.where(alive, y, ty.zeros_like(y))
      for i = 1, #new do new[i] = ty.where(alive, new[i], state[i]) end
    end
    outputs[t], state = y, new
  end
  return ty.stack(outputs, 0), state
end

local function layer(kind)
  local cell = cells[kind]
  return function(x, a)
    local t, by_batch = x[1], a.layout == 1
    if by_batch then t = t:transpose(0, 1) end
    local d, batch = a.hidden_size or x[3].shape[3], t.shape[2]
    local lengths = x[5] and values.ints(x[5])
    local direction = a.direction or "forward"
    local directions = direction == "bidirectional" and 2 or 1
    local nstates = kind == "LSTM" and 2 or 1
    local all, finals = {}, {}
    for k = 0, directions - 1 do
      local backward = direction == "reverse" or k == 1
      local both = x[4] and x[4]:select(0, k)
      local input_bias, bias = both and both:narrow(0, 0, cell.gates * d), both and both:narrow(0, cell.gates * d,
        cell.gates * d)
      local state = {}
      for i = 1, nstates do
        local given = x[5 + i]
        if given and by_batch then given = given:transpose(0, 1) end
        state[i] = given and given:select(0, k) or ty.zeros({ batch, d }, { dtype = t.dtype, device = t.device })
      end
      local peephole = kind == "LSTM" and x[8] and x[8]:select(0, k) or nil
      local fast = (kind == "LSTM" and a.input_forget ~= 1 or kind == "GRU" and a.linear_before_reset == 1)
        and not (lengths or peephole or a.clip or a.activations) and t.shape[1] > 0
      local input = backward and turned(t, lengths) or t
      local y, last
      if fast then
        y, last = by_recurrence(kind, input, x[2]:select(0, k), x[3]:select(0, k), input_bias, bias, state)
      else
        y, last = by_steps(kind, input, x[2]:select(0, k), x[3]:select(0, k), input_bias, bias, state,
          { functions = functions(a, cell.names, k), attributes = a, peephole = peephole, lengths = lengths })
      end
      all[k + 1] = backward and turned(y, lengths) or y
      for i = 1, nstates do
        finals[i] = finals[i] or {}
        finals[i][k + 1] = last[i]
      end
    end
    local y = ty.stack(all, 1) -- [steps, directions, batch, d]
    local out = {}
    for i = 1, nstates do
      out[i] = ty.stack(finals[i], 0)
      if by_batch then out[i] = out[i]:transpose(0, 1) end
    end
    if by_batch then y = y:permute(2, 0, 1, 3) end
    return y, table.unpack(out, 1, nstates)
  end
end

M.RNN, M.LSTM, M.GRU = layer "RNN", layer "LSTM", layer "GRU"

return M
