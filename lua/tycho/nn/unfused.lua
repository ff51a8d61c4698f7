--- Fused ops written out in plain ones, as the papers have them: ty.nn.unfused. They take the memory that
-- the ops save; the ops are compared with them.
local ty = require "tycho"
local options = require "tycho.nn.options"

local M = {}

-- [t, s] bool: which keys a query sees, or nil for all.
local function visible(t, s, o, device)
  local keys = ty.arange(s, { device = device })
  local here = ty.arange(s - t, s, { device = device }):unsqueeze(1)
  local see
  local function also(condition) see = see and see:logical_and(condition) or condition end
  if o.causal then also(keys:le(here)) end
  if o.window then
    local near = (keys - here):abs():le(o.window)
    also(o.sinks and near:logical_or(keys:lt(o.sinks)) or near)
  end
  if o.cu_seqlens then
    local begins = o.cu_seqlens:unsqueeze(1)
    also(begins:le(keys):sum { 0 }:eq(begins:le(here:squeeze(1)):sum { 0 }:unsqueeze(1)))
  end
  return see
end

-- given: names, each with its value behind it.
local function tensors(who, ...)
  local given = table.pack(...)
  for i = 1, given.n, 2 do
    local value = given[i + 1]
    if not ty.is_tensor(value) or value.ndim ~= 4 then
      options.fail("unfused.%s: %s: expected a tensor [b, h, t, d], got %s", who, given[i], options.describe(value))
    end
  end
end

--- ty.scaled_dot_product_attention with the T x T matrix. q [b, h, t, d]; k, v [b, hk, s, d]; bias (nil): bool (true:
-- seen) or numbers that are added. options: causal, window, sinks, cu_seqlens, softcap, as the op has them.
---@param q Tensor
---@param k Tensor
---@param v Tensor
---@param bias? Tensor
---@param given? table
---@return Tensor
function M.attention(q, k, v, bias, given)
  tensors("attention", "q", q, "k", k, "v", v)
  local o = options.read("unfused.attention", given,
    { causal = false, window = options.none, sinks = options.none, cu_seqlens = options.none,
      softcap = 0 },
    { window = "an integer >= 0", sinks = "an integer >= 0", cu_seqlens = "a tensor", softcap = "a number >= 0" })
  local group = q.shape[2] // k.shape[2]
  if group > 1 then
    local function repeated(x) return x:unsqueeze(2):tile(1, 1, group, 1, 1):flatten(1, 2) end
    k, v = repeated(k), repeated(v)
  end
  local scores = ty.matmul(q, k:transpose(-2, -1)) * (1 / math.sqrt(q.shape[4]))
  if o.softcap > 0 then scores = (scores / o.softcap):tanh() * o.softcap end
  if bias and bias.dtype ~= "bool" then scores = scores + bias:to(scores.dtype) end
  local see = visible(q.shape[3], k.shape[3], o, q.device)
  if bias and bias.dtype == "bool" then see = see and see:logical_and(bias) or bias end
  if see then scores = scores:masked_fill(see:logical_not(), -math.huge) end
  return ty.matmul(scores:softmax(-1), v)
end

--- ty.gated_linear_attention as its recurrence, one token after the other: q, k, g [b, h, t, dk] (g: logarithms of the
-- gates), v [b, h, t, dv] to y [b, h, t, dv] and the last state [b, h, dk, dv].
---@param q Tensor
---@param k Tensor
---@param v Tensor
---@param g Tensor
---@return Tensor y, Tensor state
function M.gated_linear_attention(q, k, v, g)
  tensors("gated_linear_attention", "q", q, "k", k, "v", v, "g", g)
  local state, rows = 0, {}
  for t = 0, q.shape[3] - 1 do
    local function at(x) return x:select(2, t) end
    state = at(g):exp():unsqueeze(-1) * state + at(k):unsqueeze(-1) * at(v):unsqueeze(-2)
    rows[t + 1] = (at(q):unsqueeze(-1) * state):sum(-2) / math.sqrt(q.shape[4])
  end
  return ty.stack(rows, 2), state
end

-- One step of each cell: x and u, the gates' parts of input and state [heads, b, gates * d]; s, the state; gate(p, i),
-- one of them.
local cells, gates_of, states_of = {}, { lstm = 4, gru = 3, slstm = 4 }, { lstm = 2, gru = 1, slstm = 4 }

function cells.lstm(x, u, s, gate)
  local p = x + u
  local i, f, g, o = gate(p, 0):sigmoid(), gate(p, 1):sigmoid(), gate(p, 2):tanh(), gate(p, 3):sigmoid()
  local c = f * s[2] + i * g
  return { o * c:tanh(), c }
end

function cells.gru(x, u, s, gate)
  local reset, z = (gate(x, 0) + gate(u, 0)):sigmoid(), (gate(x, 1) + gate(u, 1)):sigmoid()
  local n = (gate(x, 2) + reset * gate(u, 2)):tanh()
  return { n + z * (s[1] - n) }
end

function cells.slstm(x, u, s, gate)
  local p = x + u
  local i, z, o = gate(p, 0), gate(p, 2):tanh(), gate(p, 3):sigmoid()
  local kept = ty.log_sigmoid(gate(p, 1)) + s[4]
  local m = ty.maximum(i, kept)
  local write, keep = (i - m):exp(), (kept - m):exp()
  local c, n = keep * s[2] + write * z, keep * s[3] + write
  return { o * (c / n), c, n, m }
end

--- ty.recurrence from a state of zeros, step by step: x [t, b, heads * gates * d] with weight [heads, gates * d, d] to
-- y [t, b, heads * d]. options: cell ("lstm", "gru" or "slstm").
---@param x Tensor
---@param weight Tensor
---@param given {cell: string}
---@return Tensor
function M.recurrence(x, weight, given)
  local o = options.read("unfused.recurrence", given, { cell = "lstm" }, { cell = '"lstm" or "gru" or "slstm"' })
  options.expect("unfused.recurrence", "x", x, "a tensor")
  options.expect("unfused.recurrence", "weight", weight, "a tensor")
  local gates = gates_of[o.cell]
  if weight.ndim ~= 3 or x.ndim ~= 3 or weight:size(1) ~= gates * weight:size(2)
    or x:size(2) ~= weight:size(0) * weight:size(1) then
    options.fail("unfused.recurrence: weight: expected [heads, %d * d, d] for x [t, b, heads * %d * d], got [%s] for "
      .. "[%s]", gates, gates, table.concat(weight.shape, ", "), table.concat(x.shape, ", "))
  end
  local t, b, heads, d = x:size(0), x:size(1), weight:size(0), weight:size(2)
  local function gate(p, i) return p:narrow(-1, i * d, d) end
  local steps, across = x:reshape(t, b, heads, gates * d):transpose(1, 2), weight:transpose(1, 2)
  local state, ys = {}, {}
  for i = 1, states_of[o.cell] do
    state[i] = ty.full({ heads, b, d }, i == 4 and -math.huge or 0, { dtype = x.dtype, device = x.device })
  end
  for k = 0, t - 1 do
    state = cells[o.cell](steps:select(0, k), state[1]:matmul(across), state, gate)
    ys[k + 1] = state[1]
  end
  return ty.stack(ys, 0):transpose(1, 2):reshape(t, b, heads * d)
end

--- ty.long_conv by transforms of all lines, products of all spectra and transforms back. x [..., c, t], kernel [c,
-- taps].
---@param x Tensor
---@param kernel Tensor
---@param ahead? integer
---@return Tensor
function M.long_conv(x, kernel, ahead)
  local given = { x = x, kernel = kernel }
  for _, name in ipairs { "x", "kernel" } do
    local value = given[name]
    if not ty.is_tensor(value) or value.ndim < 2 then
      options.fail("unfused.long_conv: %s: expected a tensor [.., c, t], got %s", name, options.describe(value))
    end
  end
  if ahead ~= nil then options.expect("unfused.long_conv", "ahead", ahead, "an integer >= 0") end
  local t, n = x.shape[x.ndim], 2
  while n < t + kernel.shape[2] do n = 2 * n end
  return ty.irfft(ty.complex_mul(ty.rfft(x, n), ty.rfft(kernel, n)), n):narrow(-1, ahead or 0, t)
end

-- Levels whose corners have a row each come first; of a hash grid's table, where they begin, what corners' coordinates
-- are multiplied by, and which levels those are.
local hash_primes = { 1, 2654435761, 805459861 }
local function hash_levels(dims, resolutions, entries, device)
  local first, rows, dense, factors = {}, 0, 0, {}
  for level, r in ipairs(resolutions) do
    local corners = (r + 1.0) ^ dims
    if corners <= entries then dense = level end
    first[level], rows = rows, rows + math.tointeger(math.min(corners, entries))
    for j = 1, dims do
      local by = corners <= entries and math.tointeger((r + 1.0) ^ (j - 1)) or hash_primes[j]
      factors[j] = factors[j] or {}
      factors[j][level] = by >= 1 << 31 and by - (1 << 32) or by
    end
  end
  local function integers(list) return ty.tensor(list, { dtype = "i32", device = device }) end
  for j = 1, dims do factors[j] = integers(factors[j]) end
  return integers(first), factors, dense
end

--- ty.hash_grid corner by corner: rows by integer products and exclusive or, a lookup, and a product with the weights,
-- of all levels at once. Levels' resolutions must rise.
---@param x Tensor  [n, 2 or 3]
---@param rows Tensor  [rows, features]: the table
---@param resolutions integer[]
---@param entries integer
---@return Tensor
function M.hash_grid(x, rows, resolutions, entries)
  local who = "unfused.hash_grid"
  for name, value in pairs { x = x, rows = rows } do
    if not ty.is_tensor(value) or value.ndim ~= 2 then
      options.fail("%s: %s: expected a tensor [n, ...], got %s", who, name, options.describe(value))
    end
  end
  options.expect(who, "resolutions", resolutions, "a list")
  options.expect(who, "entries", entries, "an integer >= 2")
  for i, r in ipairs(resolutions) do options.expect(who, ("resolutions[%d]"):format(i), r, "an integer >= 1") end
  local dims, levels = x.shape[2], #resolutions
  if dims ~= 2 and dims ~= 3 then options.fail("%s: x: expected [n, 2 or 3], got %s", who, options.describe(x)) end
  local first, factors, dense = hash_levels(dims, resolutions, entries, x.device)
  local sides = ty.tensor(resolutions, { dtype = x.dtype, device = x.device })
  local part, share = {}, {}
  for j = 1, dims do
    local at = x:select(1, j - 1):clamp(0, 1):unsqueeze(1) * sides
    local cell = ty.minimum(at:detach():floor(), sides - 1)
    local low = cell:to "i32" * factors[j]
    part[j], share[j] = { [0] = low, low + factors[j] }, { [0] = 1 - (at - cell), at - cell }
  end
  local y
  for k = 0, (1 << dims) - 1 do
    local sum, joined, weight
    for j = 1, dims do
      local up = k >> (j - 1) & 1
      local near, far = part[j][up]:narrow(1, 0, dense), part[j][up]:narrow(1, dense, levels - dense)
      sum, joined = sum and sum + near or near, joined and joined:bitwise_xor(far) or far
      weight = weight and weight * share[j][up] or share[j][up]
    end
    local row = ty.cat({ sum, joined:bitwise_and(entries - 1) }, 1) + first
    local value = ty.embedding(rows, row) * weight:unsqueeze(-1)
    y = y and y + value or value
  end
  return y:reshape(x.shape[1], levels * rows.shape[2])
end

--- ty.hash_field as unfused.hash_grid with linear layers behind it; the arguments are those of the op.
---@param x Tensor
---@param rows Tensor
---@param first Tensor
---@param last Tensor
---@param resolutions integer[]
---@param entries integer
---@param hidden? Tensor
---@return Tensor
function M.hash_field(x, rows, first, last, resolutions, entries, hidden)
  options.expect("unfused.hash_field", "first", first, "a tensor")
  options.expect("unfused.hash_field", "last", last, "a tensor")
  local h = ty.linear(M.hash_grid(x, rows, resolutions, entries), first):relu()
  if hidden ~= nil then
    options.expect("unfused.hash_field", "hidden", hidden, "a tensor")
    for i = 0, hidden:size(0) - 1 do h = ty.linear(h, hidden:select(0, i)):relu() end
  end
  return ty.linear(h, last)
end

return M
