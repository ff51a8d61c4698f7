--- ShiftAddViT: a trained vision transformer made of shifts and additions where it can be. You et al. 2023,
-- "ShiftAddViT: Mixture of Multiplication Primitives Towards Efficient Vision Transformer".
--
--     shiftadd.attention(model)                 -- queries and keys of -1 and 1, linear in the tokens
--     ... train ...
--     shiftadd.shift(model, { targets = "attention" })      -- weights of powers of two, inputs of 8 bits
--     ... train ...
--     shiftadd.mixture(model, { latencies = shiftadd.latencies(model) })    -- two experts, a token goes to one
--     ... train, with shiftadd.balance(model) in the loss ...
--     shiftadd.deploy(model)                    -- shifts of integers: ty.matmul_shift
--
-- Works on the ViTs of tycho.models. Sums with -1 and 1 are computed by products of floats that give the same.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local nn = ty.nn
local surgery = nn.surgery
local expect, fail, none = arguments.expect, arguments.fail, arguments.none
local M = {}

local LOWEST = 14 -- weights are 2^-14 to 1, as in five bits with a sign: Elhoushi et al. 2021, "DeepShift"

-- x as `value` in the forward pass; its gradient passes as if nothing had been done.
local function straight(x, value) return x + ty.no_grad(function() return value - x end) end

-- ---- powers of two ----

--- Codes of weights for ty.matmul_shift, i8: sign * (p + 1) with the nearest power p - 14, within [0, 14]; 0 for 0.
---@param w Tensor
---@return Tensor codes
function M.codes(w)
  expect("prune.shiftadd.codes", "w", w, "a tensor")
  return ty.no_grad(function()
    local p = w:detach():abs():clamp(2 ^ -20):log2():round():clamp(-LOWEST, 0) + (LOWEST + 1)
    return (w:detach():sign() * p):to "i8"
  end)
end

--- The weights of codes, f32.
---@param codes Tensor
---@return Tensor
function M.decode(codes)
  expect("prune.shiftadd.decode", "codes", codes, "a tensor")
  return ty.no_grad(function()
    local c = codes:to "f32"
    return c:sign() * (c:abs() - (LOWEST + 1)):exp2()
  end)
end

--- w rounded to powers of two, whose gradient passes straight through.
---@param w Tensor
---@return Tensor
function M.power(w)
  expect("prune.shiftadd.power", "w", w, "a tensor")
  return straight(w, M.decode(M.codes(w)):to(w.dtype))
end

-- Inputs in 8 bits, each row by its largest element: whole numbers and scales [..., 1].
local function bytes_of(x)
  local scale = ty.no_grad(function() return x:detach():abs():max(-1, true):clamp(1e-12) / 127 end)
  local whole = x / scale
  return straight(whole, ty.no_grad(function() return whole:round():clamp(-127, 127) end)), scale
end

local function product(self, x)
  local whole, scale = bytes_of(x)
  if self._shift.codes then
    local sums = ty.matmul_shift(whole:to "i8", self._shift.codes)
    return sums:to "f32" * (scale * 2 ^ -LOWEST)
  end
  return ty.linear(whole, M.power(self.weight)) * scale
end

local shifted = surgery.wrapper { name = "Shift", field = "_shift",
  forward = function()
    return function(self, x, residual, activation)
      local y = product(self, x)
      return surgery.finish(self.bias and y + self.bias or y, residual, activation)
    end
  end,
  describe = function(state) return state.codes and "shifts of integers" or "powers of two" end }

local function shift(model, options)
  local who = "prune.shiftadd.shift"
  expect(who, "model", model, "a module")
  local o = arguments.read(who, options, { targets = none }, { targets = false })
  local list = surgery.find(who, model, { targets = o.targets })
  if #list == 0 then fail("%s: targets: no linear layer matches %s", who, arguments.describe(o.targets)) end
  for _, layer in ipairs(list) do
    if layer.module.fan_in_fan_out then fail("%s: %s: expected a weight [outputs, inputs]", who, layer.name) end
  end
  for _, layer in ipairs(list) do shifted:wrap(layer.module, {}) end
  return model
end

--- Gives linear layers weights of powers of two and inputs of 8 bits, to be trained straight through, in place.
-- options: targets (which layers, as nn.surgery.find has them; all linear ones). Returns the model.
---@param model Module
---@param options? { targets?: string|string[]|function }
---@return Module
function M.shift(model, options) return nn.for_caller(shift, model, options) end

--- Has the layers of shift() compute with integers from here on, without gradients for their weights. Returns the
-- model.
---@param model Module
---@return Module
function M.deploy(model)
  local who = "prune.shiftadd.deploy"
  expect(who, "model", model, "a module")
  local count = 0
  for _, module in model:named_modules() do
    local state = shifted:state(module)
    if state then
      state.codes, count = ty.keep(M.codes(module.weight)), count + 1
    end
  end
  if count == 0 then fail("%s: model: expected one of prune.shiftadd.shift, got %s", who, arguments.describe(model)) end
  return model
end

-- ---- attention ----

--- Attention with codes: queries and keys are the signs of q and k, and how near they are is d + q'k, twice the places
-- at which they agree. Linear in the tokens, since q'(k v') is computed from the right; products are additions of v and
-- of its sums, with one division for each output.
---@param q Tensor  [n, heads, t, d]
---@param k Tensor  [n, heads, t, d]
---@param v Tensor  [n, heads, t, dv]
---@return Tensor
function M.binary_attention(q, k, v)
  local who = "prune.shiftadd.binary_attention"
  for name, t in pairs { q = q or false, k = k or false, v = v or false } do
    expect(who, name, t, "a tensor")
    if t.ndim ~= 4 then fail("%s: %s: expected [n, heads, t, d], got %s", who, name, arguments.describe(t)) end
  end
  local d, tokens = q.shape[4], k.shape[3]
  -- Straight through where a code may still turn: Courbariaux et al. 2016, "Binarized Neural Networks".
  local function code(x)
    return straight(x:clamp(-1, 1), ty.no_grad(function() return x:detach():ge(0):to(x.dtype) * 2 - 1 end))
  end
  q, k = code(q), code(k)
  local above = q:matmul(k:transpose(2, 3):matmul(v)) + v:sum(2, true) * d
  local below = q:matmul(k:sum(2, true):transpose(2, 3)) + d * tokens
  return above / below:clamp(1e-6)
end

local binary = surgery.wrapper { name = "Binary", field = "_binary", fields = { "near" },
  forward = function()
    return function(self, x)
      local q = nn.split_heads(self.query(x), self.heads)
      local k = nn.split_heads(self.key(x), self.heads)
      local values = self.value(x)
      local y = M.binary_attention(q, k, nn.split_heads(values, self.heads))
      y = y:transpose(1, 2):reshape(values.shape)
      local state = self._binary
      local n, t, width = table.unpack(values.shape)
      -- What is near in the picture: a depthwise convolution over the patches' values, 0 to begin with.
      local patches = values:narrow(1, 1, t - 1):transpose(1, 2):reshape(n, width, state.rows, state.columns)
      local near = self.near(patches):flatten(2):transpose(1, 2)
      return y + ty.concat({ ty.zeros({ n, 1, width }, { dtype = y.dtype, device = y.device }), near }, 1)
    end
  end }

local function parts_of(who, model)
  expect(who, "model", model, "a module")
  local vit = rawget(model, "vit")
  if not vit or not rawget(vit, "embeddings") then
    fail("%s: model: expected a ViTForImageClassification, got %s", who, arguments.describe(model))
  end
  return vit, vit.encoder.layer
end

local function attention(model)
  local vit, layers = parts_of("prune.shiftadd.attention", model)
  for _, layer in ipairs(layers) do
    local a = layer.attention.attention
    local width = a.value.weight.shape[1]
    local near = nn.Conv2d(width, width, 3, { padding = 1, groups = width }):to(a.value.weight.device)
    nn.init.zeros(near.weight)
    nn.init.zeros(near.bias)
    a.near = near
    binary:wrap(a, { rows = vit.embeddings.rows, columns = vit.embeddings.columns })
  end
  return model
end

--- Gives a vision transformer attention with codes and a depthwise convolution on the values beside it, in place.
-- Returns the model.
---@param model Module
---@return Module
function M.attention(model) return nn.for_caller(attention, model) end

-- ---- two experts ----

local function square_of_variation(x)
  return (x - x:mean()):square():mean() / (x:mean():square() + 1e-10)
end

--- The loss that sends tokens to experts by how fast they are: the squared coefficients of variation of latency times
-- the sum of probabilities, and of latency times the tokens that were sent, whose gradient is that of the sums. It is 0
-- where both are inverse to latency.
---@param p Tensor          [tokens, experts], probabilities
---@param latencies Tensor  [experts], of any unit
---@return Tensor loss
function M.balance_loss(p, latencies)
  local who = "prune.shiftadd.balance_loss"
  expect(who, "p", p, "a tensor")
  expect(who, "latencies", latencies, "a tensor")
  if p.ndim ~= 2 or latencies:numel() ~= p.shape[2] then
    fail("%s: latencies: expected %d of them, got %s", who, p.ndim == 2 and p.shape[2] or 2,
      arguments.describe(latencies))
  end
  local alpha = latencies / latencies:sum()
  local sums = p:sum(0)
  local counts = ty.no_grad(function() return ty.one_hot(p:argmax(1), p.shape[2]):to(p.dtype):sum(0) end)
  return square_of_variation(sums * alpha) + square_of_variation(straight(sums, counts) * alpha)
end

local mixed = surgery.wrapper { name = "Mixture", field = "_mixture", fields = { "router", "up", "down" },
  forward = function()
    return function(self, x)
      local state = self._mixture
      x = x + self.attention(self.layernorm_before(x))
      local y = self.layernorm_after(x)
      local flat = y:reshape(-1, y.shape[3])
      local p = self.router(flat):softmax(1)
      local choice, order, back, many
      if state.split then
        choice = ty.arange(flat.shape[1]) % 2
      else
        choice = p:detach():argmax(1)
      end
      ty.no_grad(function()
        order = choice:argsort(0)
        back, many = order:argsort(0), choice:sum():item()
      end)
      local few, all = flat.shape[1] - many, flat:index_select(0, order)
      local results = {}
      if few > 0 then results[1] = self.output(self.intermediate(all:narrow(0, 0, few))) end
      if many > 0 then
        results[#results + 1] = self.down(self.up(all:narrow(0, few, many), nil, self.intermediate.activation))
      end
      local out = ty.concat(results, 0):index_select(0, back)
      if not state.split then out = out * p:gather(1, choice:unsqueeze(1)) end
      state.loss = M.balance_loss(p, state.latencies)
      state.choice = ty.keep(choice:detach():reshape(y.shape[1], y.shape[2]))
      return x + out:reshape(y.shape)
    end
  end }

local function mixture(model, options)
  local who = "prune.shiftadd.mixture"
  local _, layers = parts_of(who, model)
  local o = arguments.read(who, options, { latencies = { 1, 1 }, split = false }, { latencies = "a list of numbers" })
  if #o.latencies ~= 2 or not (o.latencies[1] > 0 and o.latencies[2] > 0) then
    fail("%s: latencies: expected two above 0, of products and of shifts, got %d", who, #o.latencies)
  end
  for _, layer in ipairs(layers) do
    local device = layer.output.dense.weight.device
    layer.router = nn.Linear(layer.output.dense.weight.shape[1], 2):to(device)
    nn.init.normal(layer.router.weight, 0, 0.01)
    nn.init.zeros(layer.router.bias)
    layer.up, layer.down = layer.intermediate.dense:clone(), layer.output.dense:clone()
    if not o.split then -- what probabilities of a half take away at first; powers of two stay powers of two
      ty.no_grad(function()
        for _, last in ipairs { layer.output.dense, layer.down } do
          last.weight:detach():mul_(2)
          if last.bias then last.bias:detach():mul_(2) end
        end
      end)
    end
    for _, expert in ipairs { layer.up, layer.down } do
      if not shifted:state(expert) then shifted:wrap(expert, {}) end
    end
    mixed:wrap(layer, { latencies = ty.keep(ty.tensor(o.latencies, { dtype = "f32" }):to { device = device }),
      split = o.split })
  end
  return model
end

--- Gives the feed-forward networks of a vision transformer a second expert of shifts, a copy to begin with, and a
-- router that sends each token to one, in place; what an expert says counts by its probability, and both say twice as
-- much to begin with, so that the model does what it did. options: latencies ({ 1, 1 }: of the expert of products and
-- that of shifts; measure them with latencies()), split (false; true, for comparison: every other token, without a
-- router).
-- Returns the model.
---@param model Module
---@param options? { latencies?: number[], split?: boolean }
---@return Module
function M.mixture(model, options) return nn.for_caller(mixture, model, options) end

--- The mean over layers of balance_loss() in the last pass: what is added to the loss, times 0.01.
---@param model Module
---@return Tensor
function M.balance(model)
  local who = "prune.shiftadd.balance"
  local _, layers = parts_of(who, model)
  local sum
  for _, layer in ipairs(layers) do
    local state = mixed:state(layer)
    if not state or not state.loss then fail("%s: model: expected one with a mixture, after a pass", who) end
    sum = sum and sum + state.loss or state.loss
  end
  return sum / #layers
end

--- Which expert each token of the last pass went to, by layer: i64 [n, tokens], 0 products and 1 shifts.
---@param model Module
---@return Tensor[]
function M.choices(model)
  local _, layers = parts_of("prune.shiftadd.choices", model)
  local list = {}
  for i, layer in ipairs(layers) do
    local state = mixed:state(layer)
    if not state or not state.choice then
      fail "prune.shiftadd.choices: model: expected one with a mixture, after a pass"
    end
    list[i] = state.choice
  end
  return list
end

--- Seconds that the feed-forward network of a model's first layer takes for so many tokens (1024), by products and by
-- shifts of integers, each the least of several runs on this machine.
---@param model Module
---@param tokens? integer
---@return number[] seconds  of products and of shifts
function M.latencies(model, tokens)
  local who = "prune.shiftadd.latencies"
  local _, layers = parts_of(who, model)
  tokens = expect(who, "tokens", tokens, "an integer >= 1 or nil") or 1024
  local up, down = layers[1].intermediate.dense:clone(), layers[1].output.dense:clone()
  local x = ty.randn({ tokens, up.weight.shape[2] }, { device = up.weight.device })
  local function least()
    local best = math.huge
    for _ = 1, 5 do
      ty.scope(ty.no_grad, function()
        local begun = os.clock()
        local y = down(up(x)):sum():item()
        best = y == y and math.min(best, os.clock() - begun) or best
      end)
    end
    return math.max(best, 1e-9)
  end
  local products = least()
  for _, layer in ipairs { up, down } do
    if not shifted:state(layer) then shifted:wrap(layer, {}) end
    shifted:state(layer).codes = ty.keep(M.codes(layer.weight))
  end
  return { products, least() }
end

-- ---- what is computed ----

--- What one picture takes of each kind, { multiplications, shifts, additions }, counted from the shapes of the layers:
-- patches, linear layers (of shifts: the products that scale inputs and outputs are multiplications), attention, and in
-- a mixture what the last pass sent to each expert, on average. Norms, activations and softmax do not count.
---@param model Module
---@return { multiplications: number, shifts: number, additions: number }
function M.count(model)
  local vit, layers = parts_of("prune.shiftadd.count", model)
  local found = { multiplications = 0, shifts = 0, additions = 0 }
  local patches = vit.embeddings.rows * vit.embeddings.columns
  local t = patches + 1
  local function dense(count)
    found.multiplications, found.additions = found.multiplications + count, found.additions + count
  end
  local function linear(layer, tokens)
    local outputs, inputs = layer.weight.shape[1], layer.weight.shape[2]
    if not shifted:state(layer) then return dense(tokens * outputs * inputs) end
    local count = tokens * outputs * inputs
    found.shifts, found.additions = found.shifts + count, found.additions + count
    found.multiplications = found.multiplications + tokens * (inputs + outputs)
  end
  local projection = vit.embeddings.patch_embeddings.projection.weight
  dense(patches * projection:numel())
  for _, layer in ipairs(layers) do
    local a = layer.attention.attention
    local width = a.value.weight.shape[1]
    for _, name in ipairs { "query", "key", "value" } do linear(a[name], t) end
    linear(layer.attention.output.dense, t)
    if binary:state(a) then
      local d = width // a.heads
      found.additions = found.additions + 2 * t * width * d + 3 * t * width
      found.multiplications = found.multiplications + t * width -- the divisions
      dense(9 * patches * width)
    else
      dense(2 * t * t * width)
    end
    local state = mixed:state(layer)
    if state then
      local share = state.choice and state.choice:to("f64"):mean():item() or 0.5
      linear(layer.intermediate.dense, (1 - share) * t)
      linear(layer.output.dense, (1 - share) * t)
      linear(layer.up, share * t)
      linear(layer.down, share * t)
      dense(t * layer.router.weight:numel())
    else
      linear(layer.intermediate.dense, t)
      linear(layer.output.dense, t)
    end
  end
  linear(model.classifier, 1)
  return found
end

return M
